"""`pivotrl verify`: agreement with recorded rewards, exit codes, what is set apart, and that a wrong reward is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.profile_run import run_stage, sometimes_right
from fakes.runs import trajectory, write_ingest

from pivotrl.rollouts.scripted import ScriptedEngine

GRADED = Path(__file__).resolve().parents[1] / "gym_cases" / "graded.jsonl"
SINGLE = ["--verifier", "gym_single_step", "word_count_similarity_threshold=0.1"]


def rollouts(grader: str, **knobs: Any) -> list[dict[str, Any]]:
    """The invented rows of one grader and setting, with the rewards that nemo-gym 0.7.0 gave."""
    rows = []
    for case in map(json.loads, GRADED.read_text(encoding="utf-8").strip().split("\n")):
        verdict = case["verdicts"].get("0.7.0")
        if case["grader"] == grader and case["knobs"] == knobs and verdict and "reward" in verdict:
            given = {"responses_create_params": {"input": [{"role": "user", "content": "go"}]}, "uuid": str(len(rows)), **case["row"]}
            rows.append({**given, "response": {"output": case["output"]}, "reward": verdict["reward"]})
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("single_step_tool_use_with_argument_comparison__example_rollouts.jsonl", SINGLE, None),
        ("swe_pivot__example_rollouts.jsonl", ["--verifier", "gym_swe_pivot"], "swe_pivot__example.jsonl"),
        ("terminus_judge__example_rollouts.jsonl", ["--verifier", "gym_terminus", "enable_llm_judge=false"], None),
    ],
)
def test_recorded_rollouts_agree(cli: Any, shared_data: Path, name: str, words: list[str], expected: str | None) -> None:
    """The rewards that ship with the graders. Those of the terminal rows came from a judge that said no, as similarity alone would have."""
    folder = shared_data / "gym_rows"
    joined = [] if expected is None else ["--expected", folder / expected]
    code, out, _ = cli("verify", folder / name, *joined, *words)
    assert code == 0
    assert out.strip().splitlines()[-1].startswith("agreement 1.0000 [0.5655, 1.0000] of gym_")
    assert out.strip().endswith("with 5 recorded rewards")


@pytest.mark.parametrize(
    ("grader", "words", "knobs", "least"),
    [
        ("single_step", SINGLE, {"word_count_similarity_threshold": 0.1}, 120),
        ("swe_pivot", ["--verifier", "gym_swe_pivot"], {}, 150),
        (
            "terminus",
            ["--verifier", "gym_terminus", "enable_llm_judge=false"],
            {"enable_string_similarity": True, "string_similarity_threshold": 0.9, "enable_llm_judge": False},
            150,
        ),
    ],
)
def test_one_wrong_reward_among_many_is_found(cli: Any, tmp_path: Path, grader: str, words: list[str], knobs: dict[str, Any], least: int) -> None:
    rows = rollouts(grader, **knobs)
    assert len(rows) >= least
    code, out, _ = cli("verify", write(tmp_path / "rows.jsonl", rows), *words)
    assert (code, out.splitlines()[-1][:17]) == (0, "agreement 1.0000 ")
    rows[7]["reward"] = 1 - rows[7]["reward"]
    code, out, _ = cli("verify", write(tmp_path / "rows.jsonl", rows), *words, "--json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert code == 1
    assert "rows.jsonl:8" in out
    assert [one["place"] for one in result["disagreements"]] == ["rows.jsonl:8"]
    assert result["num_disagreements"] == 1
    assert 0.95 < result["agreement"]["value"] < 1


def test_a_row_s_own_threshold_and_harness_count(cli: Any, tmp_path: Path) -> None:
    knobs = {"enable_string_similarity": True, "string_similarity_threshold": 0.9, "enable_llm_judge": False}
    rows = [{key: value for key, value in row.items() if key != "threshold"} for row in rollouts("terminus", **knobs) if "threshold" in row]
    assert cli("verify", write(tmp_path / "rows.jsonl", rows), "--verifier", "gym_terminus", "enable_llm_judge=false")[0] == 1
    swapped = [row | {"metadata": {"harness": "terminus_1"}} for row in rollouts("terminus", **knobs) if row["metadata"]["harness"] == "terminus_2"]
    assert cli("verify", write(tmp_path / "rows.jsonl", swapped), "--verifier", "gym_terminus", "enable_llm_judge=false")[0] == 1


def test_our_own_verifiers_may_disagree(cli: Any, tmp_path: Path) -> None:
    rows = rollouts("single_step", word_count_similarity_threshold=0.1)
    code, out, _ = cli("verify", write(tmp_path / "rows.jsonl", rows), "--verifier", "tool_call", "message=similarity")
    assert code == 0
    assert "disagreements" in out
    assert 0 < float(out.splitlines()[-1].split()[1]) < 1


def test_what_cannot_be_compared_is_counted_with_its_reason(cli: Any, tmp_path: Path) -> None:
    good = rollouts("single_step", word_count_similarity_threshold=0.1)[0]
    terminal = {"responses_create_params": {"input": "go"}, "expected_answer": "{}", "response": {"output": []}, "reward": 0.0}
    hostile: list[Any] = [
        {**good, "reward": None}, {**good, "reward": "1"}, {**good, "reward": True}, {**good, "response": None}, {**good, "response": {"output": 3}},
        {**good, "expected_action": None}, {**good, "expected_action": {"type": "dance"}}, {**good, "expected_action": [1]},
        {"reward": 1.0}, [1], "x", 3,
        {**good, "responses_create_params": 4}, {**good, "responses_create_params": {"input": [7]}}, {**terminal, "threshold": 2},
        {**terminal, "metadata": {"harness": "tmux"}}, {**terminal, "expected_answer": "<think>x</think>{}"},
    ]  # fmt: skip
    path = write(
        tmp_path / "rows.jsonl", [*hostile, {**good, "response": {"output": [None, 5, {"type": "message", "content": None}]}, "reward": 0}, good]
    )
    path.write_bytes(path.read_bytes() + b"\x00\xff\n{\n")
    code, out, err = cli("verify", path, *SINGLE, "--json", tmp_path / "out.json")
    unscored = json.loads((tmp_path / "out.json").read_text())["unscored"]
    assert code == 0, err
    assert out.splitlines()[-1].endswith("with 2 recorded rewards, 19 not compared")
    assert sum(unscored.values()) == 19
    assert unscored["no recorded reward"] == 3
    assert unscored["no response"] == 2
    assert unscored["threshold is not a number in [0, 1]"] == 1
    assert "Traceback" not in err


def test_a_profiled_run_is_judged_again(cli: Any, tmp_path: Path) -> None:
    """Under the verifier that profiled it, all agree; under one for another domain, right calls get 0."""
    write_ingest(tmp_path / "ingest", [trajectory(number) for number in range(4)])
    (tmp_path / "ingest" / "_SUCCESS").touch()
    run_stage(tmp_path, "profile", ScriptedEngine.from_function(sometimes_right))
    code, out, _ = cli("verify", tmp_path, "--verifier", "tool_call", "message=any")
    assert (code, out.splitlines()[-1].split()[1]) == (0, "1.0000")
    assert "with 48 recorded rewards" in out
    code, out, _ = cli("verify", tmp_path, "--verifier", "gym_terminus", "enable_llm_judge=false")
    assert code == 1
    assert "expert reply is unreadable" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nowhere.jsonl", *SINGLE], "nowhere.jsonl does not exist"),
        (["rows.jsonl", *SINGLE, "--expected", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["rows.jsonl", "--verifier", "gym_singlestep"], "did you mean 'gym_single_step'"),
        (["rows.jsonl", "--verifier", "gym_single_step"], "word_count_similarity_threshold is missing"),
        (["rows.jsonl", *SINGLE, "version=0.5.0"], "version is '0.5.0'"),
        (["rows.jsonl", *SINGLE], "no recorded reward (1)"),
        (["judge.jsonl", "--verifier", "gym_terminus"], "not decided: needs a judge (1)"),
    ],
)
def test_user_errors_exit_2_on_one_line(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], part: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [{"response": {}, "expected_action": {}}])
    reply = json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": "ls"}]})
    judge = {"expected_answer": reply, "response": {"output": [{"type": "message", "content": reply.replace("ls", "pwd")}]}, "reward": 0}
    write(tmp_path / "judge.jsonl", [{"responses_create_params": {"input": "go"}, **judge}])
    code, _, err = cli("verify", *words)
    lines = [line for line in err.splitlines() if line.startswith("pivotrl: error: ")]
    assert code == 2
    assert len(lines) == 1
    assert part in lines[0]
