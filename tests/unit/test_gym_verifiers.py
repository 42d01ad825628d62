"""The compatibility verifiers against the public graders' own verdicts on rows invented for every branch (tests/gym_cases).

What is pinned: rewards to 1e-12 for both versions of nemo-gym, through the same reading of rows as `pivotrl verify`; and that the verdicts are no
accident of a lenient comparison: every knob changes some of them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gym_cases.invented import all_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.gym_verifiers import GymSingleStepVerifierConfig, GymSwePivotVerifierConfig, GymTerminusVerifierConfig
from pivotrl.config.load import load_recipe
from pivotrl.errors import UserError
from pivotrl.gym.rows import GymRow, recorded
from pivotrl.trajectories.source import RowQuarantined
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.gym_similarity import TooCostly, similarity
from pivotrl.verifiers.gym_single_step import GymSingleStepVerifier
from pivotrl.verifiers.gym_swe_pivot import GymSwePivotVerifier, tool_category
from pivotrl.verifiers.gym_terminus import NEEDS_JUDGE, GymTerminusVerifier
from pivotrl.verifiers.protocol import Verifier

GRADED = Path(__file__).resolve().parents[1] / "gym_cases" / "graded.jsonl"
CASES = [json.loads(line) for line in GRADED.read_text(encoding="utf-8").split("\n") if line]
GRADERS = ("single_step", "swe_pivot", "terminus")
VERSIONS = ("0.4.0", "0.7.0")
STATE = State((), (), ToolOrigin.NONE)


def verifier_of(case: dict[str, Any], version: str) -> Verifier:
    knobs = {"version": version, **case["knobs"]}
    match case["grader"]:
        case "single_step":
            return GymSingleStepVerifier(GymSingleStepVerifierConfig(type="gym_single_step", **knobs))
        case "swe_pivot":
            return GymSwePivotVerifier(GymSwePivotVerifierConfig(type="gym_swe_pivot", **knobs))
        case _:
            row = case["row"]
            del knobs["version"]
            if "threshold" in row:
                knobs["string_similarity_threshold"] = row["threshold"]
            return GymTerminusVerifier(GymTerminusVerifierConfig(type="gym_terminus", harness=row["metadata"]["harness"], **knobs))


def judged(case: dict[str, Any], version: str) -> Verdict | None:
    """Our verdict on a case, or None where the row has no expert action that could be read."""
    row = {"responses_create_params": {"input": []}, **case["row"], "response": {"output": case["output"]}, "reward": 0.0}
    try:
        one = recorded(GymRow("graded.jsonl", 1, 0, row), {}).case
    except RowQuarantined:
        return None
    return verifier_of(case, version).verify(one.state, one.expert, one.action)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("grader", GRADERS)
def test_same_verdicts_as_the_public_grader(grader: str, version: str) -> None:
    different, counts = [], Counter[str]()
    for case in CASES:
        if case["grader"] != grader or version not in case["verdicts"]:
            continue
        public, ours = case["verdicts"][version], judged(case, version)
        if ours is None:
            # No expert action: the public grader scores the policy 0 for it, we set the row apart.
            counts["unreadable"] += 1
            same = public["reward"] == 0
        elif "judge" in public:
            counts["judge"] += 1
            same = (ours.kind, ours.reason) == (VerdictKind.ABSTAIN, NEEDS_JUDGE)
        else:
            counts[f"reward {public['reward']:.0f}"] += 1
            same = ours.kind in (VerdictKind.OK, VerdictKind.INVALID) and abs(ours.reward - public["reward"]) <= 1e-12
        if not same:
            different.append((case, public, ours))
    assert not different, different[:3]
    assert min(counts["reward 0"], counts["reward 1"]) >= 50
    assert counts["unreadable"] <= 10


def test_there_are_rows_for_every_public_reason() -> None:
    """The graders' own words for their verdicts: the rows reach all of them, save the ones that need a judge or a broken request."""
    seen = {(case["grader"], verdict.get("why")) for case in CASES for verdict in case["verdicts"].values()}
    assert sum(grader == "single_step" for grader, _ in seen) == 13
    assert {why for grader, why in seen if grader == "swe_pivot"} == {
        "none", "model_output_invalid", "tool_name_mismatch", "target_mismatch", "similarity_below_threshold", "unknown_error",
    }  # fmt: skip
    assert {why for grader, why in seen if grader == "terminus"} == {
        "none", "expected_answer_invalid", "model_output_invalid", "schema_check_failed", "task_complete_check_failed",
        "string_similarity_below_threshold", None,
    }  # fmt: skip
    assert len(CASES) >= 300


