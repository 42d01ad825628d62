"""From a unit of reading to trajectories that are ready to be judged: converted, redacted, their texts and turns at hand.

Everything here concerns one row alone; what depends on the rows before it (duplicates, limits, writing) is `ingest.py`'s. Holds the boundary that
keeps an adapter's failure on a hostile row from stopping the run.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

from pivotrl.trajectories.encoded import REMEMBERED_PROMPTS, Encoded, encode_trajectory
from pivotrl.trajectories.files import printable_name, sharing_rows
from pivotrl.trajectories.plan import ReadTask
from pivotrl.trajectories.secrets import may_hold_secret, redact_messages
from pivotrl.trajectories.source import Adapter, Converted, RawRow, RowDropped, RowQuarantined
from pivotrl.types import Domain, Message, Origin, Role, Tool, Trajectory


@dataclass(frozen=True, slots=True)
class Texts:
    """The text of a trajectory by who is behind it."""

    prompts: tuple[str, ...]
    """Texts of system messages and of what the harness wrote: shared by many trajectories, so no sign that two are alike."""
    said: bytes
    """What user and agent said, thought and called."""
    seen: bytes
    """What tools answered."""

    @property
    def num_bytes(self) -> int:
        return len(self.said) + len(self.seen)

    def whole(self) -> bytes:
        """Everything, one text after the other."""
        return b"\n".join((_utf8(self.prompts), self.said, self.seen))


@dataclass(frozen=True, slots=True)
class Prepared:
    """One readable row."""

    trajectory: Trajectory
    encoded: Encoded
    repairs: tuple[str, ...]
    secrets: Mapping[str, int]
    """Secrets redacted, by kind."""
    texts: Texts
    num_expert_turns: int
    num_harness_turns: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One row that gives no trajectory."""

    error: RowDropped | RowQuarantined
    line: int | None


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """For reading many rows: parsed JSON and records hold no cycles, and looking for some among millions of them takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepared_rows(task: ReadTask, tools: Sequence[Tool] | None, *, domain: Domain | None) -> Iterator[Prepared | LeftOut]:
    """Every row of a unit.

    Args:
        tools: tools of the user's file, for rows without their own.
        domain: replaces the adapter's, where not None.
    """
    return (item for _, item in shared_rows(task, tools, domain=domain, index=0, count=1))


def shared_rows(
    task: ReadTask, tools: Sequence[Tool] | None, *, domain: Domain | None, index: int, count: int
) -> Iterator[tuple[int, Prepared | LeftOut]]:
    """Rows of a unit with their number from 0, those alone whose number leaves `index` after division by `count`."""
    # Nothing is left on the way where everything is read.
    with sharing_rows(index, count) if count > 1 else nullcontext():
        yield from _shared_rows(task, tools, domain, islice(enumerate(_guarded_rows(task)), index, None, count))


def _shared_rows(
    task: ReadTask, tools: Sequence[Tool] | None, domain: Domain | None, rows: Iterator[tuple[int, RawRow | RowQuarantined | RowDropped]]
) -> Iterator[tuple[int, Prepared | LeftOut]]:
    for number, row in rows:
        if not isinstance(row, RawRow):
            yield number, LeftOut(row, row.line)
            continue
        try:
            yield number, _prepared(row, _guarded_convert(task.adapter, row, tools), domain)
        except (RowDropped, RowQuarantined) as error:
            yield number, LeftOut(error, row.line)


def _prepared(row: RawRow, converted: Converted, domain: Domain | None) -> Prepared:
    trajectory, encoded = converted.trajectory, converted.encoded
    if domain is not None:
        trajectory = dataclasses.replace(trajectory, domain=domain)
    if printable_name(trajectory.source_file) != trajectory.source_file:
        trajectory = dataclasses.replace(trajectory, source_file=printable_name(trajectory.source_file))
    texts, num_expert_turns, num_harness_turns = _texts(trajectory.messages)
    secrets: Counter[str] = Counter()
    if may_hold_secret(texts.said) or may_hold_secret(texts.seen) or any(map(_prompt_may_hold_secret, texts.prompts)):
        trajectory, encoded, secrets = _redacted(trajectory, encoded)
        texts = _texts(trajectory.messages)[0]
    return Prepared(trajectory, encoded, (*row.repairs, *converted.repairs), secrets, texts, num_expert_turns, num_harness_turns)


def _texts(messages: Sequence[Message]) -> tuple[Texts, int, int]:
    """The texts, and the number of assistant turns by the model and by the harness: one pass, this being a hot loop."""
    prompts: list[str] = []
    said: list[str] = []
    seen: list[str] = []
    num_expert_turns = num_harness_turns = 0
    for message in messages:
        pieces = said
        if message.role is Role.TOOL:
            pieces = seen
        elif message.role is Role.SYSTEM:
            pieces = prompts
        elif message.origin is Origin.HARNESS:
            pieces = prompts
            num_harness_turns += message.role is Role.ASSISTANT
        elif message.role is Role.ASSISTANT:
            num_expert_turns += message.origin is Origin.MODEL
        pieces.append(message.content)
        if message.reasoning is not None:
            pieces.append(message.reasoning)
        for call in message.tool_calls:
            pieces += (call.name, call.arguments)
    return Texts(tuple(prompts), _utf8(said), _utf8(seen)), num_expert_turns, num_harness_turns


def _guarded_rows(task: ReadTask) -> Iterator[RawRow | RowQuarantined | RowDropped]:
    try:
        yield from task.adapter.rows(task.unit)
    except (RowQuarantined, RowDropped) as left_out:
        yield left_out
    except Exception as error:  # noqa: BLE001
        yield RowQuarantined(_failure(error), file=task.unit.name)


def _guarded_convert(adapter: Adapter, row: RawRow, tools: Sequence[Tool] | None) -> Converted:
    try:
        return adapter.convert(row, tools)
    except (RowQuarantined, RowDropped):
        raise
    except Exception as error:
        raise RowQuarantined(_failure(error), file=row.name, line=row.line) from error


def _failure(error: Exception) -> str:
    return f"adapter failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _redacted(trajectory: Trajectory, encoded: Encoded) -> tuple[Trajectory, Encoded, Counter[str]]:
    """The trajectory without its secrets, under the id of what is left."""
    messages, secrets = redact_messages(trajectory.messages)
    if not secrets:
        return trajectory, encoded, secrets
    encoded = encode_trajectory(messages, trajectory.tools)
    new_id = encoded.content_id()
    task_id = new_id if trajectory.task_id == trajectory.id else trajectory.task_id
    return dataclasses.replace(trajectory, id=new_id, task_id=task_id, messages=messages), encoded, secrets


@functools.lru_cache(maxsize=REMEMBERED_PROMPTS)
def _prompt_may_hold_secret(text: str) -> bool:
    return may_hold_secret(_utf8((text,)))


def _utf8(pieces: Sequence[str]) -> bytes:
    return "\n".join(pieces).encode("utf-8", "replace")
