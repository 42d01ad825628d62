"""`import-gym` and `export-gym`: every field survives the round trip, what the contract forbids goes, what breaks it is set apart with its place.

The contract is checked by tests of its own here, not through the exporter's: rows that break one rule each must be refused.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes.profile_run import run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pivotrl.gym.build_row import build_row
from pivotrl.gym.contract import problem_of
from pivotrl.gym.rows import GymRow, trajectory_of
from pivotrl.pivots.candidates import action_of
from pivotrl.pivots.parquet import read_rows
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.types import Domain, State, ToolOrigin

TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "temperature": 0.7,
    },
    "expected_action": {"type": "function_call", "name": "f", "arguments": '{"a": 1}'},
    "agent_ref": {"type": "responses_api_agents", "name": "mine"},
    "trajectory_id": "t-1",
    "pass_rate": 0.5,
    "pass_rate_total": 8,
    "pass_rate_passed": 4,
    "qwen_info": {"rewards": [0.0, 1.0], "reward_mean": 0.5, "reward_std": 0.5},
    "something_new": {"deep": [None, {"x": 1.5}], "text": "\u2028 \u00e9"},
}
REPLY = json.dumps({"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\n"}]})
TERMINAL: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "go"}], "parallel_tool_calls": True, "tool_choice": "auto"},
    "expected_answer": REPLY,
    "metadata": {"harness": "terminus_2", "category": "first"},
    "threshold": 0.8,
    "uuid": "0-1",
    "agent_ref": {"type": "responses_api_agents", "name": "terminus_judge_simple_agent"},
}


def changed(row: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with one member set, or removed where the value is Ellipsis."""
    row = copy.deepcopy(row)
    *above, last = place.split(".")
    parent: Any = row
    for key in above:
        parent = parent[int(key) if key.isdigit() else key]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return row


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def round_trip(cli: Any, folder: Path, rows: list[Any], *words: object) -> list[dict[str, Any]]:
    source = write(folder / "rows.jsonl", rows)
    code, _, err = cli("import-gym", source, "--out", folder / "run", *words)
    assert code == 0, err
    code, _, err = cli("export-gym", folder / "run", "--out", folder / "out.jsonl")
    assert code == 0, err
    return read(folder / "out.jsonl")


