"""Recipe section `train.reprofile`: when a run profiles again with its current policy."""

from __future__ import annotations

from pydantic import model_validator

from pivotrl.config.section import Fraction01, PositiveInt, Section


class ReprofileConfig(Section):
    """Profile and select again when the pivots have no more to teach. Looked at where a checkpoint is due; any one condition is enough."""

    window_rounds: PositiveInt = 5
    """Rounds whose mean is compared: the last ones against the first ones of the pivot set, which must not overlap."""
    reward_std_frac: Fraction01 | None = None
    """Profile again where the mean std of rewards in a group is below this share of what it was when the set came into force (None: never)."""
    informative_frac: Fraction01 | None = None
    """The same for the share of groups whose rewards differ."""
    every_steps: PositiveInt | None = None
    """Profile again where the set has been in force for so many optimizer steps, whatever it still teaches (None: never)."""
    saturated_validations: PositiveInt | None = None
    """Profile again where so many validations in a row brought no new best of the set (None: never)."""

    @model_validator(mode="after")
    def _some_condition(self) -> ReprofileConfig:
        if all(one is None for one in (self.reward_std_frac, self.informative_frac, self.every_steps, self.saturated_validations)):
            raise ValueError(
                "none of reward_std_frac, informative_frac, every_steps and saturated_validations is set; set one, or leave train.reprofile out"
            )
        return self
