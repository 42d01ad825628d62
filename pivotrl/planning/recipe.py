"""The plan of a recipe: what it says about a step goes into the plan's workload, so that nobody writes it twice."""

from __future__ import annotations

from pivotrl.config.planning import PlanConfig
from pivotrl.config.schema import Recipe


def plan_of(recipe: Recipe, options: PlanConfig) -> PlanConfig:
    """`options` with batch, lengths, steps, layout and reference of the recipe's `train` stage.

    Mean lengths stay those of `options`, cut to the recipe's limits. A layout in `options`, made for one cluster, goes before the recipe's.
    """
    train, longest_prompt, longest_action = recipe.train, recipe.render.max_prompt_tokens, recipe.sampling.max_new_tokens
    workload = options.workload.model_copy(
        update={
            "pivots_per_step": train.pivots_per_step,
            "group_size": train.group_size,
            "prompt_tokens": min(options.workload.prompt_tokens, longest_prompt),
            "action_tokens": min(options.workload.action_tokens, longest_action),
            "max_sequence_tokens": longest_prompt + longest_action,
            "micro_batch_tokens": train.micro_batch_tokens,
            "is_prefix_shared": train.batching == "shared_prefix",
            "num_steps": train.num_steps,
        }
    )
    layout = options.parallel or recipe.parallel
    return options.model_copy(update={"workload": workload, "parallel": layout, "has_reference": train.kl.beta > 0})
