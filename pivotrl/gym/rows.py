"""NeMo-Gym rows as they lie in JSONL: what was asked, what the expert did, what a policy answered, which reward was recorded.

Reading is lenient, like the `nemo_gym` adapter, which reads the state and the expert's action; here the response is read too. Called by the verbs
`verify`, `import-gym` and `export-gym`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pivotrl.actions.registry import action_format
from pivotrl.errors import UserError
from pivotrl.trajectories.adapters.nemo_gym import ADAPTER
from pivotrl.trajectories.adapters.responses_items import read_item_call
from pivotrl.trajectories.files import discover, record_rows
from pivotrl.trajectories.source import RawRow, RowDropped, RowQuarantined, SourceUnit
from pivotrl.types import Action, Domain, ParseOutcome, State, Trajectory
from pivotrl.verifiers.protocol import Case

EXPECTED_KEYS = ("expected_action", "expected_answer")
_HARNESSES = ("terminus_1", "terminus_2")


@dataclass(frozen=True, slots=True)
class GymRow:
    """One row and where it lies."""

    file: str
    line: int
    """From 1; the position where the file is an array."""
    index: int
    """Position among the rows of the file, from 0."""
    value: Mapping[str, Any]
    repairs: tuple[str, ...] = ()
    """What reading had to change for the JSON to be usable (lone surrogates, NaN); empty for nearly every row."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """An action that was rewarded before, ready to be judged again."""

    place: str
    """File and line, or candidate and sample: where to look it up."""
    case: Case
    reward: float
    """The recorded one."""
    threshold: float | None = None
    """The row's own similarity threshold (terminal rows), which overrides the grader's."""
    harness: str | None = None
    """`metadata.harness` (terminal rows)."""


def read_rows(paths: Sequence[Path]) -> Iterator[GymRow | RowQuarantined]:
    """Rows of files and folders in a stable order; what cannot be read is a value with file, line and reason.

    Raises:
        UserError: for a path that does not exist.
    """
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", rule="every path names a file or folder of NeMo-Gym rows (JSONL)", fix="correct the path")
    for file in discover(paths).files:
        for raw in record_rows(SourceUnit((file.path,), file.name)):
            if isinstance(raw, RowQuarantined):
                yield raw
                continue
            line = raw.line if raw.line is not None else raw.index + 1
            if isinstance(raw.value, dict):
                yield GymRow(file.name, line, raw.index, cast("dict[str, Any]", raw.value), raw.repairs)
            else:
                yield RowQuarantined("a row is not a JSON object", file=file.name, line=line)


def trajectory_of(row: GymRow) -> Trajectory:
    """The row's state and expert action as a trajectory: the expert's action is its last message.

    Raises:
        RowQuarantined: for a row of the wrong shape.
        RowDropped: for one without an expert action.
    """
    return ADAPTER.convert(RawRow(row.file, row.index, row.line, dict(row.value)), None).trajectory


def recorded(row: GymRow, expected: Mapping[str, Mapping[str, Any]]) -> Recorded:
    """The row's response with its recorded reward.

    Args:
        expected: rows that hold the expert's action, by `uuid`, for recorded rollouts that do not.

    Raises:
        RowQuarantined: for a row that cannot be judged; the reason says what is missing.
    """
    value = row.value
    reward = value.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise RowQuarantined("no recorded reward")
    if not isinstance(value.get("response"), dict):
        raise RowQuarantined("no response")
    if not any(value.get(key) for key in EXPECTED_KEYS):
        source = expected.get(str(value.get("uuid")))
        if source is None:
            raise RowQuarantined("no expected action")
        value = {**value, **{key: source[key] for key in EXPECTED_KEYS if key in source}}
        row = GymRow(row.file, row.line, row.index, value)
    try:
        trajectory = trajectory_of(row)
    except RowDropped as dropped:
        raise RowQuarantined(dropped.reason) from dropped
    is_terminal = trajectory.domain is Domain.TERMINAL
    if is_terminal and not _is_object(value["expected_answer"]):
        raise RowQuarantined("expected_answer is not a JSON object")
    state = State(trajectory.messages[:-1], trajectory.tools, trajectory.tool_origin)
    last = trajectory.messages[-1]
    expert = Action(last.content, last.tool_calls, last.reasoning, last.parse)
    case = Case(state, expert, response_action(value["response"], is_terminal=is_terminal))
    if not is_terminal:
        return Recorded(row.place, case, float(reward))
    return Recorded(row.place, case, float(reward), _threshold(value), _harness(value))


def response_action(response: Mapping[str, Any], *, is_terminal: bool) -> Action:
    """The action of a recorded response: its calls in order and its texts, one per line; thinking is split off. No text and no call is malformed.

    Raises:
        RowQuarantined: for a response without a list of output items.
    """
    output = response.get("output")
    if not isinstance(output, list):
        raise RowQuarantined("wrong schema: response.output is not a list")
    items = [cast("dict[str, Any]", item) for item in cast("list[Any]", output) if isinstance(item, dict)]
    texts = [text for item in items if item.get("type") == "message" for text in _output_texts(item.get("content"))]
    calls = [read_item_call(item) for item in items if item.get("type") == "function_call"]
    text = "\n".join(texts)
    if calls and not is_terminal:
        parse = ParseOutcome.PARSED if all(is_readable for _, is_readable in calls) else ParseOutcome.MALFORMED
        return Action(text, tuple(call for call, _ in calls), None, parse)
    if not texts:
        return Action("", (), None, ParseOutcome.MALFORMED)
    return action_format("terminus2" if is_terminal else "plain").parse(text)


def _output_texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "output_text"]
    return [text for text in texts if isinstance(text, str)]


def _is_object(answer: Any) -> bool:
    if isinstance(answer, dict):
        return True
    try:
        return isinstance(json.loads(answer), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _threshold(value: Mapping[str, Any]) -> float | None:
    threshold = value.get("threshold")
    if threshold is None:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise RowQuarantined("threshold is not a number in [0, 1]")
    return float(threshold)


def _harness(value: Mapping[str, Any]) -> str | None:
    metadata = value.get("metadata")
    harness = metadata.get("harness") if isinstance(metadata, dict) else None
    if harness is not None and harness not in _HARNESSES:
        raise RowQuarantined("metadata.harness is neither terminus_1 nor terminus_2")
    return harness
