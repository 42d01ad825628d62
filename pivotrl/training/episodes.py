"""End-to-end RL as a source: whole episodes of training tasks by the current policy, their success the reward, every sampled turn learned from.

Same loop, loss, trainer and files as PivotRL (`sources.PivotSource`); only where a step's data come from differs. What a step gets is a function of
step, seed and published weights; the one thing a checkpoint holds is the number of turns sampled so far, since episodes differ in length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pivotrl.config.engines import WeightSyncConfig
from pivotrl.config.schema import SamplingConfig, TrainConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts.episodes import EpisodePlayer, Limits
from pivotrl.rollouts.local import LocalSampler
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.training.episode_groups import EpisodeGroup, episode_metrics, judged, make_episode_group, turn_rows, turn_samples
from pivotrl.training.groups import Truncated, check_infra
from pivotrl.training.order import EpochOrder
from pivotrl.training.probe import WeightProbe
from pivotrl.training.protocols import PolicyTrainer, StepData
from pivotrl.types import Message, Role, State, ToolOrigin
from pivotrl.worlds.protocol import WorldTask

_NUM_TURNS = "num_turns"
# What new weights are probed with where no task's prompt is known.
_GREETING = State((Message(Role.USER, "Hello."),), (), ToolOrigin.NONE)


def training_tasks[TaskT: WorldTask](tasks: Sequence[TaskT], train_ids: frozenset[str], *, config: TrainConfig) -> list[TaskT]:
    """The world's tasks from which pivots would come: those of the ingested training part. Needs no engine, so it comes before one.

    Raises:
        UserError: for fewer tasks than one step takes.
    """
    assert config.episodes is not None
    kept = [task for task in tasks if task.id in train_ids]
    if len(kept) < config.episodes.tasks_per_step:
        raise UserError(
            f"train.episodes.tasks_per_step is {config.episodes.tasks_per_step} but only {len(kept)} of the world's {len(tasks)} training tasks "
            "are in the ingested training part",
            rule="a step takes that many different tasks, and end-to-end RL learns from the tasks that pivots come from",
            fix="lower it, raise world.num_train_tasks, or ingest the world's own {run}/world/expert.jsonl",
        )
    return kept


def check_amount(rows: Sequence[WorldTask], config: TrainConfig) -> None:
    """Raises UserError where an environment has fewer rows than one step takes."""
    assert config.episodes is not None
    if len(rows) < config.episodes.tasks_per_step:
        raise UserError(
            f"train.episodes.tasks_per_step is {config.episodes.tasks_per_step} and environment.train_rows has {len(rows)} different rows",
            rule="a step takes that many different rows",
            fix="lower it, or give more rows",
        )


class EpisodeSource[TaskT: WorldTask]:
    """T tasks a step, G episodes each by the current policy; the advantage of an episode goes to all its turns.

    Args:
        sampler: engine and renderer; its verifier is not asked, what played an episode is.
        player: plays them, under the sampler's engine; a step s is the place ("train", s) of their seeds.
        tasks: what it plays; at least train.episodes.tasks_per_step.
        max_prompt_tokens: an episode whose prompt outgrows it ends there.
        seed: the run's seed.

    Raises:
        UserError: where a task's first prompt is known and too long.
    """

    def __init__(
        self,
        sampler: LocalSampler,
        player: EpisodePlayer[TaskT],
        tasks: Sequence[TaskT],
        *,
        config: TrainConfig,
        sampling: SamplingConfig,
        max_prompt_tokens: int,
        seed: int,
        weight_sync: WeightSyncConfig | None = None,
    ) -> None:
        assert config.episodes is not None
        prompts = [prompt for task in tasks if (prompt := self._checked_prompt(player, task, max_prompt_tokens)) is not None]
        self._sampler, self._player, self._tasks, self._config = sampler, player, tuple(tasks), config
        self._truncated: Truncated = sampling.truncated
        self._limits = Limits(max_prompt_tokens, sampling.max_new_tokens, sampling.temperature, config.episodes.max_turns, ends_at_cut=True)
        self._order = EpochOrder(len(tasks), config.episodes.tasks_per_step, derive_seed(seed, "episodes"))
        probed = prompts[0] if prompts else sampler.renderer.render_prompt(_GREETING)
        self._probe = WeightProbe(probed, weight_sync or WeightSyncConfig(), temperature=sampling.temperature, seed=seed)
        self._num_turns = 0

    def batch(self, step: int) -> StepData:
        """Plays, scores and batches the episodes of one round.

        Raises:
            InfraLimitError: where more than train.max_infra_frac of the episodes ended by the infrastructure's fault.
            UserError: where no task keeps two counted episodes, or no episode has a turn.
        """
        groups = self._sample(step)
        check_infra([group.rollouts_G for group in groups], max_infra_frac=self._config.max_infra_frac, where=f"step {step}")
        if all(group.is_dropped for group in groups):
            raise UserError(
                f"none of the {len(groups)} tasks of step {step} has two episodes that count",
                rule="a step needs a group to compare episodes in; sampling.truncated is `exclude` and almost all were cut",
                fix="raise sampling.max_new_tokens, or count truncated samples as `zero`",
            )
        samples = turn_samples(groups, self._truncated)
        if not samples:
            raise UserError(
                f"no turn was sampled in the episodes of step {step} that count",
                rule="a step learns from turns; a prompt longer than render.max_prompt_tokens gets none",
                fix="raise render.max_prompt_tokens, or give the agents shorter prompts",
            )
        self._num_turns += sum(len(group.turns) for group in groups)
        return StepData(
            micro_batches=train_micro_batches(
                train_batch(samples),
                batching=self._config.batching,
                micro_batch_tokens=self._config.micro_batch_tokens,
                skip_zero_variance=self._config.kl.beta == 0,
            ),
            metrics={
                **episode_metrics(groups, step=step),
                **self._sampler.take_cost(),
                **self._player.take_cost(),
                "perf/env_turns/sum": self._num_turns,
            },
            rollout_rows=[
                row for group in groups for rollout in group.rollouts_G for row in turn_rows(rollout, step=step, decode=self._sampler.renderer.decode)
            ],
            ledger_rows=[self._ledger_row(group, step) for group in groups],
        )

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Hands the trainer's weights to the engine that samples, and probes that it samples from them; raises as `PivotSource.publish`."""
        self._probe.hand_over(trainer, self._sampler.engine, version)

    def position(self) -> dict[str, Any]:
        """Turns sampled so far."""
        return {_NUM_TURNS: self._num_turns}

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """Takes the number of turns back and pushes the resumed weights."""
        self._num_turns = position[_NUM_TURNS]
        self.publish(trainer, trainer.steps_done)

    @staticmethod
    def _checked_prompt(player: EpisodePlayer[TaskT], task: TaskT, max_prompt_tokens: int) -> tuple[int, ...] | None:
        prompt = player.first_prompt(task)
        if prompt is not None and len(prompt) > max_prompt_tokens:
            raise UserError(
                f"the first prompt of task {task.id} has {len(prompt)} tokens and render.max_prompt_tokens is {max_prompt_tokens}",
                rule="an episode needs room for one turn at least",
                fix="raise render.max_prompt_tokens",
            )
        return prompt

    def _sample(self, step: int) -> list[EpisodeGroup]:
        size = self._config.group_size
        tasks = [self._tasks[i] for i in self._order.items(self._number(step))]
        played = self._player.play(tasks, size, limits=self._limits, place=("train", step))
        rollouts = [judged(one, index % size) for index, one in enumerate(played)]
        return [
            make_episode_group(task.id, rollouts[number * size : (number + 1) * size], method=self._config.advantage, truncated=self._truncated)
            for number, task in enumerate(tasks)
        ]

    def _number(self, step: int) -> int:
        """The round that starts at a step."""
        return step // self._config.updates_per_rollout

    def _ledger_row(self, group: EpisodeGroup, step: int) -> dict[str, str | int]:
        return {
            "step": step,
            "task_id": group.task_id,
            "epoch": self._order.epoch(self._number(step)),
            "policy_version": self._sampler.engine.policy_version,
            "num_counted": len(group.counted),
            "num_turns": len(group.turns),
        }
