"""The one definition of a local rollout: sample one action in one state, parse it, verify it.

Profiling, training and evaluation all go through `LocalSampler`, so a pivot is trained exactly as it was profiled. Consumes tasks whose
prompts are already token ids; produces `LocalRollout`s. Resamples nothing and drops nothing: what infra verdicts and truncated samples
do to a statistic or to the loss is decided by `counted` and `loss_weight`, the same for everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.config.schema import SamplingConfig
from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import Engine, EngineError, GenerationRequest
from pivotrl.types import Action, Completion, FinishReason, LocalRollout, ParseOutcome, State, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Verifier

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

    def sample(self, tasks: Sequence[LocalTask], *, num_samples: int, place: tuple[str | int, ...]) -> list[tuple[LocalRollout, ...]]:
        """`num_samples` rollouts per task, in the order of the tasks.

        A failed engine gives infra verdicts for the whole call (an engine returns no partial result); the caller resamples as often as
        its recipe allows. An exception of renderer or verifier is a bug and passes.

        Args:
            place: where in the run this happens, for example ``("train", step)``; resampling needs a place of its own.
        """
        seeds = [tuple(derive_seed(self._run_seed, *place, task.candidate_id, index) for index in range(num_samples)) for task in tasks]
        requests = [
            GenerationRequest(task.prompt_token_ids, task_seeds, self._sampling.temperature, self._sampling.max_new_tokens)
            for task, task_seeds in zip(tasks, seeds, strict=True)
        ]
        try:
            completions = self.engine.generate(requests)
        except EngineError as error:
            return [self._failed(task, task_seeds, error) for task, task_seeds in zip(tasks, seeds, strict=True)]
        return [
            tuple(
                self._judged(task, index, seed, completion) for index, (seed, completion) in enumerate(zip(task_seeds, task_completions, strict=True))
            )
            for task, task_seeds, task_completions in zip(tasks, seeds, completions, strict=True)
        ]

    def accepts_expert(self, task: LocalTask) -> Verdict:
        """The verdict on the expert's own action after the full path, render -> parse -> verify. No engine is involved.

        Anything but OK with reward 1 means that no policy can learn this action in this format under this verifier.
        """
        try:
            token_ids = self.renderer.render_action(task.expert_action, task.state.tools)
        except InexpressibleAction as error:
            return Verdict.invalid(f"expert action cannot be written in format {self.renderer.template.action_format.name}: {error}")
        return self._verifier.verify(task.state, task.expert_action, self.renderer.parse(token_ids, task.state.tools))

    def _judged(self, task: LocalTask, index: int, seed: int, completion: Completion) -> LocalRollout:
        action = self.renderer.parse(completion.token_ids, task.state.tools)
        if completion.finish_reason is FinishReason.LENGTH:
            verdict = Verdict.invalid(TRUNCATED)
        else:
            verdict = self._verifier.verify(task.state, task.expert_action, action)
        return LocalRollout(task.candidate_id, index, seed, completion, action, verdict)

    def _failed(self, task: LocalTask, seeds: Sequence[int], error: EngineError) -> tuple[LocalRollout, ...]:
        """Rollouts that hold a seed and a reason but no tokens. STOP, because nothing was cut."""
        completion = Completion((), (), FinishReason.STOP, self.engine.policy_version)
        action = Action("", (), None, ParseOutcome.ABSENT)
        verdict = Verdict.infra(f"engine: {error}")
        return tuple(LocalRollout(task.candidate_id, index, seed, completion, action, verdict) for index, seed in enumerate(seeds))


def counted(rollout: LocalRollout, truncated: Literal["zero", "exclude", "mask"]) -> bool:
    """Whether a rollout enters mean, std, pass rate, profile and loss: infra verdicts never do, truncated ones not under `exclude`.

    Args:
        truncated: the recipe's `sampling.truncated`.
    """
    if rollout.verdict.kind is VerdictKind.INFRA:
        return False
    return not (truncated == "exclude" and rollout.is_truncated)


def loss_weight(rollout: LocalRollout, truncated: Literal["zero", "exclude", "mask"]) -> float:
    """Weight of a counted rollout in the loss: 0 for a truncated one under `mask` (overlong filtering), else 1."""
    return 0.0 if truncated == "mask" and rollout.is_truncated else 1.0
