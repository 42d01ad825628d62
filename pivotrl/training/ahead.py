"""Sampling one round ahead: while the trainer learns from round t, a thread samples round t + 1 from the policy before that update.

Wraps the source of pivots; the loop does not know. The engine is used by one thread at a time: the worker between `batch` and `publish`, the
loop's own thread between `publish` and `batch` (validation, the parity gate). Consumes the engine under the weights last published;
`publish` waits for the worker, whose rollouts then belong to the version before. What was sampled ahead is part of a checkpoint, because
the weights that sampled it are not: a resumed run learns from the same rollouts. docs/asynchrony.md says what Eq. 7 means then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import TypeAdapter

from pivotrl.config.schema import TrainConfig
from pivotrl.rollouts.routes import route_rows, routes_of
from pivotrl.training.protocols import PolicyTrainer, Source, StepData
from pivotrl.training.sources import PivotSource, SampledRound
from pivotrl.types import LocalRollout, RoutedExperts

_ROUND = TypeAdapter(SampledRound)


@contextmanager
def sampling_ahead(source: PivotSource, config: TrainConfig) -> Iterator[Source]:
    """The source itself where `train.max_policy_age` is 0, else the same one round ahead; leaving waits for a round under way."""
    if config.max_policy_age == 0:
        yield source
        return
    # Float sums depend on torch's number of threads, which belongs to the calling thread.
    with ThreadPoolExecutor(1, "rollouts", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as worker:
        yield AheadSource(source, worker, config)


class AheadSource:
    """A source whose rollouts, those of the first round aside, are one published policy old."""

    def __init__(self, source: PivotSource, worker: ThreadPoolExecutor, config: TrainConfig) -> None:
        self._source, self._worker = source, worker
        self._num_steps, self._updates_per_rollout = config.num_steps, config.updates_per_rollout
        self._step: int | None = None
        self._ahead: Future[SampledRound] | None = None

    def batch(self, step: int) -> StepData:
        """The round that was sampled ahead for this step; starts sampling the next one. Raises what `PivotSource.batch` raises."""
        ahead = self._ahead or self._worker.submit(self._source.sample, step)
        assert self._ahead is None or self._step == step, f"sampled ahead for step {self._step}, asked for step {step}"
        sampled = ahead.result()
        self._step, self._ahead = step + self._updates_per_rollout, None
        if self._step < self._num_steps:
            self._ahead = self._worker.submit(self._source.sample, self._step)
        return self._source.assemble(step, sampled)

    def publish(self, trainer: PolicyTrainer, version: int) -> None:
        """Waits for the round under way, which keeps its policy, then pushes the new one."""
        if self._ahead is not None:
            wait([self._ahead])
        self._source.publish(trainer, version)

    def position(self) -> dict[str, Any]:
        """The round that was sampled ahead, JSON-ready."""
        return {} if self._ahead is None else {"step": self._step, **_stored(self._ahead.result())}

    def resume(self, trainer: PolicyTrainer, position: Mapping[str, Any]) -> None:
        """Takes the round that was sampled ahead back and pushes the trainer's weights."""
        if position:
            self._step, self._ahead = position["step"], Future()
            self._ahead.set_result(_restored(position))
        self._source.publish(trainer, trainer.steps_done)


def _stored(sampled: SampledRound) -> dict[str, Any]:
    """JSON-ready. Experts are bytes, a prompt's most often the same in all samples of a group, and have a form of their own."""
    routes = [route_rows([rollout.completion.routed_experts for rollout in group]) for group in sampled.groups]
    bare = [_routed(group, [None] * len(group)) for group in sampled.groups]
    stored = {"round": _ROUND.dump_python(replace(sampled, groups=bare), mode="json")}
    return stored | ({"routes": routes} if any(row is not None for rows in routes for row in rows) else {})


def _restored(position: Mapping[str, Any]) -> SampledRound:
    sampled = _ROUND.validate_python(position["round"])
    if "routes" not in position:
        return sampled
    return replace(sampled, groups=[_routed(group, routes_of(rows)) for group, rows in zip(sampled.groups, position["routes"], strict=True)])


def _routed(group: Sequence[LocalRollout], routes: Sequence[RoutedExperts | None]) -> tuple[LocalRollout, ...]:
    pairs = zip(group, routes, strict=True)
    return tuple(replace(rollout, completion=replace(rollout.completion, routed_experts=found)) for rollout, found in pairs)
