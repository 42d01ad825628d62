"""Layouts for a model on a cluster: one that was asked about, or the best of all that are allowed and fit.

What a layout must satisfy is megatron/layout.py's business, what it takes is memory.py's and cost.py's. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import MoeConfig, ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.errors import UserError
from pivotrl.megatron.architecture import num_experts
from pivotrl.megatron.layout import ModelShape, check_model, check_world
from pivotrl.planning.cost import Cost, step_cost
from pivotrl.planning.needs import Needs, memory_needs

_PIPELINE_SIZES = (1, 2, 4, 8, 16)
_CONTEXT_SIZES = (1, 2, 4, 8, 16)
_MAX_TENSOR_SIZE = 8
# Step times this close to the best are equal as far as stated efficiencies can tell; then the simplest layout is the best.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Proposal:
    """One layout with what it takes."""

    parallel: ParallelConfig
    needs: Needs
    cost: Cost

    @property
    def fits(self) -> bool:
        return self.needs.fits


def trainer_processes(plan: PlanConfig, cluster: ClusterConfig) -> int:
    """GPUs that train.

    Raises:
        UserError: where the plan leaves the trainer none.
    """
    if plan.generation_nodes >= plan.num_nodes:
        raise UserError(
            f"generation_nodes is {plan.generation_nodes} and num_nodes is {plan.num_nodes}",
            rule="num_nodes counts all nodes, and at least one must train",
            fix="raise num_nodes or lower generation_nodes",
        )
    return (plan.num_nodes - plan.generation_nodes) * cluster.gpus_per_node


def fewest_processes(parallel: ParallelConfig) -> int:
    """Processes of a layout with the least data parallelism that its axes allow."""
    tensor = parallel.tensor_model_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tensor) * parallel.expert_model_parallel_size
    return math.lcm(tensor * parallel.context_parallel_size, experts) * parallel.pipeline_model_parallel_size


def assess(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig) -> Proposal:
    """What one layout takes.

    Raises:
        UserError: for a layout the model or the number of processes does not allow, naming the term.
    """
    world_size = trainer_processes(plan, cluster)
    check(config, parallel, world_size)
    return Proposal(parallel, memory_needs(config, parallel, plan, cluster, world_size=world_size), step_cost(config, parallel, plan, cluster))


def check(config: Any, parallel: ParallelConfig, world_size: int) -> None:
    """Refuses a layout that the model or the number of processes does not allow.

    Raises:
        UserError: naming the term.
    """
    check_world(parallel, world_size)
    check_model(parallel, MoeConfig(), ModelShape.of(config))


def propose(config: Any, plan: PlanConfig, cluster: ClusterConfig, *, num_shown: int) -> list[Proposal]:
    """The fastest layouts whose memory fits, the simplest first of those that are about as fast; where none fits, those that need least."""
    world_size = trainer_processes(plan, cluster)
    needed: list[tuple[int, ParallelConfig]] = []
    fitting: list[Proposal] = []
    for parallel in _candidates(config, cluster):
        try:
            check(config, parallel, world_size)
        except UserError:
            continue
        needs = memory_needs(config, parallel, plan, cluster, world_size=world_size)
        needed.append((needs.total, parallel))
        if needs.fits:
            fitting.append(Proposal(parallel, needs, step_cost(config, parallel, plan, cluster)))
    if fitting:
        close_s = _CLOSE * min(proposal.cost.step_s for proposal in fitting)
        return sorted(fitting, key=lambda one: (max(one.cost.step_s, close_s), _complexity(one.parallel), one.cost.train_s))[:num_shown]
    smallest = sorted(needed, key=lambda one: one[0])[:num_shown]
    return [assess(config, parallel, plan, cluster) for _, parallel in smallest]


def _candidates(config: Any, cluster: ClusterConfig) -> Iterator[ParallelConfig]:
    tensor_sizes = [size for size in (1, 2, 4, _MAX_TENSOR_SIZE) if size <= cluster.gpus_per_node]
    experts = num_experts(config)
    expert_sizes = [2**power for power in range(experts.bit_length()) if experts % 2**power == 0] if experts else [1]
    for tensor, pipeline, context, expert in itertools.product(tensor_sizes, _PIPELINE_SIZES, _CONTEXT_SIZES, expert_sizes):
        for recompute in ("none", "full"):
            yield ParallelConfig(
                tensor_model_parallel_size=tensor,
                sequence_parallel=tensor > 1,
                pipeline_model_parallel_size=pipeline,
                context_parallel_size=context,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=1 if experts else None,
                recompute=recompute,
            )


def _complexity(parallel: ParallelConfig) -> tuple[int, int]:
    """Recomputation costs time but no communication, so it counts last."""
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    return math.prod(sizes), parallel.recompute == "full"
