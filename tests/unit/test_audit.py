"""`pivotrl audit` end to end: counts against verifiers whose answers are known, files and exit codes, errors, a page that is safe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pivotrl.observability.audit_page import write_page
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict
from pivotrl.verifiers.audit.measure import Audit, is_accepted, shown
from pivotrl.verifiers.audit.turns import ExpertTurn, labelled_turns
from pivotrl.verifiers.labelled import LabelledPair, read_pairs
from pivotrl.verifiers.protocol import Verifier

LABELLED = Path(__file__).parents[1] / "labelled"
STATE = State((), (Tool("get", "", {"properties": {"id": {"type": "string"}, "n": {"type": "integer"}}}),), ToolOrigin.ROW)


class Judge:
    """A verifier that is one function from (expert, action) to a verdict."""

    def __init__(self, judge: Callable[[Action, Action], Verdict]) -> None:
        self._judge = judge

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return self._judge(expert, action)


ANY = Judge(lambda expert, action: Verdict.ok(1.0, "anything"))
SAME_TEXT = Judge(lambda expert, action: Verdict.ok(1.0, "same") if shown(expert) == shown(action) else Verdict.ok(0.5, "other"))
DOWN = Judge(lambda expert, action: Verdict.infra("judge down") if action != expert else Verdict.ok(1.0, "same"))


def call(name: str = "get", **arguments: object) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


def turn(id_: str, expert: Action, *, quarantine_reason: str | None = None) -> ExpertTurn:
    return ExpertTurn(id_, f"task of {id_}", "test", "conversational", STATE, expert, quarantine_reason)


TURNS = [turn("a", call(id="x", n=1)), turn("b", call(id="y", n=2)), turn("c", Action("It is 5 to 12 and we can go.", (), None, ParseOutcome.ABSENT))]


def audited(verifier: Verifier, against: Verifier | None = None, turns: list[ExpertTurn] = TURNS) -> dict[str, Any]:
    audit = Audit(verifier, against)
    for one in turns:
        audit.add_turn(one)
    return audit.result()


def shares(result: dict[str, Any]) -> dict[str, tuple[float | None, int]]:
    return {row["name"]: (row["accepted"]["value"], row["accepted"]["n"]) for row in result["mutations"]}


def test_a_verifier_that_accepts_anything_accepts_every_corruption() -> None:
    result = audited(ANY)
    assert result["expert"]["accepted"]["value"] == 1
    assert {value for value, _ in shares(result).values()} == {1.0}
    assert shares(result)["off by one"] == (1.0, 2)
    assert shares(result)["nothing done"] == (1.0, 3)
    wrong = {row["name"]: len(row["wrong"]) for row in result["mutations"]}
    assert wrong["nothing done"] == 3
    assert wrong["JSON formatting"] == 0


def test_a_verifier_that_compares_text_accepts_no_change_of_text() -> None:
    found = shares(audited(SAME_TEXT))
    assert found["other thinking"] == (1.0, 3)
    assert found["keys reordered"] == (0.0, 2)
    assert {value for name, (value, _) in found.items() if name != "other thinking"} == {0.0}


def test_rewards_below_one_are_no_acceptance() -> None:
    assert not is_accepted(Verdict.ok(0.99, "nearly"))
    assert is_accepted(Verdict.ok(1.0, "fully"))
    assert not is_accepted(Verdict.invalid("malformed"))


def test_infra_verdicts_leave_every_share_and_are_counted() -> None:
    result = audited(DOWN)
    row = next(row for row in result["mutations"] if row["name"] == "nothing done")
    assert (row["accepted"]["n"], row["infra"], row["wrong"]) == (0, 3, [])
    assert row["accepted"]["value"] is None


def test_rejected_experts_are_listed_and_not_mutated_and_quarantined_ones_are_not_the_verifier_s_fault() -> None:
    malformed = turn("m", Action("{", (), None, ParseOutcome.MALFORMED))
    known = turn("q", call(id="z"), quarantine_reason="prompt too long")
    audit = Audit(
        Judge(lambda expert, action: Verdict.invalid("malformed") if action.parse is ParseOutcome.MALFORMED else Verdict.ok(0.0, "no")), None
    )
    for one in [*TURNS, malformed, known]:
        audit.add_turn(one)
    result = audit.result()
    assert audit.num_unexplained == result["expert"]["num_rejected"] == 3
    assert [row["id"] for row in result["expert"]["rejected"]] == ["a", "b", "c"]
    assert result["expert"]["quarantined"] == {"expert action is invalid: malformed": 1, "prompt too long": 1}
    assert (result["expert"]["accepted"]["value"], result["expert"]["accepted"]["n"]) == (0.0, 3)
    assert result["mutations"] == []


def test_agreement_says_what_would_change() -> None:
    rows = {row["kind"]: row for row in audited(ANY, SAME_TEXT)["agreement"]}
    assert (rows["expert"]["both"], rows["expert"]["same"]["value"]) == (3, 1.0)
    assert (rows["off by one"]["only_this"], rows["off by one"]["only_against"], rows["off by one"]["same"]["value"]) == (2, 0, 0.0)
    assert rows["off by one"]["flips"][0]["against_reason"] == "other"
    assert audited(ANY)["agreement"] is None


def test_a_second_audit_of_the_same_turns_repeats_it_but_for_time() -> None:
    first, second = audited(SAME_TEXT, ANY), audited(SAME_TEXT, ANY)
    assert first.pop("latency")["n"] == second.pop("latency")["n"] > 40
    assert first == second


def pair(id_: str, action: Action, *, is_equivalent: bool, needs_judge: bool = False) -> LabelledPair:
    return LabelledPair(id_, "conversational", STATE, call(id="x", n=1), action, is_equivalent, "because", needs_judge)


def test_precision_and_recall_against_counts_by_hand() -> None:
    """Accepts n >= 1: one equivalent accepted, one rejected; two different accepted, one rejected; the judge's pair apart."""
    audit = Audit(Judge(lambda expert, action: Verdict.ok(float('"n": 0' not in action.tool_calls[0].arguments), "n")), None)
    labels = [("a", 1, True), ("b", 0, True), ("c", 2, False), ("d", 3, False), ("e", 0, False)]
    for id_, n, is_equivalent in labels:
        audit.add_pair(pair(id_, call(id="x", n=n), is_equivalent=is_equivalent))
    audit.add_pair(pair("j", call(id="x", n=9), is_equivalent=False, needs_judge=True))
    labelled = audit.result()["labelled"]
    counts = {key: labelled["all"][key] for key in ("true_accepts", "false_accepts", "true_rejects", "false_rejects")}
    assert counts == {"true_accepts": 1, "false_accepts": 2, "true_rejects": 1, "false_rejects": 1}
    assert labelled["all"]["precision"]["value"] == pytest.approx(1 / 3)
    assert labelled["all"]["recall"]["value"] == pytest.approx(1 / 2)
    assert labelled["by_tool"]["get"] == labelled["all"]
    assert labelled["needs_judge"]["false_accepts"] == 1
    assert [row["id"] for row in labelled["wrong"]] == ["b", "c", "d"]


