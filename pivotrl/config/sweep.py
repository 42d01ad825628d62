"""Keys of a `pivotrl sweep` specification: which recipes to run, in which domains, with which seeds.

Not part of a recipe: one specification makes many runs. `set` and the files of a domain are fragments of a recipe, laid over it as `key=value`
words are. Imports pydantic only.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from pivotrl.config.section import MAX_INT, Section

_PLACES = ("{domain}", "{arm}", "{seed}")


class SweepBase(Section):
    """A run that comes before all others, whose checkpoint they start from. The specification's `set` does not reach it."""

    recipe: str
    """The recipe's folder, relative to the specification's."""
    run: str = "base"
    """Its run directory below the root."""


class SweepDomain(Section):
    """What a domain changes in every recipe."""

    name: str
    """The word that stands for `{domain}`."""
    files: tuple[str, ...] = ()
    """YAML files with keys of a recipe, relative to the specification's folder; later ones win."""


class SweepArm(Section):
    """One recipe in some domains with some seeds: a run for every pair."""

    name: str
    """The word that stands for `{arm}`."""
    recipe: str
    """The recipe's folder, relative to the specification's."""
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of domains."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)], ...], Field(min_length=1)]
    """Values of the recipe's `seed`."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of a recipe, over those of the domain."""
    after: tuple[str, ...] = ()
    """Arms whose run of the same domain and seed this one reads, and so waits for."""
    cost: Annotated[float, Field(gt=0)] = 1.0
    """How long a run takes beside the other arms', in any unit: longer runs start first."""


class SweepConfig(Section):
    """A specification: the base, the domains and the arms. Paths of runs are below `--root`."""

    name: str
    """Shown beside the progress."""
    base: SweepBase | None = None
    """The run before all others, or None."""
    run: str = "{domain}/{arm}-{seed}"
    """Run directory below the root."""
    domains: Annotated[tuple[SweepDomain, ...], Field(min_length=1)]
    """What the arms can be run on."""
    arms: Annotated[tuple[SweepArm, ...], Field(min_length=1)]
    """What is compared."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of a recipe, in every run but the base's, over all others."""

    @model_validator(mode="after")
    def _runs_are_told_apart(self) -> SweepConfig:
        if missing := [place for place in _PLACES if place not in self.run]:
            raise ValueError(f"run is {self.run!r} without {', '.join(missing)}, so that runs would share a directory; add it")
        for key, names in (("domains", [one.name for one in self.domains]), ("arms", [one.name for one in self.arms])):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{key} names {', '.join(twice)} twice; a name may stand once")
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> SweepConfig:
        domains, arms = {one.name for one in self.domains}, {one.name: one for one in self.arms}
        for arm in self.arms:
            if unknown := [name for name in arm.domains if name not in domains]:
                raise ValueError(f"arm {arm.name} names the domain {unknown[0]!r}, which `domains` does not list")
            for name in arm.after:
                if name not in arms or name == arm.name:
                    raise ValueError(f"arm {arm.name} comes after {name!r}, which is no other arm; the arms are {', '.join(arms)}")
                if arms[name].after:
                    raise ValueError(f"arm {arm.name} comes after {name}, which itself waits for another; only one step is possible")
                if not {*arm.domains} <= {*arms[name].domains} or not {*arm.seeds} <= {*arms[name].seeds}:
                    raise ValueError(f"arm {arm.name} comes after {name}, which lacks some of its domains or seeds; add them there")
        return self