def test_every_knob_changes_some_verdict() -> None:
    """Against the default of each knob; otherwise a knob that is ignored would pass the comparison above."""
    changes = {
        "single_step": [
            {"word_count_similarity_threshold": 0.5},
            {"floating_point_comparison_threshold": 0.0},
            {"version": "0.4.0"},
            {"parallel_tool_call_rewarding": True},
            {"parallel_tool_call_rewarding": True, "allow_subset": True},
            {"parallel_tool_call_rewarding": True, "allow_superset": True, "parallel_tool_call_reward_mode": "fractional"},
            {"parallel_tool_call_rewarding": True, "allow_superset": True, "parallel_tool_call_reward_mode": "f1"},
        ],
        "swe_pivot": [
            {"version": "0.4.0"},
            {"reward_mode": "continuous"},
            {"enable_target_match": False},
            {"enable_argument_similarity": False},
            {"similarity_full_credit": 0.5},
            {"reward_mode": "continuous", "similarity_threshold": 0.6},
            {"reward_mode": "continuous", "enable_diff_size_shaping": False},
            {"reward_mode": "continuous", "diff_size_alpha": 0.7},
        ],
        "terminus": [{"enable_string_similarity": False}, {"string_similarity_threshold": 0.5}, {"enable_llm_judge": True}],
    }
    for grader, settings_of in changes.items():
        seen = []
        for knobs in [{}, *settings_of]:
            verdicts = [
                judged({**case, "knobs": {**case["knobs"], **knobs}}, "0.7.0") for case in CASES if case["grader"] == grader and not _own_knobs(case)
            ]
            seen.append(tuple((verdict.kind, verdict.reward) if verdict else None for verdict in verdicts))
        assert len(set(seen)) == len(seen), grader


def _own_knobs(case: dict[str, Any]) -> bool:
    """Cases of the default settings only: single_step must state a threshold, and terminus whether there is a judge."""
    stated = {"word_count_similarity_threshold": 0.1, "enable_string_similarity": True, "string_similarity_threshold": 0.9, "enable_llm_judge": False}
    return any(stated.get(key) != value for key, value in case["knobs"].items())


BUILT: dict[str, Verifier] = {
    "single_step": GymSingleStepVerifier(GymSingleStepVerifierConfig(type="gym_single_step", word_count_similarity_threshold=0.1)),
    "swe_pivot": GymSwePivotVerifier(GymSwePivotVerifierConfig(type="gym_swe_pivot")),
    "terminus": GymTerminusVerifier(GymTerminusVerifierConfig(type="gym_terminus", enable_llm_judge=False)),
}
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("abc /.\n\u00e9", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "path", "command", "old_str", "content"]), inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(st.sampled_from(["a", "path", "command", "new_str", "view_range", "patch"]), _VALUES, max_size=4)
_CALL = st.builds(lambda name, value: ToolCall(name, json.dumps(value)), st.sampled_from(["edit", "bash", "grep", "think", "browse"]), _OBJECTS)


def acts(*calls: ToolCall) -> Action:
    return Action("", calls, None, ParseOutcome.PARSED)


def says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


@settings(max_examples=80)
@given(call=_CALL)
def test_single_step_and_swe_accept_the_expert_but_for_words_and_ranges(call: ToolCall) -> None:
    """Their own holes reject some experts: a text of one word is exact, and a line range of no length overlaps nothing."""
    verdict = BUILT["single_step"].verify(STATE, acts(call), acts(call))
    assert verdict.reward == 1, verdict
    arguments = call.arguments_object() or {}
    if "view_range" not in arguments:
        assert BUILT["swe_pivot"].verify(STATE, acts(call), acts(call)).reward == 1


@pytest.mark.parametrize("name", BUILT)
@settings(max_examples=100)
@given(expert=st.text(max_size=40), action=st.text(max_size=40), arguments=st.text(max_size=30), name_of_tool=st.text(max_size=6))
def test_any_text_gets_a_verdict(name: str, expert: str, action: str, arguments: str, name_of_tool: str) -> None:
    calls = acts(ToolCall(name_of_tool, arguments), ToolCall("edit", arguments))
    broken = Action(action, (ToolCall("edit", arguments),), None, ParseOutcome.MALFORMED)
    for first in (says(expert), calls, acts(ToolCall("edit", "{}"))):
        for second in (says(action), calls, broken, Action(action, (), None, ParseOutcome.MALFORMED)):
            assert 0 <= BUILT[name].verify(STATE, first, second).reward <= 1


