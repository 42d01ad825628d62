"""Keys of a `pivotrl tables` specification: which result belongs to which arm, domain and seed, and which tables to write of them.

Not part of a recipe: one specification covers many runs. Paths may hold `{arm}`, `{domain}` and `{seed}`, one file or directory per combination.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pivotrl.config.section import Section

type HarnessFormat = Literal["tau2", "swe_bench", "terminal_bench", "harbor", "browsecomp", "lm_eval", "nemo_evaluator"]


class RunSource(Section):
    """Scores of run directories whose `eval` stage is finished."""

    type: Literal["run"]
    arm: str
    """Name of the arm, free to choose."""
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    """Training domains that `path` exists for."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """Seeds that `path` exists for."""
    path: str
    """The run directory."""
    checkpoint: Literal["reference", "trained"] = "trained"
    """Which of the two evaluated checkpoints is this arm's: `reference` gives the base."""


class FileSource(Section):
    """Result files of a public harness, one set per domain and seed."""

    type: Literal["file"]
    arm: str
    """Name of the arm, free to choose."""
    domains: tuple[str, ...] = ()
    """Training domains of the checkpoint; empty: one checkpoint that stands for every domain (the base)."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Seeds that the paths exist for. Trials inside one file are attempts, not seeds."""
    paths: Annotated[tuple[str, ...], Field(min_length=1)]
    """Files (a job directory for `harbor`); several are parts of one benchmark, as tau2-bench's domains are."""
    format: HarnessFormat
    """The harness that wrote them."""
    benchmark: str | None = None
    """An out-of-domain benchmark by its name; None: the domain's own."""
    metric: str | None = None
    """Name of the score where the file holds several (`lm_eval`: acc,none; `nemo_evaluator`: METRIC/SCORE)."""
    task: str | None = None
    """Name of the task where the file holds several; None: its only one."""
    scale: Literal["share", "percent"] = "share"
    """Unit in which the file states its totals (`lm_eval`, `nemo_evaluator`)."""


type ResultSource = Annotated[RunSource | FileSource, Field(discriminator="type")]


class DomainTable(Section):
    """A training domain and its own benchmark."""

    name: str
    """The word that stands for `{domain}`."""
    title: str
    """Shown in tables."""
    suite: str = "world"
    """Suite of a run's eval that is the domain's own score."""
    average: Literal["tasks", "families"] = "tasks"
    """Every task weighs the same, or every family does (tau2-bench: the mean of airline, retail and telecom)."""
    paper: str | None = None
    """The paper's benchmark to stand beside it, as the paper names it."""


class Benchmark(Section):
    """An out-of-domain benchmark or skill."""

    name: str
    """Facet of the skills suite, or `benchmark` of a file."""
    title: str
    """Shown in tables."""
    paper: str | None = None
    """The paper's benchmark to stand beside it, as the paper names it."""


class MainArms(Section):
    """The arms of Tables 1 to 3."""

    base: str
    """The checkpoint all arms start from."""
    sft: str
    """Supervised training on the same data."""
    pivotrl: str
    """PivotRL."""


class OutOfDomain(Section):
    """Tables 2 and 3: what was not trained on."""

    suite: str = "skills"
    """Suite of a run's eval whose facets are the skills."""
    benchmarks: Annotated[tuple[Benchmark, ...], Field(min_length=1)]
    """Rows, in this order."""


class ArmRow(Section):
    """An arm as a row of a table."""

    arm: str
    """Name of the arm."""
    title: str
    """Shown in the table."""
    paper: str | None = None
    """The paper's row to stand beside it, as the paper's data file names it."""


class ArmTable(Section):
    """A table of arms on one domain: Table 4 (ablation) or Table 6 (by task family)."""

    domain: str
    """Name of the domain."""
    rows: Annotated[tuple[ArmRow, ...], Field(min_length=1)]
    """The first row is what the others are compared with."""


class Efficiency(Section):
    """Figure 1: accuracy over turns and wall time, and what PivotRL and end-to-end RL need for the same accuracy."""

    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    """Domains to draw."""
    pivotrl: str
    """Arm that trains on pivots."""
    end_to_end: str
    """Arm that trains on whole episodes."""
    curve: str = "train/validation.jsonl"
    """File below the run with rows {step, value}: the accuracy that is matched."""


class Spread(Section):
    """Figure 3: reward std per batch."""

    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    """Domains to draw."""
    pivots: str
    """Arm that trains on pivots."""
    random: str
    """Arm that trains on random turns."""


class SensitivityPoint(Section):
    """One value of a setting."""

    value: str
    """The setting, shown in the table."""
    arm: str
    """The arm that was trained with it."""


class Sensitivity(Section):
    """How the in-domain score depends on one setting."""

    name: str
    """Short name, used in file names."""
    title: str
    """Shown above the table: K, lambda_diff, share of verdicts flipped."""
    domain: str
    """Name of the domain."""
    reference: str
    """The arm every other point is compared with."""
    points: Annotated[tuple[SensitivityPoint, ...], Field(min_length=1)]
    """Rows, in this order."""


