"""From a specification to its list of runs, each with its recipe, its overrides and the runs it waits for. Reads the domains' files, runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pivotrl.config.load import file_words, words
from pivotrl.config.sweep import SweepConfig
from pivotrl.errors import UserError

_FILTERS = ("arm", "domain", "seed")


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep; what is between it and its recipe stands in `overrides`, so that `pivotrl run` repeats it.

    >>> SweepRun("search/sft-2", Path("recipes/evidence/sft"), ("seed=2",), arm="sft", domain="search", seed=2).after
    ()
    """

    name: str
    """Its directory below the root."""
    recipe: Path
    overrides: tuple[str, ...]
    arm: str = ""
    domain: str = ""
    seed: int | None = None
    """None for the base."""
    after: tuple[str, ...] = ()
    """Names of the runs it reads."""
    cost: float = 1.0


def runs_of(config: SweepConfig, folder: Path) -> list[SweepRun]:
    """All runs: the base first, then the longer ones before the shorter ones, in the specification's order where they are equal.

    Args:
        folder: the specification's folder, to which its paths are relative.

    Raises:
        UserError: for a file of a domain that cannot be read.
    """
    base = () if config.base is None else (SweepRun(config.base.run, folder / config.base.recipe, ()),)
    domain_words = {domain.name: [word for file in domain.files for word in file_words(folder / file)] for domain in config.domains}
    runs = [
        SweepRun(
            name=_name(config, arm.name, domain, seed),
            recipe=folder / arm.recipe,
            overrides=(*domain_words[domain], *words(arm.set), *words(config.set), f"seed={seed}"),
            arm=arm.name,
            domain=domain,
            seed=seed,
            after=(*(one.name for one in base), *(_name(config, name, domain, seed) for name in arm.after)),
            cost=arm.cost,
        )
        for arm in config.arms
        for seed in arm.seeds
        for domain in arm.domains
    ]
    return [*base, *sorted(runs, key=lambda run: -run.cost)]


def _name(config: SweepConfig, arm: str, domain: str, seed: int) -> str:
    return config.run.replace("{arm}", arm).replace("{domain}", domain).replace("{seed}", str(seed))


def only(runs: Sequence[SweepRun], filters: Iterable[str]) -> list[SweepRun]:
    """The base and the runs that every filter lets through.

    Args:
        filters: words of the form ``arm=pivotrl,sft``, ``seed=1,2`` or ``domain=search``.

    Raises:
        UserError: for another form, or a name that no run has.
    """
    kept = list(runs)
    for word in filters:
        key, equals, names = word.partition("=")
        if not equals or key not in _FILTERS:
            raise UserError(f"--only is {word!r}", rule=f"it has the form KEY=NAME,NAME with KEY one of {', '.join(_FILTERS)}", fix="correct it")
        known = {str(getattr(run, key)) for run in runs if run.arm}
        wanted = {name.strip() for name in names.split(",")}
        if unknown := sorted(wanted - known):
            raise UserError(f"--only names the {key} {unknown[0]!r}", rule=f"it is one of {', '.join(sorted(known))}", fix="correct it")
        kept = [run for run in kept if not run.arm or str(getattr(run, key)) in wanted]
    return kept