def test_labelled_pairs_give_each_expert_once() -> None:
    pairs = [pair("a", call(id="x"), is_equivalent=False), pair("b", call(id="y"), is_equivalent=False)]
    assert [(one.id, one.source) for one in labelled_turns(pairs)] == [("a", "labelled")]
    assert len(labelled_turns(read_pairs(LABELLED / "dev.jsonl"))) > 100


def test_the_page_escapes_actions_and_needs_no_network(tmp_path: Path) -> None:
    evil = turn("a", call(id="<script>alert(1)</script>\ud800", n=1))
    settings = {"verifier": {"type": "x"}, "against": None, "data": "<b>", "limit": None, "domain": None}
    page = write_page(tmp_path, {**audited(ANY, turns=[evil]), **settings}).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page


ROW = {
    "messages": [
        {"role": "user", "content": "Where is order 7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "get", "arguments": '{"id": "7", "full": true}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "in Oslo"},
        {"role": "assistant", "content": "Order 7 is in Oslo."},
    ],
    "tools": [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"id": {}, "full": {}}}}}],
}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return path


def test_trajectories_their_ingest_and_labelled_pairs_can_be_audited(rows: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = cli("audit", "rows.jsonl", "--verifier", "exact", "--against", "tool_call message=exact")
    assert code == 0, err
    assert out.strip().splitlines()[-1].startswith("expert actions accepted: 100.00 %")
    direct = json.loads(Path("runs/audit-exact/audit.json").read_text())
    assert direct["turns"][0]["n"] == 2
    assert direct["against"]["message"] == "exact"
    assert Path("runs/audit-exact/_SUCCESS").exists()
    assert Path("runs/audit-exact/index.html").stat().st_size > 5000

    assert cli("ingest", "rows.jsonl", "--out", "run/ingest")[0] == 0
    for data in ("run", "run/ingest"):
        assert cli("audit", data, "--verifier", "exact", "--out", "again")[0] == 0
        again = json.loads(Path("again/audit.json").read_text())
        assert again["mutations"] == direct["mutations"]

    words = ["audit", str(LABELLED / "dev.jsonl"), "message=any", "--verifier", "tool_call", "--limit", "3", "--out", "pairs"]
    code, out, _ = cli(*words)
    result = json.loads(Path("pairs/audit.json").read_text())
    assert code == 0
    assert sum(row["n"] for row in result["turns"]) == 3
    assert result["labelled"]["by_domain"]["message"]["precision"]["value"] < 0.7
    assert "precision" in out
    code, out, _ = cli(*words[:5], "--domain", "message", "--out", "pairs")
    result = json.loads(Path("pairs/audit.json").read_text())
    assert code == 0
    assert list(result["labelled"]["by_domain"]) == ["message"]
    assert {row["domain"] for row in result["turns"]} == {"message"}


def test_a_profile_s_quarantine_explains_a_rejected_expert(
    rows: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """The expert's message is rejected by a verifier that only knows calls: exit 1, unless the profile quarantined that turn."""
    from pivotrl.verbs import audit

    only_calls = Judge(lambda expert, action: Verdict.ok(float(bool(action.tool_calls)), "call"))
    monkeypatch.setattr(audit, "build_verifier", lambda config, expand: only_calls)
    assert cli("ingest", "rows.jsonl", "--out", "run/ingest")[0] == 0
    code, out, _ = cli("audit", "run", "--verifier", "exact")
    assert code == 1
    assert out.strip().endswith("rejected: 1")
    rejected = json.loads(Path("runs/audit-exact/audit.json").read_text())["expert"]["rejected"]
    assert rejected[0]["expert"] == "Order 7 is in Oslo."

    profile = Path("run/profile")
    profile.mkdir()
    (profile / "_SUCCESS").touch()
    from pivotrl.pivots.parquet import write_rows

    columns = {"candidate_id": "string", "quarantine_reason": "string"}
    write_rows(profile / "profiles.parquet", columns, [{"candidate_id": rejected[0]["id"], "quarantine_reason": "expert rejected"}])
    code, out, _ = cli("audit", "run", "--verifier", "exact")
    assert code == 0
    assert "quarantined: 1 (expert rejected)" in out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["nowhere", "--verifier", "exact"], ["nowhere does not exist", "labelled pairs or trajectories"]),
        (["rows.jsonl", "--verifier", "exct"], ["--verifier is 'exct'", "did you mean 'exact'?"]),
        (["rows.jsonl", "--verifier", "exact", "--against", "'"], ["--against is", "No closing quotation"]),
        (["rows.jsonl", "--verifier", "exact", "--against", "tool_call"], ["message is missing"]),
        (["rows.jsonl", "--verifier", "exact", "--labelled", "rows.jsonl"], ["states.json"]),
        (["empty.json", "--verifier", "exact"], ["nothing was kept"]),
        (["user.jsonl", "--verifier", "exact"], ["holds no expert turn"]),
        (["rows.jsonl", "--verifier", "exact", "--domain", "swe"], ["nothing of the domain swe", "conversational, terminal, swe, search"]),
    ],
)
def test_errors_are_one_line(rows: Path, cli: Callable[..., tuple[int, str, str]], words: list[str], parts: list[str]) -> None:
    rows.with_name("empty.json").write_text("[]")
    failed = {**ROW, "outcome": "failure", "messages": ROW["messages"][:3]}
    rows.with_name("user.jsonl").write_text(json.dumps({**failed, "reward": 0.0}) + "\n")
    code, out, err = cli("audit", *words)
    assert code == 2, out
    assert len([line for line in err.splitlines() if line.startswith("pivotrl: error:")]) == 1
    for part in parts:
        assert part in err
    assert not Path("runs").exists()
