"""What would make a layout fit: the fewest settings, those that this trainer has first, every other one with what is amiss with it.

A remedy is words for the command line of `pivotrl plan`; docs/planning.md says which keys of a recipe they are. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.errors import UserError
from pivotrl.megatron.architecture import num_experts
from pivotrl.planning.needs import memory_needs
from pivotrl.planning.proposals import check, trainer_processes

NOT_HERE = "not in this trainer"
_MAX_TOGETHER = 2
_FEWER_SEQUENCES = 16
# Alternatives of this trainer's that leave a choice.
_ENOUGH = 2


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings that together make a layout fit.

    >>> str(Remedy("engine_sleeps=True", "not in this trainer")), str(Remedy("max_num_seqs=16"))
    ('engine_sleeps=True (not in this trainer)', 'max_num_seqs=16')
    """

    words: str
    caveat: str = ""
    """Why the setting cannot simply be used; empty where it can."""

    def __str__(self) -> str:
        return f"{self.words} ({self.caveat})" if self.caveat else self.words


@dataclass(frozen=True, slots=True)
class _Knob:
    key: str
    value: Any
    caveat: str = ""

    def turn(self, plan: PlanConfig, parallel: ParallelConfig) -> tuple[PlanConfig, ParallelConfig]:
        section, _, name = self.key.rpartition(".")
        if section == "parallel":
            return plan, parallel.model_copy(update={name: self.value})
        return plan.model_copy(update={self.key: self.value}), parallel


def remedies(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig) -> list[Remedy]:
    """Every single setting that makes a layout fit, and pairs too where fewer than two that this trainer has do; nothing where no pair does.

    Of several values of one key the mildest is named.
    """
    knobs = [knob for knob in _knobs(config, parallel, plan) if knob.turn(plan, parallel) != (plan, parallel)]
    working: dict[tuple[str, ...], Remedy] = {}
    for size in range(1, _MAX_TOGETHER + 1):
        for together in itertools.combinations(knobs, size):
            keys = tuple(knob.key for knob in together)
            is_more_than_needed = any(set(known) <= set(keys) for known in working)
            if len({*keys}) == size and not is_more_than_needed and _fits(config, parallel, plan, cluster, together):
                caveats = dict.fromkeys(knob.caveat for knob in together if knob.caveat)
                working[keys] = Remedy(" ".join(f"{knob.key}={knob.value}" for knob in together), ", ".join(caveats))
        if sum(not remedy.caveat for remedy in working.values()) >= _ENOUGH:
            break
    return sorted(working.values(), key=lambda remedy: bool(remedy.caveat))


def _knobs(config: Any, parallel: ParallelConfig, plan: PlanConfig) -> Iterator[_Knob]:
    """Settings that trade time, precision or host memory for GPU memory, the mildest first."""
    yield _Knob("parallel.recompute", "full")
    if plan.checkpoint_gathers and not parallel.overlap_grad_reduce:
        yield _Knob("parallel.overlap_grad_reduce", True)
    experts, size = num_experts(config), parallel.expert_model_parallel_size
    while experts and experts % (size := 2 * size) == 0:
        yield _Knob("parallel.expert_model_parallel_size", size)
    if plan.max_num_seqs > _FEWER_SEQUENCES:
        yield _Knob("max_num_seqs", _FEWER_SEQUENCES)
    if not plan.generation_nodes:
        yield from (_Knob("generation_nodes", nodes) for nodes in range(1, plan.num_nodes))
        yield _Knob("engine_sleeps", True, NOT_HERE)
    yield _Knob("gradient_dtype", "bfloat16")
    yield _Knob("checkpoint_gathers", False, NOT_HERE)
    yield _Knob("moment_dtype", "bfloat16", NOT_HERE)
    yield _Knob("optimizer_offload_frac", 1.0, NOT_HERE)


def _fits(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig, knobs: tuple[_Knob, ...]) -> bool:
    for knob in knobs:
        plan, parallel = knob.turn(plan, parallel)
    world_size = trainer_processes(plan, cluster)
    try:
        check(config, parallel, world_size)
    except UserError:
        return False
    return memory_needs(config, parallel, plan, cluster, world_size=world_size).fits
