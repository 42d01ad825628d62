"""Success of whole episodes while a policy is trained: what a figure of accuracy over cost is drawn from. It chooses nothing and stops nothing.

The tasks, attempts and random numbers are those of the eval stage's world suite, so the last point is what that suite measures. Rows of
curve.jsonl: step, value (mean success), items (one per attempt, as the suite stores them). Read by evaluation/tables/curves.py.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pivotrl.config.schema import SamplingConfig
from pivotrl.config.training import CurveConfig
from pivotrl.config.worlds import WorldConfig
from pivotrl.errors import InfraLimitError
from pivotrl.evaluation.suites import world_success
from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.episodes import Limits
from pivotrl.rollouts.local import LocalSampler
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.registry import scripted_world


class SuccessCurve:
    """The curve of one training run.

    Args:
        sampler: holds the engine whose weights the source publishes; verifier and sampling seeds of it are not used.
    """

    def __init__(
        self, sampler: LocalSampler, config: CurveConfig, *, world: WorldConfig, sampling: SamplingConfig, max_prompt_tokens: int, seed: int
    ) -> None:
        self._sampler, self._seed, self._num_samples = sampler, seed, config.num_samples
        self._world = scripted_world(world.type).world
        self._tasks = self._world.tasks(TaskSplit.TEST, num_tasks=world.num_test_tasks, seed=seed)
        self._limits = Limits(max_prompt_tokens, sampling.max_new_tokens, sampling.temperature)
        self.every_steps = config.every_steps

    def point(self) -> dict[str, Any]:
        """The current policy's value and items, JSON-ready.

        Raises:
            InfraLimitError: where the engine fails.
        """
        try:
            scored = world_success(
                self._sampler, self._world, self._tasks, num_samples=self._num_samples, limits=self._limits, run_seed=self._seed, num_shown=0
            )
        except EngineError as error:
            raise InfraLimitError(f"the engine failed while train.curve ({error}); the same command resumes once that is repaired") from error
        return {"value": sum(item.score for item in scored.items) / len(scored.items), "items": list(map(asdict, scored.items))}
