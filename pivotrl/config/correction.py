"""Recipe key `train.correction`: what is done about tokens that the engine and the trainer do not give the same probability.

Both kinds weigh each token by r = pi_trainer / pi_engine, the ratio at the policy the round starts with (docs/correction.md), held constant.
`level` says of what r is the ratio: `token`, one per token; `sequence`, the product over the action's tokens; `geometric`, the geometric
mean over them, which does not shrink or grow with the action's length.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.section import Section

Level = Literal["token", "sequence", "geometric"]


class TruncatedCorrection(Section):
    """Truncated importance sampling: weight min(r, cap)."""

    type: Literal["truncated"]
    level: Level = "token"
    """What r is the ratio of: each token, the whole action (product), or its geometric mean."""
    cap: Annotated[float, Field(gt=0)]
    """Largest weight. Public recipes use 2 to 5 at token level."""


class MaskedCorrection(Section):
    """Masked importance sampling: weight r where low <= r <= high, else 0. What is masked stays in the denominators."""

    type: Literal["masked"]
    level: Level = "token"
    """What r is the ratio of: each token, the whole action (product), or its geometric mean."""
    low: Annotated[float, Field(ge=0)]
    """Smallest ratio that is kept; 0 keeps all small ones."""
    high: Annotated[float, Field(gt=0)]
    """Largest ratio that is kept."""

    @model_validator(mode="after")
    def _low_below_high(self) -> MaskedCorrection:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


type CorrectionConfig = Annotated[TruncatedCorrection | MaskedCorrection, Field(discriminator="type")]
