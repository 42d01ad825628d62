"""The one definition of a local rollout: sample one action in one state, parse it, verify it.

Profiling, training and evaluation all go through `LocalSampler`, so a pivot is trained exactly as it was profiled. Consumes tasks whose
prompts are already token ids; produces `LocalRollout`s. Resamples nothing and drops nothing: what infra verdicts and truncated samples
do to a statistic or to the loss is decided by `counted` and `loss_weight`, the same for everyone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.config.schema import SamplingConfig
from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.rollouts.engine import take_cost as engine_cost
from pivotrl.types import Action, Completion, FinishReason, LocalRollout, ParseOutcome, State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Case, Verifier, undisturbed, verify_all
from pivotrl.verifiers.protocol import take_cost as verifier_cost

if TYPE_CHECKING:
    from pivotrl.rollouts.render import Renderer

TRUNCATED = "truncated"
"""Reason of every verdict on a completion that was cut at its cap."""


@dataclass(frozen=True, slots=True)
class LocalTask:
    """One state to act in and the expert's action to be judged against.

    >>> from pivotrl.types import ToolOrigin
    >>> LocalTask("c0", (5, 6), State((), (), ToolOrigin.NONE), Action("hi", (), None, ParseOutcome.ABSENT)).candidate_id
    'c0'
    """

    candidate_id: str
    prompt_token_ids: tuple[int, ...]
    """The rendered state with the generation prompt; empty where the state cannot be rendered (such a task is never sampled)."""
    state: State
    expert_action: Action


class Judged(Protocol):
    """What decides whether a rollout counts: one action (`LocalRollout`) or a whole episode (training/episode_groups.py)."""

    @property
    def verdict(self) -> Verdict: ...
    @property
    def is_truncated(self) -> bool: ...


class LocalSampler:
    """Engine, renderer and verifier put together. Holds no random state: a place in the run gives the same seeds every time.

    Args:
        engine: owns the weights; stays reachable as `engine` for weight updates and for `close`, which is the caller's.
        renderer: stays reachable as `renderer`, so that prompts are rendered by what parses their completions.
        run_seed: the run's seed; sample i of task t at a place gets ``derive_seed(run_seed, *place, t.candidate_id, i)``.
    """

    def __init__(self, engine: Engine, renderer: Renderer, verifier: Verifier, sampling: SamplingConfig, run_seed: int) -> None:
        self.engine = engine
        self.renderer = renderer
        self._verifier, self._sampling, self._run_seed = verifier, sampling, run_seed

    def sample(
        self, tasks: Sequence[LocalTask], *, num_samples: int, place: tuple[str | int, ...], first_index: int = 0
    ) -> list[tuple[LocalRollout, ...]]:
        """`num_samples` rollouts per task, in the order of the tasks.

        A failed engine gives infra verdicts for the whole call (an engine returns no partial result); the caller resamples as often as
        its recipe allows. An exception of renderer or verifier is a bug and passes.

        Args:
            place: where in the run this happens, for example ``("train", step)``; resampling needs a place of its own.
            first_index: number of samples drawn at this place before: the seeds go on where those ended.
        """
        indices = range(first_index, first_index + num_samples)
        seeds = [tuple(derive_seed(self._run_seed, *place, task.candidate_id, index) for index in indices) for task in tasks]
        requests = [
            GenerationRequest(task.prompt_token_ids, task_seeds, self._sampling.temperature, self._sampling.max_new_tokens)
            for task, task_seeds in zip(tasks, seeds, strict=True)
        ]
        try:
            completions = self.engine.generate(requests)
        except EngineError as error:
            return [self._failed(task, task_seeds, error) for task, task_seeds in zip(tasks, seeds, strict=True)]
        return self._judged(tasks, seeds, completions)

    def accept_experts(self, tasks: Sequence[LocalTask]) -> list[Verdict]:
        """The verdicts on the experts' own actions after the full path, render -> parse -> verify. No engine is involved.

        Anything but OK with reward 1 means that no policy can learn this action in this format under this verifier.
        """
        expressed = [self._as_expressed(task) for task in tasks]
        cases = [
            Case(task.state, task.expert_action, action) for task, action in zip(tasks, expressed, strict=True) if not isinstance(action, Verdict)
        ]
        verdicts = iter(verify_all(undisturbed(self._verifier), cases))
        return [action if isinstance(action, Verdict) else next(verdicts) for action in expressed]

    def take_cost(self) -> Mapping[str, float]:
        """What judging cost and what befell the engine since the last call, under registered metric names; empty where nothing did."""
        return {**verifier_cost(self._verifier), **engine_cost(self.engine)}

    def _as_expressed(self, task: LocalTask) -> Action | Verdict:
        """The expert's action as the policy would write it and the parser read it, or why it cannot be written."""
        try:
            token_ids = self.renderer.render_action(task.expert_action, task.state.tools)
        except InexpressibleAction as error:
            return Verdict.invalid(f"expert action cannot be written in format {self.renderer.template.action_format.name}: {error}")
        return self.renderer.parse(token_ids, task.state.tools)

    def _judged(
        self, tasks: Sequence[LocalTask], seeds: Sequence[tuple[int, ...]], completions: Sequence[tuple[Completion, ...]]
    ) -> list[tuple[LocalRollout, ...]]:
        """All completions judged in one call of the verifier; one that was cut is not shown to it."""
        actions = [
            [self.renderer.parse(completion.token_ids, task.state.tools) for completion in group]
            for task, group in zip(tasks, completions, strict=True)
        ]
        cases = [
            Case(task.state, task.expert_action, action)
            for task, group, parsed in zip(tasks, completions, actions, strict=True)
            for completion, action in zip(group, parsed, strict=True)
            if completion.finish_reason is not FinishReason.LENGTH
        ]
        verdicts = iter(verify_all(self._verifier, cases))
        return [
            tuple(
                LocalRollout(
                    task.candidate_id,
                    index,
                    seed,
                    completion,
                    action,
                    Verdict.invalid(TRUNCATED) if completion.finish_reason is FinishReason.LENGTH else next(verdicts),
                )
                for index, (seed, completion, action) in enumerate(zip(task_seeds, group, parsed, strict=True))
            )
            for task, task_seeds, group, parsed in zip(tasks, seeds, completions, actions, strict=True)
        ]

    def _failed(self, task: LocalTask, seeds: Sequence[int], error: EngineError) -> tuple[LocalRollout, ...]:
        """Rollouts that hold a seed and a reason but no tokens. STOP, because nothing was cut."""
        completion = Completion((), (), FinishReason.STOP, self.engine.policy_version)
        action = Action("", (), None, ParseOutcome.ABSENT)
        verdict = Verdict.infra(f"engine: {error}")
        return tuple(LocalRollout(task.candidate_id, index, seed, completion, action, verdict) for index, seed in enumerate(seeds))


def counted(rollout: Judged, truncated: Literal["zero", "exclude", "mask"]) -> bool:
    """Whether a rollout enters mean, std, pass rate, profile and loss: infra verdicts never do, truncated ones not under `exclude`.

    Args:
        truncated: the recipe's `sampling.truncated`.
    """
    if rollout.verdict.kind is VerdictKind.INFRA:
        return False
    return not (truncated == "exclude" and rollout.is_truncated)


def loss_weight(rollout: Judged, truncated: Literal["zero", "exclude", "mask"]) -> float:
    """Weight of a counted rollout in the loss: 0 for a truncated one under `mask` (overlong filtering), else 1."""
    return 0.0 if truncated == "mask" and rollout.is_truncated else 1.0
