"""The select stage: applies the recipe's rule to a profile directory and writes the pivots, the held-out set and every decision.

Reads the profile directory alone: profiles carry candidate, prompt and expert action. The rule sees the training split;
held-out candidates are carried over unselected, because a validation set of selected turns would flatter the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from pivotrl.artifacts import ProfileManifest, read_artifact
from pivotrl.config.schema import Eq5Rule, SelectConfig, WindowRule
from pivotrl.errors import UserError
from pivotrl.pivots.dataset import DECISIONS, HELD_OUT, PIVOTS, SELECTION, ProfileStore, write_decisions, write_pivots
from pivotrl.pivots.pass_rates import RARE, decision_rates
from pivotrl.pivots.select import QUARANTINED, ProfiledTurn, Selection, decision_of, select_pivots
from pivotrl.profiling.adaptive import counts_of
from pivotrl.rundir import MANIFEST, Stage, write_json
from pivotrl.types import Split

_HELD_OUT_KEPT = "held out"


def run_select(stage: Stage, profile_dir: Path, config: SelectConfig, *, run_seed: int) -> dict[str, Any]:
    """Selects, writes, finishes the stage and returns the content of selection.json.

    Raises:
        UserError: where no turn of the training split is kept, since there would be nothing to train on.
    """
    profiles = ProfileStore.open(profile_dir)
    turns: dict[Split, list[ProfiledTurn]] = {split: [] for split in Split}
    order: list[tuple[Split, str]] = []
    for split, turn in profiles.turns():
        turns[split].append(turn)
        order.append((split, turn.candidate_id))
    selection = select_pivots(turns[Split.TRAIN], config, run_seed=run_seed)
    if not selection.kept:
        raise UserError(
            f"select kept none of {len(turns[Split.TRAIN])} profiled turns ({_counted(selection.dropped)})",
            rule=f"rule `{config.rule}` must leave at least one pivot",
            fix="profile more candidates, raise select.lambda_diff, or start from a policy that sometimes succeeds at these turns",
        )
    held_out_decisions = {turn.candidate_id: _held_out_decision(turn) for turn in turns[Split.HELD_OUT]}
    decisions = {**selection.reasons, **held_out_decisions}
    held_out = [candidate_id for candidate_id, decision in held_out_decisions.items() if decision == _HELD_OUT_KEPT]
    write_pivots(stage.path / PIVOTS, profiles.iterate(selection.kept))
    write_pivots(stage.path / HELD_OUT, profiles.iterate(held_out))
    write_decisions(stage.path / DECISIONS, ((candidate_id, split, decisions[candidate_id]) for split, candidate_id in order))
    provenance = read_artifact(profile_dir / MANIFEST, ProfileManifest)["summary"]["provenance"]
    summary = _summary(selection, config, Counter(held_out_decisions.values()), provenance)
    summary["decision_rates"] = _decision_rates(turns[Split.TRAIN], config, run_seed)
    write_json(stage.path / SELECTION, summary)
    stage.finish(outputs=(PIVOTS, HELD_OUT, DECISIONS, SELECTION), summary=summary)
    return summary


def _held_out_decision(turn: ProfiledTurn) -> str:
    if turn.quarantine_reason is not None:
        return QUARANTINED + turn.quarantine_reason
    return _HELD_OUT_KEPT


def _decision_rates(turns: Iterable[ProfiledTurn], config: SelectConfig, run_seed: int) -> dict[str, Any] | None:
    """How often this K decides otherwise than the pass rate would (docs/profiling.md); None for rules that look at no pass rate."""
    if not isinstance(config, Eq5Rule | WindowRule):
        return None
    low, high = (RARE, 1 - RARE)
    if isinstance(config, WindowRule):
        is_worth: Callable[[float], bool] = lambda rate: low <= rate <= high and config.low <= Decimal(repr(rate)) <= config.high  # noqa: E731
    else:
        is_worth = lambda rate: low <= rate <= high and Decimal(repr(rate)) < config.lambda_diff  # noqa: E731
    counts = counts_of({"rewards": turn.rewards_K, "quarantine_reason": turn.quarantine_reason} for turn in turns)
    rates = decision_rates(counts, decision_of(config), is_worth, seed=run_seed)
    return {"false_keep_frac": rates.false_keep.as_dict(), "false_drop_frac": rates.false_drop.as_dict()}


def _summary(selection: Selection, config: SelectConfig, held_out: Counter[str], provenance: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rule": config.model_dump(mode="json"),
        "num_turns": len(selection.reasons),
        "num_pivots": len(selection.kept),
        "num_held_out": held_out[_HELD_OUT_KEPT],
        "by_reason": dict(selection.by_reason),
        "by_domain": {domain: dict(counts) for domain, counts in selection.by_domain.items()},
        "by_turn_depth": {depth: dict(counts) for depth, counts in selection.by_turn_depth.items()},
        "held_out_by_reason": dict(held_out.most_common()),
        "uninformative_frac": selection.uninformative.as_dict(),
        "provenance": dict(provenance),
    }


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counts.items())
