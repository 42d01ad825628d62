"""What `pivotrl plan` prints: the model, then one layout term by term or the best layouts side by side.

Text only; the numbers are proposals.py's. Every assumption that a figure rests on is printed under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from pivotrl.config.parallel import ParallelConfig
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.megatron.flops import forward_cost
from pivotrl.planning.cost import step_work
from pivotrl.planning.memory import GIB, NO_CLUSTER, Memory, checkpoint_bytes, engine_memory, trainer_memory
from pivotrl.planning.proposals import Proposal, check, fewest_processes
from pivotrl.planning.remedies import remedies
from pivotrl.planning.weights import count_parameters

_SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


def print_plan(
    console: Console, name: str, config: Any, plan: PlanConfig, cluster: ClusterConfig, proposals: Sequence[Proposal], *, is_asked: bool
) -> None:
    """Prints the plan.

    Args:
        is_asked: whether the layout was the user's; else the proposals are ranked.
    """
    for part in _model_lines(name, config, plan):
        console.print(part)
    separate = f", {plan.generation_nodes} of them generating" if plan.generation_nodes else ", trainer and engine on the same GPUs"
    console.print(f"{plan.num_nodes} nodes of {cluster.name}{separate}")
    if not is_asked:
        console.print(_ranking(proposals))
    if proposals:
        _print_layout(console, plan, proposals[0])
    if not proposals:
        console.print("The model allows no layout on that many GPUs.")
    elif not proposals[0].fits:
        found = remedies(config, proposals[0].parallel, plan, cluster)
        words = [str(remedy) for remedy in found] + ([] if any(not remedy.caveat for remedy in found) else ["more nodes or a finer split"])
        short = [name for name, memory in proposals[0].needs.judged if not memory.fits]
        console.print(f"{layout_name(proposals[0].parallel)} does not fit ({', '.join(short)}); it would with {', or '.join(words)}.")


def print_terms(console: Console, name: str, config: Any, plan: PlanConfig) -> None:
    """Prints the model, and what its layout takes on the fewest processes that it allows; there is no cluster to judge it by.

    Raises:
        UserError: for a layout that the model does not allow.
    """
    for part in _model_lines(name, config, plan):
        console.print(part)
    parallel = plan.parallel or ParallelConfig()
    num_processes = fewest_processes(parallel)
    check(config, parallel, num_processes)
    trainer = trainer_memory(config, parallel, plan, NO_CLUSTER, world_size=num_processes)
    console.print(_terms_table(f"Trainer process, {layout_name(parallel)}, one of {num_processes}", trainer))
    title = f"Engine process, tensor parallel {plan.generation_tensor_parallel_size}"
    console.print(_terms_table(title, engine_memory(config, plan, NO_CLUSTER)))
    console.print("Nothing is judged without --cluster.")


def layout_name(parallel: ParallelConfig) -> str:
    """For example ``TP8 CP16 EP8 ETP1 SP``: sizes above 1, and an expert size that differs from the tensor's.

    >>> layout_name(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True))
    'TP2 SP'
    """
    sizes = parallel.model_dump()
    words = [f"{short}{sizes[key]}" for key, short in _SHORT.items() if (sizes[key] or 0) > 1 or (short == "ETP" and sizes[key])]
    words += ["SP"] * parallel.sequence_parallel + ["recompute"] * (parallel.recompute == "full")
    return " ".join(words) or "one process per replica"


def _model_lines(name: str, config: Any, plan: PlanConfig) -> Iterator[RenderableType]:
    counts, work = count_parameters(config), step_work(plan.workload)
    routers = (
        f" ({(counts.total - counts.router) / 1e9:.2f} and {(counts.active - counts.router) / 1e9:.2f} without routers)" if counts.router else ""
    )
    yield f"{name}: {counts.total / 1e9:.2f} billion parameters, {counts.active / 1e9:.2f} active per token{routers}"
    workload = plan.workload
    yield (
        f"A step: {workload.pivots_per_step} pivots x {workload.group_size} actions, {work.num_tokens:,} tokens through the trainer, "
        f"{forward_cost(config).training_flops(work) / 1e15:,.1f} PFLOP; checkpoint {checkpoint_bytes(config) / 1e9:,.0f} GB"
    )


def _ranking(proposals: Sequence[Proposal]) -> Table:
    table = Table("layout", "GPU GiB", "free GiB", "step s", "rollout s", "train s", "MFU", "GPU-hours", title="Best layouts", title_justify="left")
    for proposal in proposals:
        cost, memory = proposal.cost, proposal.needs.shared or proposal.needs.trainer
        table.add_row(
            layout_name(proposal.parallel),
            f"{memory.total / GIB:.1f}",
            f"{(memory.capacity - memory.margin - memory.total) / GIB:.1f}",
            f"{cost.step_s:,.1f}",
            f"{cost.rollout_s:,.1f}",
            f"{cost.train_s:,.1f}",
            f"{cost.mfu:.0%}",
            f"{cost.gpu_hours:,.0f}",
        )
    return table


def _print_layout(console: Console, plan: PlanConfig, proposal: Proposal) -> None:
    needs = proposal.needs
    console.print(_memory_table(f"Trainer process, {layout_name(proposal.parallel)}", needs.trainer))
    console.print(_memory_table(f"Engine process, tensor parallel {plan.generation_tensor_parallel_size}", needs.engine))
    if needs.shared is not None:
        console.print(_memory_table("Trainer and engine on one GPU, neither gives way to the other", needs.shared))
    for name, memory in needs.hosts.items():
        console.print(_memory_table(f"{name[0].upper()}{name[1:]}", memory))
    cost, traffic = proposal.cost, proposal.cost.traffic
    console.print(
        f"Step {cost.step_s:,.1f} s: rollout {cost.rollout_s:,.1f}, train {cost.train_s:,.1f} (MFU {cost.mfu:.0%}), weight sync {cost.sync_s:,.1f}; "
        f"{cost.num_micro_batches} micro-batches; {cost.gpu_hours:,.0f} GPU-hours for {plan.workload.num_steps} steps"
    )
    console.print(
        f"Sent per GPU and step, GB: data parallel {traffic.data / 1e9:,.1f}, tensor {traffic.tensor / 1e9:,.1f}, "
        f"context {traffic.context / 1e9:,.1f}, expert {traffic.expert / 1e9:,.1f}"
    )
    stated = ", ".join(f"{key} {value:g}" for key, value in plan.efficiency.model_dump().items())
    console.print(f"Stated, not measured: {stated}")


def _terms_table(title: str, memory: Memory) -> Table:
    table = Table("term", "GiB", "what", title=title, title_justify="left")
    for term in memory.terms:
        table.add_row(term.name, f"{term.num_bytes / GIB:.2f}", term.note)
    return table


def _memory_table(title: str, memory: Memory) -> Table:
    table = _terms_table(title, memory)
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    free = (memory.capacity - memory.margin - memory.total) / GIB
    table.add_row(
        "total", f"{memory.total / GIB:.2f}", f"{verdict}: {free:+.1f} GiB after a margin of {memory.margin / GIB:.1f} of {memory.capacity / GIB:.1f}"
    )
    return table
