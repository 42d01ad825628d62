"""The charts of the report: which metric is drawn how, in the order a reader asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise

from pivotrl.metrics import check_name
from pivotrl.observability.charts import Bar, Series, histogram, line_chart
from pivotrl.observability.fields import Fields
from pivotrl.observability.readings import Readings
from pivotrl.pivots.statistics import Interval

_STEP = "optimizer step"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart with its caption."""

    title: str
    svg: str
    """Safe markup made by charts.py; "" where there is nothing to draw."""
    caption: str


@dataclass(frozen=True, slots=True)
class _Plan:
    title: str
    y_label: str
    metrics: tuple[tuple[str, str], ...]
    """(metric, name of the line)."""
    is_share: bool


_PLANS = (
    _Plan("Reward", "mean reward, 0 to 1", (("rollout/reward/mean", "reward"),), is_share=True),
    _Plan("Reward spread", "mean within-group std", (("rollout/reward/std", "std"),), is_share=False),
    _Plan("Zero-variance groups", "share of groups", (("rollout/group_zero_variance/frac", "zero variance"),), is_share=True),
    _Plan("KL to the reference", "nats per token", (("objective/kl_reference/mean", "KL"),), is_share=False),
    _Plan("Entropy", "nats per token", (("objective/entropy/mean", "entropy"),), is_share=False),
    _Plan("Clipped ratios", "share of tokens", (("objective/ratio_clipped/frac", "clipped"),), is_share=False),
    _Plan(
        "Format",
        "share of rollouts",
        (("rollout/malformed/frac", "malformed"), ("rollout/truncated/frac", "truncated"), ("rollout/absent/frac", "no action")),
        is_share=False,
    ),
    _Plan(
        "Tokens wasted", "tokens per step", (("rollout/response_tokens/sum", "generated"), ("rollout/wasted_tokens/sum", "wasted")), is_share=False
    ),
    _Plan("Gradient norm", "norm before clipping", (("optim/grad_norm/mean", "norm"),), is_share=False),
    _Plan(
        "Trainer against engine",
        "abs. log-prob difference",
        (("objective/logprob_mismatch/mean", "mean"), ("objective/logprob_mismatch/max", "max")),
        is_share=False,
    ),
)


_SFT_PLAN = _Plan("Supervised loss", "nats per token", (("objective/loss/mean", "loss"),), is_share=False)


def training_panels(readings: Readings) -> list[Panel]:
    """Every planned chart of the reinforcement stage that has data, held-out reward after reward."""
    panels = [_metric_panel(plan, readings.steps) for plan in _PLANS]
    panels.insert(1, _validation_panel(readings.validations))
    return [panel for panel in panels if panel.svg]


def sft_panel(readings: Readings) -> Panel:
    """Loss of the supervised stage that made the reference policy; "" as its chart where there was none."""
    return _metric_panel(_SFT_PLAN, readings.sft_steps)


def pass_rate_panel(readings: Readings) -> Panel:
    """Histogram of pass rates with the pivots among them and, under Eq. 5, lambda_diff."""
    levels = readings.levels
    num_candidates, num_pivots = sum(level.count for level in levels), sum(level.num_pivots for level in levels)
    svg = histogram(
        "Pass rates under the reference policy",
        x_label="pass rate over K samples",
        y_label="candidates",
        bars=[Bar(level.label, level.count, level.num_pivots) for level in levels],
        marker=_lambda_marker(readings),
    )
    return Panel("Pass rates under the reference policy", svg, f"n = {num_candidates:,} usable profiles; in colour the {num_pivots:,} pivots")


def _lambda_marker(readings: Readings) -> tuple[float, str] | None:
    """Where lambda_diff lies: between the bars k/K that it keeps and those it drops, or on the scale of the binned histogram."""
    stated = readings.selection.child("rule").values.get("lambda_diff")
    if stated is None or not readings.levels:
        return None
    try:
        lambda_diff = Decimal(str(stated))
    except InvalidOperation:
        return None
    num_samples = len(readings.levels) - 1
    if readings.levels[-1].label != f"{num_samples}/{num_samples}":
        return 1 + 10 * float(lambda_diff), f"lambda {stated}"
    first_dropped = next(k for k in range(num_samples + 1) if k >= lambda_diff * num_samples)
    return float(first_dropped), f"lambda {stated}"


def _metric_panel(plan: _Plan, steps: Sequence[Fields]) -> Panel:
    series = [Series(name, _points(steps, metric)) for metric, name in plan.metrics]
    y_floor, y_ceiling = (0.0, 1.0) if plan.is_share else (0.0, None)
    svg = line_chart(plan.title, x_label=_STEP, y_label=plan.y_label, series=series, y_floor=y_floor, y_ceiling=y_ceiling)
    num_points = max(len(one.points) for one in series)
    meaning = "; ".join(check_name(metric).meaning for metric, _ in plan.metrics)
    return Panel(plan.title, svg, f"{meaning}. n = {num_points:,} steps{_per_step(steps)}")


def _validation_panel(validations: Sequence[Fields]) -> Panel:
    rows = [(step, interval) for row in validations if (step := row.number("step")) is not None and (interval := _score(row)) is not None]
    series = Series("held out", tuple((step, one.value) for step, one in rows), tuple((step, one.low, one.high) for step, one in rows))
    svg = line_chart("Held-out reward", x_label=_STEP, y_label="mean reward, 0 to 1", series=[series], y_floor=0.0, y_ceiling=1.0)
    n = sorted({one.n for _, one in rows})
    return Panel(
        "Held-out reward", svg, f"Candidates never trained on, same sampling as training; band: 95 % interval; n = {_range(n)} rollouts each time"
    )


def _score(row: Fields) -> Interval | None:
    return row.interval("value") or row.interval("reward_mean")


def _points(steps: Sequence[Fields], metric: str) -> tuple[tuple[float, float], ...]:
    return tuple((step, value) for row in steps if (step := row.number("step")) is not None and (value := row.number(metric)) is not None)


def _per_step(steps: Sequence[Fields]) -> str:
    """Rollouts of a step, from the turn counter."""
    turns = [count for row in steps if (count := row.count("perf/env_turns/sum")) is not None]
    per_step = sorted({late - early for early, late in pairwise([0, *turns]) if late > early})
    return f" of {_range(per_step)} rollouts" if per_step else ""


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "0"
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,} to {numbers[-1]:,}"
