"""Recipe section of the profile stage: Eq. 4, and how its work is cut and shared out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pivotrl.config.section import Fraction01, PositiveInt, Section


class ProfileConfig(Section):
    """K local rollouts of the frozen reference policy per candidate, Eq. 4."""

    num_samples: Annotated[int, Field(ge=2)]
    """K: samples per candidate."""
    max_candidates: PositiveInt | None = None
    """Profile this many candidates, chosen by hash of their id (None: all)."""
    expert_actions: Literal["all", "calls"] = "all"
    """Which turns to profile: all of them, or only those where the expert called a tool. The number left out is reported."""
    unit_candidates: PositiveInt = 16
    """Candidates of one work unit: the grain of resuming and of batching."""
    max_resamples: PositiveInt = 2
    """Extra attempts for samples whose verdict was infra, before the row is quarantined."""
    max_infra_frac: Fraction01 = 0.05
    """The stage stops where more than this share of verdicts is the infrastructure's fault."""
    num_workers: PositiveInt = 1
    """Worker processes that the stage starts on this machine, each with its own engine. Changes the time, never a byte of the result."""
