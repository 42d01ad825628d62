"""The best and the worst rollout of a step beside each other, with the conversation that led there and the verdicts' reasons.

Picks one pivot per step: the one whose rollouts differ most, since two answers to the same question show what the advantage
saw. Everything a model wrote stays text: control and direction characters are made visible here, the template escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pivotrl.observability.fields import Fields, read_lines
from pivotrl.pivots.dataset import PivotStore, pivot_state
from pivotrl.rundir import Stage
from pivotrl.trajectories.store import TrajectoryStore
from pivotrl.types import Action, Message, Pivot, VerdictKind

_MAX_MESSAGES = 6
_MAX_CHARACTERS = 2400
# C0 and C1 controls but for tab and newline, and the characters that reorder text: a completion must not redraw the page.
_INVISIBLE = [*range(0x20), *range(0x7F, 0xA0), *range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
_VISIBLE = {code: f"\\u{code:04x}" for code in _INVISIBLE if chr(code) not in "\t\n"}


@dataclass(frozen=True, slots=True)
class SampledAction:
    """One row of train/rollouts.jsonl."""

    pivot_id: str
    sample_index: int
    text: str
    reward: float
    verdict: str
    reason: str
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as it is shown."""

    speaker: str
    text: str
    calls: tuple[str, ...]
    reasoning: str


@dataclass(frozen=True, slots=True)
class StepExample:
    """One step's pivot with its best and worst rollout."""

    step: int
    pivot_id: str
    rewards: str
    """How the whole group did, for example ``5 of 8 passed``."""
    num_earlier: int
    """Messages of the state that are not shown."""
    context: tuple[Turn, ...]
    expert: Turn | None
    best: SampledAction
    worst: SampledAction


def step_examples(run: Path) -> list[StepExample]:
    """Examples of the first, the middle and the last step in train/rollouts.jsonl; none where nothing was trained, or on whole episodes.

    The file is read twice, so that only the rollouts of three steps are in memory.
    """
    path, name = run / "train" / "rollouts.jsonl", "train/rollouts.jsonl"
    steps = sorted({step for row in read_lines(path, name=name) if (step := row.count("step")) is not None and row.count("turn") is None})
    if not steps:
        return []
    wanted = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    rows: dict[int, list[SampledAction]] = {step: [] for step in wanted}
    for row in read_lines(path, name=name):
        step = row.count("step")
        if step in rows:
            rows[step].append(_sampled_action(row))
    pivots, trajectories = _stores(run)
    examples = (_example(step, rows[step], pivots, trajectories) for step in wanted)
    return [example for example in examples if example is not None]


def visible(text: str) -> str:
    """Text with invisible characters written as escapes and the middle of very long text left out.

    >>> visible("a" + chr(0x202e) + "b" + chr(0))
    'a\\\\u202eb\\\\u0000'
    """
    if len(text) > _MAX_CHARACTERS:
        head, tail = _MAX_CHARACTERS * 3 // 4, _MAX_CHARACTERS // 4
        text = f"{text[:head]}\n[... {len(text) - head - tail:,} characters left out ...]\n{text[-tail:]}"
    return text.translate(_VISIBLE)


def _example(step: int, rows: Sequence[SampledAction], pivots: dict[str, Pivot], trajectories: TrajectoryStore | None) -> StepExample | None:
    groups: dict[str, list[SampledAction]] = {}
    for row in rows:
        if row.verdict != VerdictKind.INFRA:
            groups.setdefault(row.pivot_id, []).append(row)
    if not groups:
        return None
    pivot_id = max(sorted(groups), key=lambda one: _contrast(groups[one]))
    group = groups[pivot_id]
    pivot = pivots.get(pivot_id)
    messages: tuple[Message, ...] = ()
    if pivot is not None and trajectories is not None:
        messages = pivot_state(trajectories.get(pivot.trajectory_id), pivot).messages
    shown = messages[-_MAX_MESSAGES:]
    return StepExample(
        step=step,
        pivot_id=pivot_id,
        rewards=_group_rewards(group),
        num_earlier=len(messages) - len(shown),
        context=tuple(_turn_of_message(message) for message in shown),
        expert=None if pivot is None else _turn_of_action(pivot.expert_action),
        best=max(group, key=lambda row: (row.reward, -row.sample_index)),
        worst=min(group, key=lambda row: (row.reward, row.sample_index)),
    )


def _contrast(group: Sequence[SampledAction]) -> tuple[float, float]:
    """Largest difference of rewards first, then the most even split: the group that teaches most."""
    rewards = [row.reward for row in group]
    mean = sum(rewards) / len(rewards)
    return max(rewards) - min(rewards), -abs(mean - 0.5)


def _group_rewards(group: Sequence[SampledAction]) -> str:
    if all(row.reward in (0, 1) for row in group):
        return f"{sum(row.reward == 1 for row in group)} of {len(group)} passed"
    return f"mean reward {sum(row.reward for row in group) / len(group):.3f} of {len(group)}"


def _sampled_action(row: Fields) -> SampledAction:
    return SampledAction(
        pivot_id=row.text("pivot_id") or "unnamed",
        sample_index=row.count("sample_index") or 0,
        text=visible(row.text("text") or ""),
        reward=row.number("reward") or 0.0,
        verdict=row.text("verdict") or "unstated",
        reason=visible(row.text("reason") or "no reason given"),
        finish_reason=row.text("finish_reason") or "unstated",
        num_tokens=row.count("num_tokens") or 0,
    )


def _turn_of_message(message: Message) -> Turn:
    calls = tuple(visible(f"{call.name}({call.arguments})") for call in message.tool_calls)
    speaker = message.role.value if message.name is None else f"{message.role.value} {message.name}"
    return Turn(visible(speaker), visible(message.content), calls, visible(message.reasoning or ""))


def _turn_of_action(action: Action) -> Turn:
    calls = tuple(visible(f"{call.name}({call.arguments})") for call in action.tool_calls)
    return Turn("expert", visible(action.content), calls, visible(action.reasoning or ""))


def _stores(run: Path) -> tuple[dict[str, Pivot], TrajectoryStore | None]:
    pivots: Iterable[Pivot] = PivotStore.open(run / "select").pivots if Stage.is_done(run, "select") else ()
    trajectories = TrajectoryStore.open(run / "ingest") if Stage.is_done(run, "ingest") else None
    return {pivot.candidate_id: pivot for pivot in pivots}, trajectories
