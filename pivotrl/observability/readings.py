"""What a run directory says, read once and typed: the only part of the report that knows file names and keys.

Reads whatever stages exist, finished or not; an absent one reads as empty. Computes nothing but totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pivotrl.observability.fields import Fields, read_lines, read_object
from pivotrl.observability.sinks import METRICS, PARITY_FINDINGS
from pivotrl.observability.sinks import TIMING as STEP_TIMING
from pivotrl.pivots.dataset import DECISIONS, PROFILES, SELECTION
from pivotrl.pivots.parquet import count_rows, read_rows
from pivotrl.pivots.select import KEPT
from pivotrl.pivots.statistics import Interval
from pivotrl.rundir import MANIFEST, STAGES, SUCCESS, TIMING

# A larger K is binned by tenths: its bars would be too thin to read.
_MAX_SAMPLES_SHOWN = 32
_MAX_DENOMINATOR = 10_000


@dataclass(frozen=True, slots=True)
class StageReading:
    """One stage's directory."""

    name: str
    status: str
    """``finished``, ``unfinished`` or ``not run``."""
    manifest: Fields
    wall_s: float | None

    @property
    def summary(self) -> Fields:
        return self.manifest.child("summary")


@dataclass(frozen=True, slots=True)
class Score:
    """One suite on one checkpoint."""

    suite: str
    checkpoint: str
    interval: Interval
    seeds: str
    facets: tuple[tuple[str, Interval], ...]
    """Parts of the suite with a score of their own."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A reward difference on single turns as its two parts."""

    format: Interval
    """What more (or fewer) readable actions are worth."""
    decision: Interval
    """What better (or worse) readable actions are worth."""
    well_formed_before: float | None
    well_formed_after: float | None
    num_one_sided: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Trained minus reference on one suite, paired item by item."""

    suite: str
    interval: Interval
    wins: int | None
    losses: int | None
    sign_test_p: float | None
    gain: Gain | None
    """None for suites of whole episodes."""


@dataclass(frozen=True, slots=True)
class Judging:
    """What a judge cost one stage, in the processes that finished it: a resumed stage counts from its resumption, as its wall time does."""

    stage: str
    requests: int
    failures: int
    cache_hits: int
    prompt_tokens: int
    completion_tokens: int
    request_s: float


@dataclass(frozen=True, slots=True)
class RewardLevel:
    """Profiled candidates with one pass rate."""

    label: str
    count: int
    num_pivots: int


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything the report draws, conversations aside."""

    run: Path
    stages: dict[str, StageReading]
    num_trajectories_found: int | None
    num_trajectories: int | None
    """Kept by ingest."""
    num_candidates: int | None
    levels: tuple[RewardLevel, ...]
    """Histogram of pass rates over usable profiles, both splits, from 0 to 1."""
    selection: Fields
    steps: tuple[Fields, ...]
    """Rows of train/metrics.jsonl."""
    sft_steps: tuple[Fields, ...]
    """Rows of sft/metrics.jsonl."""
    validations: tuple[Fields, ...]
    parity_findings: tuple[Fields, ...]
    """Rows of train/parity_findings.jsonl: checks that failed."""
    scores: tuple[Score, ...]
    differences: tuple[Difference, ...]
    eval_turns: int | None
    diagnostics: Fields
    """What the theory says, as the eval stage measured it; without keys where it did not."""
    judging: tuple[Judging, ...]
    """Stages that asked a judge."""

    def total(self, metric: str) -> int:
        """Sum of a counted metric over all steps."""
        return round(sum(step.number(metric) or 0 for step in self.steps))


def read_run(run: Path) -> Readings:
    """Reads RUN.

    Raises:
        UserError: for a value of the wrong type, naming file and key.
    """
    scores = read_object(run / "eval" / "scores.json", name="eval/scores.json")
    return Readings(
        run=run,
        stages={name: _read_stage(run, name) for name in STAGES if name != "report"},
        num_trajectories_found=_trajectories_found(read_object(run / "ingest" / "audit.json", name="ingest/audit.json")),
        num_trajectories=_rows_of(run / "ingest" / "trajectories.parquet"),
        num_candidates=_rows_of(run / "ingest" / "candidates.parquet"),
        levels=_reward_levels(run),
        selection=read_object(run / "select" / SELECTION, name=f"select/{SELECTION}"),
        steps=tuple(read_lines(run / "train" / METRICS, name=f"train/{METRICS}")),
        sft_steps=tuple(read_lines(run / "sft" / METRICS, name=f"sft/{METRICS}")),
        validations=tuple(read_lines(run / "train" / "validation.jsonl", name="train/validation.jsonl")),
        parity_findings=tuple(read_lines(run / "train" / PARITY_FINDINGS, name=f"train/{PARITY_FINDINGS}")),
        scores=tuple(_read_scores(scores)),
        differences=tuple(_read_differences(scores)),
        eval_turns=scores.count("turns"),
        diagnostics=scores.child("diagnostics"),
        judging=tuple(_read_judging(run)),
    )


