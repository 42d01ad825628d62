"""Where a step's data come from: pivots sampled by the current policy, or demonstrations. The one thing in which PivotRL and SFT differ.

These sources hold no position: what a step gets is a function of the step, the run's seed and the published weights, so a resumed run
asks again and gets the same. Called by training/loop.py; training/ahead.py samples pivots one round ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.config.engines import WeightSyncConfig
from pivotrl.config.schema import SamplingConfig, SftConfig, TrainConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.training.batching import demonstration_micro_batches, train_batch, train_micro_batches
from pivotrl.training.groups import Group, Truncated, check_infra, make_group, rollout_metrics, rollout_row, train_samples
from pivotrl.training.order import EpochOrder
from pivotrl.training.pivot_sets import FIRST_SET, PivotSet, PivotSets
from pivotrl.training.probe import WeightProbe
from pivotrl.training.protocols import PolicyTrainer, StepData
from pivotrl.types import Demonstration, LocalRollout


@dataclass(frozen=True, slots=True)
class SampledRound:
    """What engine and verifier gave for one round.

    >>> SampledRound([], {}).groups
    []
    """

    groups: list[tuple[LocalRollout, ...]]
    """G rollouts per pivot, in the order of the round's pivots."""
    cost: Mapping[str, float]
    """`LocalSampler.take_cost`."""


