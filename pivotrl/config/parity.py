"""Recipe key `train.parity`: engine and trainer must give the same tokens the same log-probs, or the run does not start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pivotrl.config.section import PositiveInt, Section


class ParityConfig(Section):
    """The gate before the first step, after a resume and every so many steps (docs/parity.md)."""

    max_logprob_difference: Annotated[float, Field(gt=0)]
    """Largest absolute difference, trainer against engine, of a sampled token's log-prob. Float32 on a CPU: 1e-3; a bfloat16 engine: about 0.3;
    with a mixture of experts several, since rounding sends some tokens to other experts: state the mean too."""
    max_mean_logprob_difference: Annotated[float, Field(gt=0)] | None = None
    """The same of the mean over a check's tokens; none: the largest alone decides. One token cannot move it, so take more pivots than by default."""
    every_steps: PositiveInt
    """Steps between checks; step 0 always."""
    num_pivots: PositiveInt = 4
    """Pivots sampled for a check, always the same ones."""
    num_samples: PositiveInt = 2
    """Actions sampled per pivot."""
