"""The one definition of a local rollout: seeds by place, verdict by outcome, and who counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.characters import CharacterRenderer, completion

from pivotrl.config.engines import ScriptedEngineConfig
from pivotrl.config.schema import SamplingConfig, ToolCallVerifierConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.local import LocalSampler, LocalTask, counted, loss_weight
from pivotrl.rollouts.scripted import ScriptedEngine, prompt_hash
from pivotrl.types import (
    Action,
    Completion,
    FinishReason,
    LocalRollout,
    Message,
    ParseOutcome,
    Role,
    State,
    Tool,
    ToolCall,
    ToolOrigin,
    Verdict,
    VerdictKind,
)
from pivotrl.verifiers.protocol import Case
from pivotrl.verifiers.tool_call import ToolCallVerifier

RENDERER = CharacterRenderer()
CALL = '<tool_call>\n{"name": "open_ticket", "arguments": {"device": "7"}}\n</tool_call>'
OPEN_TICKET = Tool("open_ticket", "Open a ticket", {"type": "object", "properties": {"device": {"type": "string"}}, "required": ["device"]})
EXPERT = Action("", (ToolCall("open_ticket", '{"device": "7"}'),), None, ParseOutcome.PARSED)


def task_of(device: str = "7", *, expert: Action = EXPERT) -> LocalTask:
    state = State((Message(Role.USER, f"Device {device} hums."),), (OPEN_TICKET,), ToolOrigin.ROW)
    return LocalTask(f"candidate-{device}", RENDERER.render_prompt(state), state, expert)


class RecordingEngine:
    """A scripted engine that remembers what it was asked; raises where it is told to."""

    def __init__(self, texts: Sequence[str], *, error: Exception | None = None) -> None:
        self._scripted = ScriptedEngine.from_function(lambda _prompt, _seed, index: completion(texts[index]))
        self._error = error
        self.requests: list[GenerationRequest] = []
        self.policy_version = 4

    def generate(self, requests: Sequence[GenerationRequest]):
        self.requests += requests
        if self._error is not None:
            raise self._error
        return self._scripted.generate(requests)


def sampler_of(engine: object, *, max_new_tokens: int = 120, verifier: object = None) -> LocalSampler:
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=max_new_tokens, truncated="zero")
    judge = verifier or ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity"))
    return LocalSampler(engine, RENDERER, judge, sampling, run_seed=17)  # type: ignore[arg-type]


def test_seeds_and_settings_come_from_place_candidate_and_index() -> None:
    engine = RecordingEngine([CALL, CALL])
    tasks = [task_of("7"), task_of("8")]
    rollouts = sampler_of(engine).sample(tasks, num_samples=2, place=("train", 3))
    for task, request, group in zip(tasks, engine.requests, rollouts, strict=True):
        assert request.seeds == tuple(derive_seed(17, "train", 3, task.candidate_id, index) for index in range(2))
        assert (request.prompt_token_ids, request.temperature, request.max_new_tokens) == (task.prompt_token_ids, 0.7, 120)
        assert [(one.candidate_id, one.sample_index, one.seed) for one in group] == [(task.candidate_id, i, request.seeds[i]) for i in range(2)]
    assert len({seed for request in engine.requests for seed in request.seeds}) == 4


def test_each_completion_is_parsed_and_judged_against_its_own_expert() -> None:
    wrong_device, broken, message = CALL.replace('"7"', '"9"'), '<tool_call>\n{"name": "open_tick', "Which device?"
    (group,) = sampler_of(RecordingEngine([CALL, wrong_device, broken, message])).sample([task_of()], num_samples=4, place=("p",))
    assert [(one.verdict.kind, one.verdict.reward) for one in group[:2]] == [(VerdictKind.OK, 1.0), (VerdictKind.OK, 0.0)]
    assert group[2].action.parse is ParseOutcome.MALFORMED
    assert group[2].verdict.kind is VerdictKind.INVALID
    assert group[3].action.is_message
    assert group[3].verdict.reward == 0


def test_a_cut_completion_is_truncated_even_where_the_part_would_pass() -> None:
    """The cap falls on the end-of-turn token: the text is the expert's, the action did not end."""
    (group,) = sampler_of(RecordingEngine([CALL]), max_new_tokens=len(CALL)).sample([task_of()], num_samples=1, place=("p",))
    assert group[0].completion.finish_reason is FinishReason.LENGTH
    assert group[0].action.tool_calls == EXPERT.tool_calls
    assert group[0].verdict == Verdict.invalid("truncated")


