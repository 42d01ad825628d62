"""What the run would take: memory of its layout on the named cluster, rollout turns, GPU-hours under stated efficiencies."""

from __future__ import annotations

from typing import Any

from pivotrl.config.load import LoadedRecipe
from pivotrl.config.planning import ClusterConfig, PlanConfig
from pivotrl.doctor.checkpoint import check_layout
from pivotrl.doctor.findings import Findings
from pivotrl.launching.jobs import recipe_jobs
from pivotrl.planning.memory import GIB
from pivotrl.planning.page import layout_name
from pivotrl.planning.proposals import assess, fewest_processes, trainer_processes
from pivotrl.planning.recipe import plan_of


def check_without_cluster(loaded: LoadedRecipe, config: Any, findings: Findings) -> None:
    """The layout on the fewest processes that it allows."""
    findings.not_checked["memory and cost"] = "no --cluster was given"
    check_layout(loaded, config, fewest_processes(loaded.recipe.parallel), findings, parallel_key="parallel")


def check_on_cluster(loaded: LoadedRecipe, config: Any, cluster: ClusterConfig, findings: Findings) -> None:
    """World size, divisibility and memory of the layout on the recipe's nodes, and what the run costs."""
    plan, parallel = plan_of(loaded.recipe), loaded.recipe.parallel
    if all(one.check != "placement" for one in findings.found):
        with findings.refused_by("placement", "placement"):
            recipe_jobs(loaded.recipe, cluster.gpus_per_node)
    with findings.refused_by("layout", "launch"):
        num_processes, num_before = trainer_processes(plan, cluster), len(findings.found)
        check_layout(loaded, config, num_processes, findings, parallel_key="parallel")
        if any(one.check == "layout" for one in findings.found[num_before:]):
            return
        if "train" in loaded.recipe.stages:
            _check_idle(plan, num_processes, findings)
        found = assess(config, parallel, plan, cluster)
        for name, memory in found.needs.judged:
            if not memory.fits:
                largest = max(memory.terms, key=lambda term: term.num_bytes)
                findings.error(
                    "memory",
                    f"{name} takes {memory.total / GIB:,.1f} GiB, most of it {largest.name}",
                    where=f"{layout_name(parallel)} on {cluster.name}",
                    rule=f"{(memory.capacity - memory.margin) / GIB:,.1f} GiB are there after the margin",
                    fix="use more nodes, split more, or engine.max_num_seqs less; `pivotrl plan` lists layouts that fit",
                )
    findings.figures |= {"nodes": plan.num_nodes, "layout": layout_name(parallel)}
    if "train" in loaded.recipe.stages:
        findings.figures |= {"step_s": round(found.cost.step_s, 1), "train_gpu_hours": round(found.cost.gpu_hours)}
    else:
        findings.not_checked["cost"] = "the planner knows the `train` stage alone, and this recipe ends with `sft`"


def _check_idle(plan: PlanConfig, num_processes: int, findings: Findings) -> None:
    parallel, workload = plan.parallel, plan.workload
    assert parallel is not None, "plan_of states one"
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    num_replicas = num_processes // model_size
    num_units = workload.pivots_per_step * (1 if workload.is_prefix_shared else workload.group_size)
    if num_units < num_replicas:
        findings.warn(
            "idle-processes",
            f"a step has {num_units} {'groups' if workload.is_prefix_shared else 'sequences'} for {num_replicas} data parallel processes",
            where="launch.train_nodes",
            rule="each takes a part of the step's micro-batches, and some would have none",
            fix="use fewer nodes, or raise train.pivots_per_step or train.group_size",
        )


def count_turns(loaded: LoadedRecipe, num_candidates: int | None, findings: Findings) -> None:
    """Rollout turns of profiling and training: the paper's axis of cost.

    Args:
        num_candidates: candidates of the data, or None where they were not read.
    """
    recipe = loaded.recipe
    if num_candidates is not None and "profile" in recipe.stages:
        profiled = min(num_candidates, recipe.profile.max_candidates or num_candidates)
        findings.figures["profile_turns"] = profiled * recipe.profile.num_samples
    if "train" not in recipe.stages:
        return
    rounds = recipe.train.num_steps // recipe.train.updates_per_rollout
    if recipe.train.episodes is not None:
        findings.figures["train_episodes"] = rounds * recipe.train.episodes.tasks_per_step * recipe.train.group_size
        return
    findings.figures["train_turns"] = rounds * recipe.train.pivots_per_step * recipe.train.group_size
