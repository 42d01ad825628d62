"""The plan of a recipe: what it says about nodes, a step and its layout, so that nobody writes it twice. Called by `doctor` and `launch`."""

from __future__ import annotations

from pivotrl.config.engines import VllmEngineConfig
from pivotrl.config.planning import PlanConfig, WorkloadConfig
from pivotrl.config.schema import Recipe


def plan_of(recipe: Recipe) -> PlanConfig:
    """The plan of the recipe's `train` stage.

    What no recipe states keeps the plan's defaults: mean lengths (cut to the recipe's limits), efficiencies, margins, and the float32
    moments on the GPU that the trainer has. End-to-end RL is planned as the turns of its episodes, every prompt read whole: without the time that
    environments take, and without what a prefix cache saves.
    """
    train, launch, engine, mean = recipe.train, recipe.launch, recipe.engine, WorkloadConfig()
    longest_prompt, longest_action = recipe.render.max_prompt_tokens, recipe.sampling.max_new_tokens
    turns = train.pivots_per_step if train.episodes is None else train.episodes.tasks_per_step * mean.episode_turns
    workload = WorkloadConfig(
        pivots_per_step=turns,
        group_size=train.group_size,
        prompt_tokens=min(mean.prompt_tokens, longest_prompt),
        action_tokens=min(mean.action_tokens, longest_action),
        max_sequence_tokens=longest_prompt + longest_action,
        micro_batch_tokens=train.micro_batch_tokens,
        is_prefix_shared=train.batching == "shared_prefix",
        num_steps=train.num_steps,
    )
    plan = PlanConfig(
        num_nodes=launch.train_nodes + launch.generation_nodes,
        generation_nodes=launch.generation_nodes,
        parallel=recipe.parallel,
        gradient_dtype=train.optimizer.gradient_dtype,
        has_reference=train.kl.beta > 0,
        workload=workload,
    )
    if not isinstance(engine, VllmEngineConfig):
        return plan
    stated = {
        "generation_tensor_parallel_size": engine.tensor_parallel_size,
        "max_num_seqs": engine.max_num_seqs,
        "engine_memory_frac": engine.gpu_memory_utilization,
    }
    return plan.model_copy(update=stated)
