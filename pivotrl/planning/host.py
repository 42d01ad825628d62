"""Memory of a node's host: the trainer's copies for a checkpoint, an engine's copy of new weights, offloaded optimizer state.

What a trainer process keeps there follows upstream's fully reshardable save: main weights and both moments of its whole model part in float32,
and while it gathers one of them two more copies of what it gathers at once. With `parallel.async_save` its weights join them until the files are
written. Where trainer and engines share nodes, an engine of several GPUs writes new weights to /dev/shm for its workers (rollouts/vllm.py), every
replica of a node its own; engines on nodes of their own receive them on their GPUs. Called by needs.py.
"""

from __future__ import annotations

from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.planning.memory import GIB, Memory, Term, busiest_buffers, gathered_bytes, optimizer_bytes
from pivotrl.planning.weights import BFLOAT16_BYTES, FLOAT32_BYTES, count_parameters

# Main weights and Adam's two moments; the parts as received and their concatenation.
_STATES, _GATHER_COPIES = 3, 2


def host_memories(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig, *, world_size: int) -> dict[str, Memory]:
    """By kind of node: one that trains and one that generates, or one that does both."""
    trainer, engine = _trainer_terms(config, parallel, plan, cluster, world_size=world_size), _engine_terms(config, plan, cluster)
    if not plan.generation_nodes:
        return {"the host of a node": _memory((*trainer, *engine), plan, cluster)}
    return {"the host of a trainer node": _memory(trainer, plan, cluster), "the host of an engine node": _memory(engine, plan, cluster)}


def _trainer_terms(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig, *, world_size: int) -> tuple[Term, ...]:
    parts, processes = busiest_buffers(config, parallel, world_size=world_size), cluster.gpus_per_node
    num_elements = sum(part.num_elements for part in parts)
    terms = [Term("trainer processes", _fixed(processes, plan), f"{processes} processes")]
    if plan.checkpoint_gathers:
        per_process = _STATES * FLOAT32_BYTES * num_elements + _GATHER_COPIES * gathered_bytes(parts, parallel)
        terms.append(
            Term("optimizer state gathered", processes * per_process, "main weights and moments of each process's model part, for a checkpoint")
        )
    elif parallel.async_save:
        terms.append(Term("optimizer state copied", processes * optimizer_bytes(parts, plan), "each process's share, for a checkpoint"))
    if parallel.async_save:
        terms.append(Term("weights copied", processes * BFLOAT16_BYTES * num_elements, "bfloat16, for a checkpoint written meanwhile"))
    if plan.optimizer_offload_frac:
        offloaded = round(processes * optimizer_bytes(parts, plan) * plan.optimizer_offload_frac)
        terms.append(Term("optimizer offloaded", offloaded, f"{plan.optimizer_offload_frac:.0%} of it"))
    return tuple(terms)


def _engine_terms(config: Any, plan: PlanConfig, cluster: ClusterConfig) -> tuple[Term, ...]:
    ranks, processes = plan.generation_tensor_parallel_size, cluster.gpus_per_node
    terms = [Term("engine processes", _fixed(processes, plan), f"{processes} processes")]
    if ranks > 1 and not plan.generation_nodes:
        replicas = max(processes // ranks, 1)
        terms.append(Term("new weights in /dev/shm", replicas * count_parameters(config).total * BFLOAT16_BYTES, f"bfloat16, {replicas} replicas"))
    return tuple(terms)


def _fixed(processes: int, plan: PlanConfig) -> int:
    return round(processes * plan.fixed_host_gib * GIB)


def _memory(terms: tuple[Term, ...], plan: PlanConfig, cluster: ClusterConfig) -> Memory:
    capacity = round(cluster.host_memory_gib * GIB)
    return Memory(terms, capacity=capacity, margin=round(capacity * plan.margin_frac))