class Hypotheses(Section):
    """Arms that a page of evidence compares besides those of `main`, `efficiency` and `spread` (docs/evidence_protocol.md)."""

    domain: str
    """Domain of the ablation."""
    full: str
    """Pivots with the functional reward, on the ablation's seeds."""
    random_functional: str
    """Random turns with the functional reward."""
    random_strict: str
    """Random turns with the strict reward: naive local RL."""
    pivots_strict: str
    """Pivots with the strict reward."""

    def arms(self) -> tuple[str, ...]:
        """All arms named, `full` first."""
        return self.full, self.random_functional, self.random_strict, self.pivots_strict


class ExploratoryTable(Section):
    """Arms side by side: what they gain in domain and what they lose out of it."""

    name: str
    """Short name, part of the cells' names."""
    title: str
    """Shown above the table."""
    domains: Annotated[tuple[str, ...], Field(min_length=1)]
    """Domains over which the changes are means."""
    rows: Annotated[tuple[ArmRow, ...], Field(min_length=1)]
    """Arms, in this order."""


class TablesConfig(Section):
    """A specification: results and the tables to write of them. A table whose section is absent is not written."""

    name: str
    """Title of the pages."""
    root: str = "."
    """Directory that all paths are below; `{spec}` is the specification's folder. Relative to the working directory."""
    seed: int = 0
    """Seed of the resampling."""
    num_resamples: Annotated[int, Field(ge=100)] = 2000
    """Resamples behind every interval."""
    pairs: Literal["mean", "shared"] = "mean"
    """Arms with different seeds: compared with the mean of the other arm over its seeds, or on the seeds both have."""
    domains: Annotated[tuple[DomainTable, ...], Field(min_length=1)]
    """Training domains in the order of the tables."""
    results: Annotated[tuple[ResultSource, ...], Field(min_length=1)]
    """Where the scores are."""
    main: MainArms | None = None
    """Table 1, and with `out_of_domain` Tables 2 and 3."""
    out_of_domain: OutOfDomain | None = None
    """Tables 2 and 3; needs `main`."""
    ablation: ArmTable | None = None
    """Table 4."""
    families: ArmTable | None = None
    """Table 6."""
    efficiency: Efficiency | None = None
    """Figure 1; needs run directories."""
    spread: Spread | None = None
    """Figure 3; needs run directories."""
    sensitivities: tuple[Sensitivity, ...] = ()
    """K, lambda_diff, verifier noise."""
    exploratory: tuple[ExploratoryTable, ...] = ()
    """Arms that were added after the comparison, on the page of evidence alone; needs `main` and `out_of_domain`."""
    hypotheses: Hypotheses | None = None
    """What `python -m pivotrl.evaluation.evidence` decides on; tables do without."""

    @model_validator(mode="after")
    def _names_exist(self) -> TablesConfig:
        domains, arms = {one.name for one in self.domains}, {one.arm for one in self.results}
        if len(domains) != len(self.domains):
            raise ValueError("domains names one domain twice; a name may stand once")
        for place, name in self._domains_named():
            if name not in domains:
                raise ValueError(f"{place} names the domain {name!r}, which `domains` does not list")
        for place, name in self._arms_named():
            if name not in arms:
                raise ValueError(f"{place} names the arm {name!r}, of which `results` has nothing; its arms are {', '.join(sorted(arms))}")
        if self.out_of_domain is not None and self.main is None:
            raise ValueError("out_of_domain compares with the base, so it needs `main`")
        if self.exploratory and self.out_of_domain is None:
            raise ValueError("exploratory compares arms in and out of domain, so it needs `out_of_domain`; add it")
        return self

    def _domains_named(self) -> list[tuple[str, str]]:
        named = [("results", name) for one in self.results for name in one.domains]
        named += [(place, table.domain) for place, table in (("ablation", self.ablation), ("families", self.families)) if table is not None]
        named += [("efficiency", name) for name in (self.efficiency.domains if self.efficiency else ())]
        named += [("spread", name) for name in (self.spread.domains if self.spread else ())]
        named += [("hypotheses", self.hypotheses.domain)] if self.hypotheses else []
        named += [("exploratory", name) for one in self.exploratory for name in one.domains]
        return named + [("sensitivities", one.domain) for one in self.sensitivities]

    def _arms_named(self) -> list[tuple[str, str]]:
        named = [("main", name) for name in ((self.main.base, self.main.sft, self.main.pivotrl) if self.main else ())]
        tables = (("ablation", self.ablation), ("families", self.families))
        named += [(place, row.arm) for place, table in tables if table is not None for row in table.rows]
        named += [("efficiency", name) for name in ((self.efficiency.pivotrl, self.efficiency.end_to_end) if self.efficiency else ())]
        named += [("spread", name) for name in ((self.spread.pivots, self.spread.random) if self.spread else ())]
        named += [("hypotheses", name) for name in self.hypotheses.arms()] if self.hypotheses else []
        named += [("exploratory", row.arm) for one in self.exploratory for row in one.rows]
        return named + [("sensitivities", name) for one in self.sensitivities for name in (one.reference, *(point.arm for point in one.points))]
