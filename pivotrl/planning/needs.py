"""Everything a layout must find room for at once: a trainer process, an engine process, a GPU where both are, and the hosts of their nodes.

This trainer has no sleep mode: an engine on the trainer's GPUs keeps its weights and caches there while the trainer computes, and the other
way round, so their sum must fit. Called by proposals.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.planning.host import host_memories
from pivotrl.planning.memory import Memory, engine_memory, shared_memory, trainer_memory


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory of one layout."""

    trainer: Memory
    engine: Memory
    shared: Memory | None
    """A GPU with both on it; None where they never are there at once."""
    hosts: Mapping[str, Memory]
    """Of each kind of node, by name."""

    @property
    def judged(self) -> tuple[tuple[str, Memory], ...]:
        """All that must fit, by name."""
        shared = () if self.shared is None else (("a GPU that trainer and engine share", self.shared),)
        return (("a trainer process", self.trainer), ("an engine process", self.engine), *shared, *self.hosts.items())

    @property
    def fits(self) -> bool:
        return all(memory.fits for _, memory in self.judged)

    @property
    def total(self) -> int:
        """Of the fullest GPU."""
        return max(self.trainer.total, self.engine.total, self.shared.total if self.shared else 0)


def memory_needs(config: Any, parallel: ParallelConfig, plan: PlanConfig, cluster: ClusterConfig, *, world_size: int) -> Needs:
    """What a layout that the model allows takes."""
    trainer = trainer_memory(config, parallel, plan, cluster, world_size=world_size)
    engine = engine_memory(config, plan, cluster)
    is_shared = plan.generation_nodes == 0 and not plan.engine_sleeps
    shared = shared_memory(trainer, engine, plan) if is_shared else None
    return Needs(trainer, engine, shared, host_memories(config, parallel, plan, cluster, world_size=world_size))