def test_a_failed_engine_gives_infra_verdicts_with_seeds_and_no_tokens() -> None:
    groups = sampler_of(RecordingEngine([], error=EngineError("out of memory"))).sample([task_of("7"), task_of("8")], num_samples=3, place=("p", 1))
    for task, group in zip((task_of("7"), task_of("8")), groups, strict=True):
        assert [one.seed for one in group] == [derive_seed(17, "p", 1, task.candidate_id, index) for index in range(3)]
        assert {(one.verdict.kind, one.verdict.reason) for one in group} == {(VerdictKind.INFRA, "engine: out of memory")}
        assert not any(one.completion.token_ids or one.is_truncated for one in group)
        assert {one.completion.policy_version for one in group} == {4}


def test_bugs_of_engine_and_verifier_are_not_infra() -> None:
    class Broken:
        def verify(self, *_: object) -> Verdict:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        sampler_of(RecordingEngine([CALL]), verifier=Broken()).sample([task_of()], num_samples=1, place=("p",))
    with pytest.raises(ZeroDivisionError):
        sampler_of(RecordingEngine([], error=ZeroDivisionError())).sample([task_of()], num_samples=1, place=("p",))


class Waiting:
    """A verifier that judges all at once and charges for it: reward by the device that the call names."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        raise AssertionError("a verifier that waits is asked for many verdicts at once")

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        devices = [(case.action.tool_calls[0].arguments_object() or {})["device"] for case in cases]
        self.batches.append(devices)
        return [Verdict.ok(float(device) / 10, f"device {device}") for device in devices]

    def take_cost(self) -> dict[str, float]:
        return {"rollout/reward/mean": float(len(self.batches))}


def test_a_verifier_that_waits_gets_all_whole_completions_in_one_call() -> None:
    texts = [CALL.replace('"7"', f'"{device}"') for device in (1, 2, 3)] + [CALL.replace('"7"', '"' + "4" * 200 + '"')]
    judge = Waiting()
    sampler = sampler_of(RecordingEngine(texts), verifier=judge, max_new_tokens=len(CALL) + 1)
    groups = sampler.sample([task_of("7"), task_of("8")], num_samples=4, place=("p",))
    assert judge.batches == [["1", "2", "3"] * 2]
    for group in groups:
        assert [one.verdict.reward for one in group] == [0.1, 0.2, 0.3, 0.0]
        assert [one.verdict.reason for one in group] == ["device 1", "device 2", "device 3", "truncated"]
    assert sampler.take_cost() == {"rollout/reward/mean": 1.0}
    assert sampler_of(RecordingEngine(texts)).take_cost() == {}


def test_all_experts_of_a_unit_are_judged_in_one_call() -> None:
    judge = Waiting()
    unreadable = task_of("8", expert=Action("", (ToolCall("open_ticket", '{"device": '),), None, ParseOutcome.MALFORMED))
    verdicts = sampler_of(RecordingEngine([]), verifier=judge).accept_experts([task_of("7"), unreadable, task_of("9")])
    assert judge.batches == [["7", "7"]]
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.OK, VerdictKind.INVALID, VerdictKind.OK]


def test_the_experts_action_takes_the_full_path() -> None:
    sampler = sampler_of(RecordingEngine([]))
    assert sampler.accept_experts([task_of()]) == [Verdict.ok(1.0, "same calls")]
    unreadable = Action("", (ToolCall("open_ticket", '{"device": '),), None, ParseOutcome.MALFORMED)
    verdict = sampler.accept_experts([task_of(expert=unreadable)])[0]
    assert verdict.kind is VerdictKind.INVALID
    assert verdict.reason.startswith("expert action cannot be written in format hermes: ")


def test_an_expert_that_reads_back_as_another_action_is_rejected() -> None:
    class Lossy(CharacterRenderer):
        def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Action:
            return Action("", (), None, ParseOutcome.ABSENT)

    judge = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity"))
    sampling = SamplingConfig(max_new_tokens=9, truncated="zero")
    assert LocalSampler(RecordingEngine([]), Lossy(), judge, sampling, 1).accept_experts([task_of()])[0].reward == 0  # type: ignore[arg-type]


def rollout_of(verdict: Verdict, finish: FinishReason) -> LocalRollout:
    return LocalRollout("c", 0, 1, Completion((5,), (-0.5,), finish, 0), EXPERT, verdict)


@pytest.mark.parametrize(
    ("verdict", "finish", "counts", "weights"),
    [
        (Verdict.ok(1.0, "same"), FinishReason.STOP, {"zero": True, "exclude": True, "mask": True}, {"zero": 1, "exclude": 1, "mask": 1}),
        (Verdict.invalid("malformed"), FinishReason.STOP, {"zero": True, "exclude": True, "mask": True}, {"zero": 1, "exclude": 1, "mask": 1}),
        (Verdict.invalid("truncated"), FinishReason.LENGTH, {"zero": True, "exclude": False, "mask": True}, {"zero": 1, "exclude": 1, "mask": 0}),
        (Verdict.infra("engine: died"), FinishReason.STOP, {"zero": False, "exclude": False, "mask": False}, {"zero": 1, "exclude": 1, "mask": 1}),
    ],
)
def test_who_counts_and_who_teaches(verdict: Verdict, finish: FinishReason, counts: dict[str, bool], weights: dict[str, float]) -> None:
    rollout = rollout_of(verdict, finish)
    for truncated in ("zero", "exclude", "mask"):
        assert counted(rollout, truncated) is counts[truncated]
        assert loss_weight(rollout, truncated) == weights[truncated]


def scripted(path: Path, rows: Sequence[object]) -> ScriptedEngine:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ScriptedEngine.load(ScriptedEngineConfig(type="scripted", path=str(path)))


def test_a_script_file_replays_its_recordings_in_order_and_cuts_at_the_cap(tmp_path: Path) -> None:
    engine = scripted(tmp_path / "s.jsonl", [{"prompt_hash": prompt_hash((5, 6)), "token_ids": [[1, 2, 3], [4]]}])
    (samples,) = engine.generate([GenerationRequest((5, 6), (11, 12, 13), 1.0, 2)])
    assert [sample.token_ids for sample in samples] == [(1, 2), (4,), (1, 2)]
    assert [sample.finish_reason for sample in samples] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    with pytest.raises(EngineError, match=prompt_hash((5, 7))):
        engine.generate([GenerationRequest((5, 7), (1,), 1.0, 2)])


@pytest.mark.parametrize("row", [{"prompt_hash": "x"}, {"prompt_hash": "x", "token_ids": [[]]}, {"prompt_hash": "x", "token_ids": [["a"]]}, [1], 7])
def test_a_script_row_of_another_form_is_named(tmp_path: Path, row: object) -> None:
    good = {"prompt_hash": "y", "token_ids": [[1]]}
    with pytest.raises(UserError, match=r"s\.jsonl:2 is not a recorded prompt"):
        scripted(tmp_path / "s.jsonl", [good, row])


def test_a_missing_script_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.path names .*nowhere"):
        ScriptedEngine.load(ScriptedEngineConfig(type="scripted", path=str(tmp_path / "nowhere")))
