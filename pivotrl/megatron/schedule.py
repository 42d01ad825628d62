"""The learning rate as a pure function of the step, so that resuming cannot shift it."""

from __future__ import annotations

import math

from pivotrl.config.schema import OptimizerConfig

# The cosine ends at this share of the peak, as OptimizerConfig.decay says.
_FINAL_FRAC = 0.1


def learning_rate(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `num_steps`.

    Warm-up is linear from lr / warmup_steps at step 0 to lr at step warmup_steps - 1; a cosine starts there and is lr / 10 at the last step.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=4)
    >>> [learning_rate(step, config, num_steps=6) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    peak_step = max(config.warmup_steps - 1, 0)
    progress = (step - peak_step) / max(num_steps - 1 - peak_step, 1)
    return config.lr * (_FINAL_FRAC + (1 - _FINAL_FRAC) * 0.5 * (1 + math.cos(math.pi * progress)))