class PivotSource:
    """B pivots a step, G rollouts each by the current policy, scored and turned into advantages (Algorithm 1, inner part).

    Args:
        sampler: the same definition of a local rollout that profiled the pivots.
        decode: token ids to text, for rollouts.jsonl only.
        seed: the run's seed; rollouts of step s are drawn at place ("train", s).
        weight_sync: what is probed after a hand-over; None: the section's defaults.
        sets: where later pivot sets come from; None: `tasks` are learned from to the end.

    Raises:
        UserError: for fewer pivots than one step takes.
    """

    def __init__(
        self,
        sampler: LocalSampler,
        tasks: Sequence[LocalTask],
        *,
        config: TrainConfig,
        sampling: SamplingConfig,
        decode: Callable[[Sequence[int]], str],
        seed: int,
        weight_sync: WeightSyncConfig | None = None,
        sets: PivotSets | None = None,
    ) -> None:
        if len(tasks) < config.pivots_per_step:
            raise UserError(
                f"train.pivots_per_step is {config.pivots_per_step} but only {len(tasks)} pivots were selected",
                rule="a step takes that many different pivots",
                fix="lower train.pivots_per_step, or select more pivots (raise select.lambda_diff or profile more candidates)",
            )
        self._sampler, self._config, self._decode, self._seed, self._sets = sampler, config, decode, seed, sets
        self._first = PivotSet(FIRST_SET, 0, tuple(tasks))
        self._truncated: Truncated = sampling.truncated
        self._probe = WeightProbe(tasks[0].prompt_token_ids, weight_sync or WeightSyncConfig(), temperature=sampling.temperature, seed=seed)

    def batch(self, step: int) -> StepData:
        """Samples, scores and batches the groups of one round; raises what `assemble` raises."""
        return self.assemble(step, self.sample(step))

    def sample(self, step: int) -> SampledRound:
        """The rollouts of one round by the policy that the engine holds, with their verdicts; the part that needs no trainer."""
        tasks, _ = self._round(step, self._first if self._sets is None else self._sets.at(step))
        groups = self._sampler.sample(tasks, num_samples=self._config.group_size, place=("train", step))
        return SampledRound(groups, self._sampler.take_cost())

    def assemble(self, step: int, sampled: SampledRound) -> StepData:
        """Micro-batches, metrics and rows of a round that was sampled.

        Raises:
            InfraLimitError: where more than train.max_infra_frac of the verdicts were the infrastructure's fault.
            UserError: where no group keeps two counted rollouts.
        """
        tasks, origin = self._round(step, self._first if self._sets is None else self._sets.in_force(step))
        check_infra(sampled.groups, max_infra_frac=self._config.max_infra_frac, where=f"step {step}")
        groups = [
            make_group(task, rollouts, method=self._config.advantage, truncated=self._truncated)
            for task, rollouts in zip(tasks, sampled.groups, strict=True)
        ]
        if all(group.is_dropped for group in groups):
            raise UserError(
                f"none of the {len(groups)} groups of step {step} has two rollouts that count",
                rule="a step needs a group to compare rollouts in; sampling.truncated is `exclude` and almost all were cut",
                fix="raise sampling.max_new_tokens, or count truncated samples as `zero`",
            )
        batch = train_batch(train_samples(groups, self._truncated))
        return StepData(
            micro_batches=train_micro_batches(
                batch,
                batching=self._config.batching,
                micro_batch_tokens=self._config.micro_batch_tokens,
                skip_zero_variance=self._config.kl.beta == 0,
            ),
            metrics={
                **rollout_metrics(groups, step=step),
                **sampled.cost,
                "perf/env_turns/sum": (self._number(step) + 1) * len(groups) * self._config.group_size,
            },
            rollout_rows=[
                rollout_row(rollout, step=step, text=self._decode(rollout.completion.token_ids)) for group in groups for rollout in group.rollouts_G
            ],
            ledger_rows=[self._ledger_row(group, step=step, origin=origin) for group in groups],
        )

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Hands the trainer's weights to the engine that samples, and probes that it samples from them.

        Raises:
            ValueError, RuntimeError: as `WeightProbe.hand_over`, for weights that did not arrive or are not used.
        """
        report = self._probe.hand_over(trainer, self._sampler.engine, version)
        if self._sets is not None:
            self._sets.published(report.digest)

    def position(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:  # noqa: ARG002 - holds no position
        """Pushes the resumed weights."""
        self.publish(trainer, trainer.steps_done)

    def _round(self, step: int, pivots: PivotSet) -> tuple[list[LocalTask], dict[str, str | int]]:
        """The pivots of one round, and where they come from: pivot set and epoch over it, counted from the set's first round."""
        place = ("pivots",) if pivots.from_step == 0 else ("pivots", pivots.from_step)
        order = EpochOrder(len(pivots.tasks), self._config.pivots_per_step, derive_seed(self._seed, *place))
        number = self._number(step) - self._number(pivots.from_step)
        return [pivots.tasks[i] for i in order.items(number)], {"pivot_set": pivots.name, "epoch": order.epoch(number)}

    def _number(self, step: int) -> int:
        """The round that starts at a step."""
        return step // self._config.updates_per_rollout

    @staticmethod
    def _ledger_row(group: Group, *, step: int, origin: Mapping[str, str | int]) -> dict[str, str | int]:
        return {
            "step": step,
            "pivot_id": group.task.candidate_id,
            **origin,
            "policy_version": group.rollouts_G[0].completion.policy_version,
            "num_counted": len(group.counted),
        }


class DemonstrationSource:
    """Expert sequences, epoch by epoch: SFT.

    Raises:
        UserError: for fewer demonstrations than one step takes.
    """

    def __init__(self, demonstrations: Sequence[Demonstration], *, config: SftConfig, seed: int) -> None:
        if len(demonstrations) < config.batch_sequences:
            raise UserError(
                f"sft.batch_sequences is {config.batch_sequences} but there are only {len(demonstrations)} demonstrations",
                rule="a step takes that many different sequences",
                fix="lower sft.batch_sequences or give more trajectories",
            )
        self._demonstrations, self._config = tuple(demonstrations), config
        self._order = EpochOrder(len(demonstrations), config.batch_sequences, derive_seed(seed, "demonstrations"))

    def batch(self, step: int) -> StepData:
        """The demonstrations of one step."""
        indices = self._order.items(step)
        micro_batches = demonstration_micro_batches(
            [self._demonstrations[i] for i in indices], batching=self._config.batching, micro_batch_tokens=self._config.micro_batch_tokens
        )
        return StepData(micro_batches, {}, [], [{"step": step, "epoch": self._order.epoch(step), "demonstrations": indices}])

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Nothing samples from a policy in supervised training."""

    def position(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """Nothing to take back."""