def _read_stage(run: Path, name: str) -> StageReading:
    directory = run / name
    status = "finished" if (directory / SUCCESS).exists() else "unfinished" if directory.exists() else "not run"
    timing = read_object(directory / TIMING, name=f"{name}/{TIMING}")
    return StageReading(name, status, read_object(directory / MANIFEST, name=f"{name}/{MANIFEST}"), timing.number("wall_s"))


def _read_scores(scores: Fields) -> Iterable[Score]:
    for row in scores.children("suites"):
        interval = row.interval("score")
        if interval is not None:
            seeds, detail = row.values.get("seeds"), row.child("detail")
            facets = ((name, detail.child(name).interval("score")) for name in detail.values)
            yield Score(
                suite=row.text("name") or "unnamed",
                checkpoint=row.text("checkpoint") or "unnamed",
                interval=interval,
                seeds=", ".join(map(str, seeds)) if isinstance(seeds, list) else "" if seeds is None else str(seeds),
                facets=tuple((name, facet) for name, facet in facets if facet is not None),
            )


def _read_differences(scores: Fields) -> Iterable[Difference]:
    for row in scores.children("differences"):
        interval = row.interval("difference")
        if interval is not None:
            counts = row.count("wins"), row.count("losses"), row.number("sign_test_p")
            yield Difference(row.text("name") or "unnamed", interval, *counts, _read_gain(row.child("gain")))


def _read_gain(gain: Fields) -> Gain | None:
    in_format, in_decision = gain.child("format").interval(), gain.child("decision").interval()
    if in_format is None or in_decision is None:
        return None
    shares = gain.number("well_formed_before"), gain.number("well_formed_after")
    return Gain(in_format, in_decision, *shares, gain.count("num_one_sided") or 0)


def _read_judging(run: Path) -> Iterable[Judging]:
    """From timing.json of the stages that ask at once, from timing.jsonl of the one that asks step by step."""
    for stage in ("profile", "train", "eval"):
        rows = [read_object(run / stage / TIMING, name=f"{stage}/{TIMING}"), *read_lines(run / stage / STEP_TIMING, name=f"{stage}/{STEP_TIMING}")]
        total = lambda name, rows=rows: round(sum(row.number(f"rollout/judge_{name}/sum") or 0 for row in rows))  # noqa: E731
        if total("requests") or total("cache_hits"):
            yield Judging(
                stage,
                requests=total("requests"),
                failures=total("failures"),
                cache_hits=total("cache_hits"),
                prompt_tokens=total("prompt_tokens"),
                completion_tokens=total("completion_tokens"),
                request_s=sum(row.number("time/judge_s/sum") or 0.0 for row in rows),
            )


def _trajectories_found(audit: Fields) -> int | None:
    formats = audit.child("formats")
    found = [formats.child(name).child("trajectories").count("present") for name in formats.values]
    return sum(count or 0 for count in found) if found else None


def _rows_of(path: Path) -> int | None:
    return count_rows(path) if path.exists() else None


def _reward_levels(run: Path) -> tuple[RewardLevel, ...]:
    profiles, decisions = run / "profile" / PROFILES, run / "select" / DECISIONS
    if not profiles.exists():
        return ()
    pivots = (
        {row["candidate_id"] for row in read_rows(decisions, ("candidate_id", "decision")) if row["decision"] == KEPT}
        if decisions.exists()
        else set()
    )
    count: Counter[Fraction] = Counter()
    num_pivots: Counter[Fraction] = Counter()
    sample_counts: set[int] = set()
    for row in read_rows(profiles, ("candidate_id", "mean_reward", "num_samples", "quarantine_reason")):
        if row["quarantine_reason"] is None:
            # Means of K rewards in {0, 1} are k/K rounded once; this undoes the rounding.
            level = Fraction(row["mean_reward"]).limit_denominator(_MAX_DENOMINATOR)
            count[level] += 1
            num_pivots[level] += row["candidate_id"] in pivots
            sample_counts.add(row["num_samples"])
    return _binned(count, num_pivots, sample_counts)


def _binned(count: Counter[Fraction], num_pivots: Counter[Fraction], sample_counts: set[int]) -> tuple[RewardLevel, ...]:
    """Every k/K where all profiles have the same K and 0/1 rewards; else exact 0, tenths, exact 1, the two ends being what Eq. 5 drops."""
    if not count:
        return ()
    k = max(sample_counts)
    if len(sample_counts) == 1 and k <= _MAX_SAMPLES_SHOWN and all((level * k).denominator == 1 for level in count):
        levels = [Fraction(successes, k) for successes in range(k + 1)]
        return tuple(RewardLevel(f"{successes}/{k}", count[level], num_pivots[level]) for successes, level in enumerate(levels))
    labels = ["0", *(f"{tenth / 10:.1f}-" for tenth in range(10)), "1"]
    place = {level: 0 if level == 0 else 11 if level == 1 else 1 + int(level * 10) for level in count}
    return tuple(
        RewardLevel(label, sum(count[one] for one in count if place[one] == index), sum(num_pivots[one] for one in count if place[one] == index))
        for index, label in enumerate(labels)
    )
