"""Recipe section of the profile stage: Eq. 4, and how its work is cut and shared out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.section import Fraction01, PositiveInt, Section


class PassRatePriorConfig(Section):
    """What is known of the candidates' pass rates before the profile: point masses at 0 and 1, and a Beta distribution between them."""

    always_fails: Fraction01
    """Share of candidates whose pass rate is 0."""
    always_succeeds: Fraction01
    """Share of candidates whose pass rate is 1."""
    alpha: Annotated[float, Field(gt=0)]
    """First parameter of the Beta distribution of all other pass rates."""
    beta: Annotated[float, Field(gt=0)]
    """Second parameter."""

    @model_validator(mode="after")
    def _shares_fit(self) -> PassRatePriorConfig:
        if self.always_fails + self.always_succeeds > 1:
            raise ValueError(f"always_fails ({self.always_fails}) and always_succeeds ({self.always_succeeds}) must not exceed 1 together")
        return self


class AdaptiveConfig(Section):
    """Adaptive K: a candidate's sampling stops early where more samples would hardly change what `select` does with it (docs/profiling.md)."""

    risk: Annotated[float, Field(gt=0, lt=0.5)]
    """With 95 % confidence, `select` would decide at most this share of the candidates otherwise after all `profile.num_samples` samples."""
    min_samples: PositiveInt = 2
    """Samples that every candidate gets."""
    round_samples: PositiveInt = 1
    """Samples drawn between two looks: more keep an engine fuller and save fewer rollouts."""
    prior: PassRatePriorConfig | None = None
    """The prior, taken for the truth, or None to learn one from a first pass over `pilot_candidates`."""
    pilot_candidates: PositiveInt = 512
    """Candidates of the first pass, in whole units chosen by hash, all of which get `profile.num_samples` samples."""
    max_pilot_frac: Annotated[float, Field(gt=0, le=1)] = 0.25
    """The first pass asks for no more than this share of the stage, whatever `pilot_candidates` says."""


class ProfileConfig(Section):
    """K local rollouts of the frozen reference policy per candidate, Eq. 4."""

    num_samples: Annotated[int, Field(ge=2)]
    """K: samples per candidate."""
    adaptive: AdaptiveConfig | None = None
    """Stop sampling early where the decision is clear, or None: exactly K samples each, as the paper does."""
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
    """Worker processes that the stage starts on this machine, each with its own engine. Changes the time, never a byte of the result.
    More than one needs placement.type in_process; otherwise placement.num_replicas says how many engines work."""

    @model_validator(mode="after")
    def _minimum_below_k(self) -> ProfileConfig:
        if self.adaptive is not None and self.adaptive.min_samples > self.num_samples:
            raise ValueError(f"adaptive.min_samples ({self.adaptive.min_samples}) must not exceed num_samples ({self.num_samples})")
        return self