OTHER_CALL = {**ROW["expected_action"], "name": "g"}
BREACHES = {
    "no agent": ("agent_ref", ...),
    "agent of another kind": ("agent_ref.type", "agents"),
    "null metadata": ("responses_create_params.metadata", None),
    "null metadata of the row": ("metadata", None),
    "a seed": ("responses_create_params.seed", 3),
    "a seed of the row": ("seed", 3),
    "another tool choice": ("responses_create_params.tool_choice", "required"),
    "no tools": ("responses_create_params.tools", ...),
    "other tools": ("responses_create_params.tools", [{**TOOL, "name": "g"}]),
    "no input": ("responses_create_params.input", []),
    "text as input": ("responses_create_params.input", "go"),
    "an unknown item": ("responses_create_params.input", [{"type": "dance"}]),
    "arguments as an object": ("expected_action.arguments", {"a": 1}),
    "arguments that are no object": ("expected_action.arguments", "[1]"),
    "broken arguments": ("expected_action.arguments", '{"a": '),
    "an unknown action": ("expected_action.type", "dance"),
    "a batch of nothing": ("expected_action", {"type": "function_call_batch", "calls": []}),
    "a batch with another tool": ("expected_action", {"type": "function_call_batch", "calls": [ROW["expected_action"], OTHER_CALL]}),
    "a pass rate beyond 1": ("pass_rate", 1.5),
    "no action": ("expected_action", ...),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_each_rule_of_the_contract_refuses_a_row(breach: str) -> None:
    assert problem_of(ROW) is None
    problem = problem_of(changed(ROW, *BREACHES[breach]))
    assert problem is not None
    assert problem.what
    assert problem.rule
    assert problem.fix


def test_terminal_rows_have_rules_of_their_own() -> None:
    assert problem_of(TERMINAL) is None
    for place, value in (
        ("expected_answer", "<think>x</think>{}"),
        ("expected_answer", ""),
        ("metadata.harness", "tmux"),
        ("metadata", ...),
        ("threshold", 2),
    ):
        assert problem_of(changed(TERMINAL, place, value)) is not None, place


def test_every_field_survives_and_what_is_forbidden_goes(cli: Any, tmp_path: Path) -> None:
    other = changed(changed(ROW, "responses_create_params.input.1.content", "another"), "trajectory_id", "t-2")
    lenient = changed(changed(other, "responses_create_params.metadata", None), "responses_create_params.seed", 7)
    lenient = changed(changed(changed(lenient, "metadata", None), "agent_ref", ...), "responses_create_params.user", None)
    exported = round_trip(cli, tmp_path, [ROW, TERMINAL, lenient])
    assert exported[:2] == [ROW, TERMINAL]
    assert [list(row) for row in exported[:2]] == [list(ROW), list(TERMINAL)]
    expected = changed(other, "responses_create_params.user", None)
    expected["agent_ref"]["name"] = "single_step_tool_use_with_argument_comparison_agent"
    assert exported[2] == expected
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert (manifest["output"]["rows"], manifest["left_out"]) == (3, {})


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_EXTRA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(extras=st.lists(st.dictionaries(st.text("xyz_", min_size=2, max_size=6), _EXTRA, max_size=3), min_size=1, max_size=4), data=st.data())
def test_unknown_fields_survive_whatever_they_hold(
    tmp_path_factory: pytest.TempPathFactory, cli: Any, extras: list[dict[str, Any]], data: st.DataObject
) -> None:
    rows = []
    for number, extra in enumerate(extras):
        row = changed(data.draw(st.sampled_from([ROW, TERMINAL])), "responses_create_params.input.0.content", f"row {number}")
        row["responses_create_params"].update(extra)
        rows.append({**extra, **row})
    assert round_trip(cli, tmp_path_factory.mktemp("gym"), rows) == rows


def test_recorded_rows_survive(cli: Any, shared_data: Path, tmp_path: Path) -> None:
    """The rows that ship with the graders: equal but for null metadata, a missing agent and missing keys; rows without tools are refused."""
    folder = shared_data / "gym_rows"
    originals = [
        row
        for name in ("single_step*example.jsonl", "swe*example.jsonl", "terminus*example.jsonl")
        for path in sorted(folder.glob(name))
        for row in read(path)
    ]
    exported = round_trip(cli, tmp_path, originals)
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert (len(originals), len(exported), manifest["left_out"]) == (20, 15, {"the expected tool is not in tools": 5})
    assert [row["place"] for row in manifest["rows_left_out"]] == [f"rows.jsonl:{number}" for number in range(11, 16)]
    kept = [row for row in originals if row.get("pivot_tags") is None]
    for original, row in zip(kept, exported, strict=True):
        assert problem_of(row) is None
        assert {key: value for key, value in row.items() if key in original and key != "responses_create_params"} == {
            key: value for key, value in original.items() if key != "responses_create_params"
        }
        for key, value in original["responses_create_params"].items():
            assert key in row["responses_create_params"] or (key == "metadata" and value is None)
            assert key == "metadata" or row["responses_create_params"][key] == value


def test_tools_given_at_import_complete_rows_without(cli: Any, shared_data: Path, tmp_path: Path) -> None:
    rows = read(shared_data / "gym_rows" / "swe_pivot__example.jsonl")
    tools = [{"name": name, "description": "", "parameters": {"type": "object"}} for name in ("str_replace_editor", "execute_bash")]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    exported = round_trip(cli, tmp_path, rows, "--tools", tmp_path / "tools.json")
    assert [row["expected_action"] for row in exported] == [row["expected_action"] for row in rows]
    assert [tool["name"] for tool in exported[0]["responses_create_params"]["tools"]] == ["str_replace_editor", "execute_bash"]


def test_rows_with_a_secret_are_built_anew_from_what_is_left(cli: Any, tmp_path: Path) -> None:
    secret = "ghp_" + "a1B2" * 9
    row = changed(ROW, "responses_create_params.input.1.content", f"my token is {secret}")
    assert secret not in "".join(map(json.dumps, round_trip(cli, tmp_path, [ROW, row])))
    assert secret.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_broken_rows_do_not_stop_the_others(cli: Any, tmp_path: Path) -> None:
    hostile = [{}, [], 3, {"responses_create_params": 1}, changed(ROW, "responses_create_params.input", [[[]]]), changed(ROW, "expected_action", [])]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in hostile) + b"{\n\x00\n" + json.dumps(ROW).encode())
    assert cli("import-gym", tmp_path / "rows.jsonl", "--out", tmp_path / "run")[0] == 0
    assert cli("export-gym", tmp_path / "run", "--out", tmp_path / "out.jsonl")[0] == 0
    assert read(tmp_path / "out.jsonl") == [ROW]
    assert cli("import-gym", tmp_path / "rows.jsonl", "--out", tmp_path / "run")[0] == 0


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["import-gym", "nowhere", "--out", "run"], "nowhere does not exist"),
        (["import-gym", "bad.jsonl", "--out", "run"], "nothing was kept"),
        (["export-gym", "nowhere", "--out", "out.jsonl"], "nowhere is neither a run nor an ingest directory"),
        (["export-gym", "unusable", "--out", "out.jsonl"], "no row of unusable can be exported; first, rows.jsonl:1: the expected tool"),
    ],
)
def test_user_errors_exit_2_on_one_line(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], part: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.jsonl", [{}])
    write(tmp_path / "rows.jsonl", [changed(ROW, "responses_create_params.tools", ...)])
    assert cli("import-gym", "rows.jsonl", "--out", "unusable")[0] == 0
    code, _, err = cli(*words)
    lines = [line for line in err.splitlines() if line.startswith("pivotrl: error: ")]
    assert (code, len(lines)) == (2, 1)
    assert part in lines[0]
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_selected_pivots_carry_their_profile(cli: Any, tmp_path: Path) -> None:
    """Our own trajectories: rows are built from the state, keep the contract, and are read back as the same state and action."""
    sources = [trajectory(number) for number in range(4)]
    write_ingest(tmp_path / "ingest", sources)
    (tmp_path / "ingest" / "_SUCCESS").touch()
    engine = ScriptedEngine.from_function(sometimes_right)
    run_stage(tmp_path, "profile", engine)
    run_stage(tmp_path, "select", engine)
    (tmp_path / "ingest" / "manifest.json").write_text('{"outputs": {}}')
    code, _, err = cli("export-gym", tmp_path, "--out", tmp_path / "out.jsonl", "--agent", "ours")
    assert code == 0, err
    rows, pivots = read(tmp_path / "out.jsonl"), list(read_rows(tmp_path / "select" / "pivots.parquet"))
    rewards = {row["candidate_id"]: row["rewards"] for row in read_rows(tmp_path / "profile" / "profiles.parquet")}
    assert len(rows) == len(pivots) > 0
    for row, pivot in zip(rows, pivots, strict=True):
        own = rewards[pivot["candidate_id"]]
        mean = sum(own) / len(own)
        assert row["pass_rate"] == pivot["successes"] / pivot["num_samples"] == mean
        assert (row["pass_rate_total"], row["pass_rate_passed"], row["uuid"]) == (len(own), sum(own), pivot["candidate_id"])
        assert row["profile_info"]["rewards"] == own
        assert row["profile_info"]["reward_std"] == pytest.approx(math.sqrt(sum((reward - mean) ** 2 for reward in own) / len(own)))
        assert row["agent_ref"]["name"] == "ours"
        source = next(one for one in sources if one.id == pivot["trajectory_id"])
        back = trajectory_of(GymRow("out.jsonl", 1, 0, row))
        assert [(message.role, message.content, [(call.name, call.arguments) for call in message.tool_calls]) for message in back.messages] == [
            (message.role, message.content, [(call.name, call.arguments) for call in message.tool_calls])
            for message in source.messages[: pivot["message_index"] + 1]
        ]
        assert (back.tools, back.tool_origin) == (source.tools, ToolOrigin.ROW)


def test_a_terminal_agent_s_replies_stay_text() -> None:
    """Its actions are JSON in the text, read as a pseudo-call; a row must not show the policy a tool that it does not have."""
    history = {"role": "assistant", "content": f"I look.\n{REPLY}"}
    row = changed(TERMINAL, "responses_create_params.input", [{"role": "user", "content": "go"}, history, {"role": "user", "content": "screen"}])
    source = trajectory_of(GymRow("rows.jsonl", 1, 0, row))
    state = State(source.messages[:-1], source.tools, source.tool_origin)
    built = build_row(state, action_of(source.messages[-1]), domain=Domain.TERMINAL, uuid="u", parallel_tool_calls=True)
    assert problem_of(built) is None
    assert [item["content"] for item in built["responses_create_params"]["input"]] == ["go", history["content"], "screen"]
    assert built["expected_answer"] == REPLY
    assert "tools" not in built["responses_create_params"]