HOSTILE = {
    "deep lists": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "deeper than JSON is read": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a long number": '{"a": ' + "9" * 100_000 + "}",
    "a long command": json.dumps({"command": "".join(chr(0x4E00 + i % 20_000) for i in range(300_000))}),
    "a repetitive command": json.dumps({"command": "ab" * 200_000}),
    "a long path": json.dumps({"command": "ls " + "a/" * 200_000}),
    "slashes": json.dumps({"command": "ls " + "/" * 200_000}),
    "dots": json.dumps({"command": "ls " + "." * 200_000 + "!"}),
    "an infinite range": '{"command": "view", "view_range": [1e999, 3]}',
    "lone surrogates": '{"a": "\\ud800", "command": "\\udfff"}',
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("tool", ["edit", "bash", "read"])
def test_hostile_arguments_get_a_verdict(hostile: str, tool: str) -> None:
    action, variant, expert = (acts(ToolCall(tool, text)) for text in (HOSTILE[hostile], HOSTILE[hostile][:-1] + " }", '{"command": "ls a/b"}'))
    for first, second in ((expert, action), (action, expert), (action, variant)):
        for name in ("single_step", "swe_pivot"):
            assert BUILT[name].verify(STATE, first, second).kind in VerdictKind


def test_hostile_replies_get_a_verdict() -> None:
    """Two texts on which difflib alone would run for minutes: every character is rare, so each is compared with all its places."""
    letters = [chr(0x4E00 + i) for i in range(150)]
    shifted = letters[75:] + letters[:75]
    for text, other in (("".join(letters) * 400, "".join(shifted) * 400), ("{" * 100_000, "[" * 100_000), ("a" * 1_000_000, "b" * 1_000_000)):
        replies = [json.dumps({"analysis": "", "plan": "", "commands": [{"keystrokes": keys}]}) for keys in (text, other)]
        verdict = BUILT["terminus"].verify(STATE, says(replies[0]), says(replies[1]))
        assert verdict.reward == 0
        assert BUILT["terminus"].verify(STATE, says(text), says(other)).reward == 0
    with pytest.raises(TooCostly):
        similarity("".join(letters) * 400, "".join(shifted) * 400)


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("abc \n"), max_size=400), other=st.text(st.sampled_from("abc \n"), max_size=400))
def test_similarity_is_difflib_s(text: str, other: str) -> None:
    from difflib import SequenceMatcher

    assert similarity(text, other) == SequenceMatcher(None, text, other).ratio()
    assert similarity(text, text) == 1 == SequenceMatcher(None, text, text).ratio()


def test_a_half_read_text_is_malformed_and_an_unreadable_call_is_judged() -> None:
    """From a rollout, a malformed completion holds what the parser could read; from a recorded response, calls whose arguments are not JSON."""
    call = ToolCall("bash", '{"command": "ls"}')
    half_read = Action("<tool_call>...", (call,), None, ParseOutcome.MALFORMED)
    unreadable = Action("", (ToolCall("bash", '{"comm'),), None, ParseOutcome.MALFORMED)
    for name in ("single_step", "swe_pivot"):
        assert BUILT[name].verify(STATE, acts(call), half_read).kind is VerdictKind.INVALID
    assert BUILT["single_step"].verify(STATE, acts(call), unreadable).reason == "arguments are not JSON"
    assert BUILT["swe_pivot"].verify(STATE, acts(ToolCall("bash", "{}")), unreadable).reward == 1


def test_harness_is_read_off_the_expert() -> None:
    old = {"state_analysis": "a", "explanation": "p", "commands": [], "is_task_complete": False}
    new = {"analysis": "a", "plan": "p", "commands": []}
    assert BUILT["terminus"].verify(STATE, says(json.dumps(old)), says(json.dumps(old))).reward == 1
    assert BUILT["terminus"].verify(STATE, says(json.dumps(new)), says(json.dumps(old))).reason == "other schema"
    assert tool_category("NotebookEdit") == "unknown"


def test_the_graded_rows_are_the_invented_ones() -> None:
    """In order; rows to which neither version gave a verdict are left out."""
    graded = ({key: value for key, value in case.items() if key != "verdicts"} for case in CASES)
    invented = iter(json.loads(json.dumps(case)) for case in all_cases())
    assert all(any(case == one for one in invented) for case in graded), "run tests/gym_cases/grade.py"


def test_a_recipe_may_not_leave_the_judge_s_part_to_nobody() -> None:
    quickstart = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
    alone = ["verifier.type=gym_terminus"]
    with pytest.raises(UserError, match="gym_terminus stands alone"):
        load_recipe(quickstart, alone)
    assert load_recipe(quickstart, [*alone, "verifier.enable_llm_judge=false"]).recipe.verifier.type == "gym_terminus"
