"""The tables of the report: what changed, how many turns were left at each step, what it cost, where it came from.

Pure: `Readings` in, rows of text and numbers out. A figure whose stage was not run is None and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from pivotrl.observability.fields import Fields
from pivotrl.observability.readings import Difference, Readings
from pivotrl.pivots.select import KEPT
from pivotrl.pivots.statistics import Interval

# Quarantine reasons beside the funnel's bar; all of them are in the selection table.
_MAX_REASONS = 3
REFERENCE, TRAINED = "reference", "trained"


@dataclass(frozen=True, slots=True)
class Headline:
    """One suite, or one facet of it, before and after training."""

    label: str
    is_facet: bool
    before: Interval | None
    after: Interval | None
    difference: Difference | None
    """Paired; None where evaluation states none, as for facets."""
    seeds: str

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after.value - self.before.value


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One narrowing of the data."""

    label: str
    count: int | None
    note: str
    share: float | None
    """Of the candidates, in [0, 1]; None where the unit is not turns."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """What one stage paid."""

    stage: str
    turns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    wasted_tokens: int | None
    wall_s: float | None


@dataclass(frozen=True, slots=True)
class SelectionTable:
    """Turns by decision (rows; there may be many reasons) and group (columns)."""

    title: str
    groups: tuple[str, ...]
    totals: tuple[int, ...]
    rows: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """Provenance of one stage."""

    stage: str
    status: str
    seed: str
    commit: str
    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str]]
    config: str


def headlines(readings: Readings) -> list[Headline]:
    """Suites in the order of the scores file, reference and trained checkpoint beside each other, facets below their suite."""
    differences = {one.suite: one for one in readings.differences}
    rows: list[Headline] = []
    for suite in dict.fromkeys(score.suite for score in readings.scores):
        scores = {score.checkpoint: score for score in readings.scores if score.suite == suite}
        before, after = scores.get(REFERENCE), scores.get(TRAINED)
        facets_before, facets_after = dict(before.facets if before else ()), dict(after.facets if after else ())
        seeds = next(iter(scores.values())).seeds
        whole = [one and one.interval for one in (before, after)]
        rows.append(Headline(suite, False, whole[0], whole[1], differences.get(suite), seeds))
        rows += [Headline(name, True, facets_before.get(name), facets_after.get(name), None, "") for name in {**facets_before, **facets_after}]
    return rows


def funnel(readings: Readings) -> list[FunnelStep]:
    """Trajectories, candidates, profiled, usable, informative, pivots."""
    profile, selection = readings.stages["profile"].summary, readings.selection
    uninformative = selection.child("uninformative_frac")
    judged, share = uninformative.count("n"), uninformative.number("value")
    informative = None if judged is None or share is None else judged - round(share * judged)
    held_out = profile.count("num_held_out")
    steps = [
        ("Candidates", readings.num_candidates, "assistant turns of the kept trajectories"),
        ("Profiled", profile.count("num_candidates"), "" if held_out is None else f"of which {held_out:,} held out for validation"),
        ("With a usable profile", profile.count("num_profiled"), _counted(profile.child("quarantine"))),
        ("Informative", informative, "" if judged is None else f"rewards not all equal; of {judged:,} usable training turns"),
        ("Pivots", selection.count("num_pivots"), _rule(selection.child("rule"))),
    ]
    widest = max((count for _, count, _ in steps if count is not None), default=0)
    rows = [FunnelStep(label, count, note, None if count is None or not widest else count / widest) for label, count, note in steps]
    found = readings.num_trajectories_found
    note = "kept by ingest" if found is None else f"kept of {found:,} found"
    return [FunnelStep("Trajectories", readings.num_trajectories, note, None), *rows]


def cost(readings: Readings) -> list[CostRow]:
    """Profiling, training rollouts, validation and evaluation, with their total over what is known."""
    profile = readings.stages["profile"].summary.child("cost")
    turns_so_far = [turns for step in readings.steps if (turns := step.count("perf/env_turns/sum")) is not None]
    has_steps = bool(readings.steps)
    validation = [(row.count("n") or 0) + (row.count("num_infra") or 0) for row in readings.validations]
    wall = {name: stage.wall_s for name, stage in readings.stages.items()}
    rows = [
        CostRow("Profile", profile.count("turns"), profile.count("prompt_tokens"), profile.count("completion_tokens"), None, wall["profile"]),
        CostRow(
            "Train",
            max(turns_so_far, default=None),
            readings.total("rollout/prompt_tokens/sum") if has_steps else None,
            readings.total("rollout/response_tokens/sum") if has_steps else None,
            readings.total("rollout/wasted_tokens/sum") if has_steps else None,
            wall["train"],
        ),
        CostRow("Validation", sum(validation) if validation else None, None, None, None, None),
        CostRow("Evaluation", readings.eval_turns, None, None, None, wall["eval"]),
    ]
    total = CostRow(
        "Total of what is known",
        _sum(row.turns for row in rows),
        _sum(row.prompt_tokens for row in rows),
        _sum(row.completion_tokens for row in rows),
        _sum(row.wasted_tokens for row in rows),
        _sum(row.wall_s for row in rows),
    )
    return [*rows, total]


def selection_tables(selection: Fields) -> list[SelectionTable]:
    """Turns by decision: in all and per domain, and per turn depth."""
    by_reason = selection.child("by_reason").counts()
    if not by_reason:
        return []
    domains, depths = selection.child("by_domain"), selection.child("by_turn_depth")
    by_domain = {"all": by_reason, **{name: domains.child(name).counts() for name in domains.values}}
    by_depth = {name: depths.child(name).counts() for name in sorted(depths.values, key=_lower_bound)}
    return [_selection_table(title, groups, by_reason) for title, groups in (("By domain", by_domain), ("By turn depth", by_depth)) if groups]


def diagnostics(measured: Fields) -> list[tuple[str, Interval]]:
    """What the theory says about pivots and policy: words and number. Empty where it was not measured."""
    order, kl = measured.child("order"), measured.child("kl")
    rows = (
        ("Expected signal sqrt(mu (1 - mu)), pivots", measured.child("signal_pivots")),
        ("Expected signal sqrt(mu (1 - mu)), all usable turns", measured.child("signal_turns")),
        ("Rank correlation of log pi_0 and log pi, actions outside M", order.child("outside")),
        ("Rank correlation of log pi_0 and log pi, actions in M", order.child("inside")),
        ("KL(pi || pi_0) out of domain, nats per answer (k1)", kl.child("k1")),
        ("KL(pi || pi_0) out of domain, nats per answer (k3)", kl.child("k3")),
    )
    return [(label, interval) for label, fields in rows if (interval := fields.interval()) is not None]


def manifests(readings: Readings) -> list[ManifestRow]:
    """One row per stage in order, those that were not run included."""
    return [
        ManifestRow(
            stage=stage.name,
            status=stage.status,
            seed="" if stage.manifest.count("seed") is None else str(stage.manifest.count("seed")),
            commit=stage.manifest.text("commit") or "",
            inputs=_flat("", stage.manifest.child("inputs")),
            outputs=_flat("", stage.manifest.child("outputs")),
            config=orjson.dumps(stage.manifest.child("config").values, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode(),
        )
        for stage in readings.stages.values()
    ]


def pivot_provenance(selection: Fields) -> list[tuple[str, str]]:
    """What the pivot set is specific to: name and value."""
    return _flat("", selection.child("provenance"))


def rendering_note(selection: Fields) -> str:
    """How states became prompts; "" where no pivot set says so."""
    is_stable = selection.child("provenance").values.get("prefix_stable")
    if is_stable is None:
        return ""
    if is_stable:
        return "The chat template is prefix-stable: the tokens of a turn and its answer begin the next turn's prompt."
    return "The chat template rewrites earlier turns, so it is not prefix-stable: each state was rendered whole."


def versions(readings: Readings) -> list[tuple[str, str]]:
    """Package versions of the last stage that states any."""
    stated = [found for stage in readings.stages.values() if (found := _flat("", stage.manifest.child("versions")))]
    return stated[-1] if stated else []


def _selection_table(title: str, groups: Mapping[str, Mapping[str, int]], by_reason: Mapping[str, int]) -> SelectionTable:
    decisions = sorted(by_reason, key=lambda reason: (reason != KEPT, -by_reason[reason], reason))
    rows = tuple((decision, tuple(counts.get(decision, 0) for counts in groups.values())) for decision in decisions)
    return SelectionTable(title, tuple(groups), tuple(sum(counts.values()) for counts in groups.values()), rows)


def _lower_bound(depth: str) -> int:
    """The first turn of a depth bucket; JSON files are written with sorted keys, which puts 16-31 before 2-3."""
    first = depth.split("-")[0]
    return int(first) if first.isdecimal() else 0


def _counted(quarantine: Fields) -> str:
    reasons = sorted(quarantine.counts().items(), key=lambda entry: (-entry[1], entry[0]))
    shown = [f"{count:,} quarantined: {reason}" for reason, count in reasons[:_MAX_REASONS]]
    return "; ".join([*shown, "..."] if len(reasons) > _MAX_REASONS else shown) or "none quarantined"


def _rule(rule: Fields) -> str:
    """The selection rule as a phrase.

    >>> _rule(Fields("selection.json", {"rule": "eq5", "lambda_diff": "0.6"}))
    'rule eq5, lambda_diff 0.6'
    """
    settings = [f"{name} {value}" for name, value in rule.values.items() if name != "rule"]
    return ", ".join([f"rule {name}" for name in [rule.text("rule")] if name] + settings)


def _sum(values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _flat(prefix: str, fields: Fields) -> list[tuple[str, str]]:
    """An object as dotted names and values."""
    rows: list[tuple[str, str]] = []
    for name, value in fields.values.items():
        if isinstance(value, dict):
            rows += _flat(f"{prefix}{name}.", fields.child(name))
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
