"""Demonstrations for the `sft` stage: ingested trajectories of the training split, and chat files beside them, as token sequences.

Chat files (`sft.paths`) are read by the openai_chat adapter and need no ingest: a pretraining mixture is not a source of candidates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pivotrl.errors import UserError
from pivotrl.progress import progress_bar
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.render_demonstration import Demonstrations
from pivotrl.trajectories import registry
from pivotrl.trajectories.source import RawRow, RowDropped, RowQuarantined
from pivotrl.trajectories.store import CandidateStore, TrajectoryStore
from pivotrl.types import Split, Trajectory

_CHAT_FORMAT = "openai_chat"


def render_demonstrations(renderer: Renderer, *, ingest_dir: Path | None, paths: Sequence[Path], max_tokens: int) -> Demonstrations:
    """All sequences, ingested ones first, in a stable order.

    Args:
        ingest_dir: a finished ingest stage, or None to leave ingested trajectories out.
        paths: chat files.
        max_tokens: longest sequence; longer conversations are cut at assistant turns (`Renderer.render_demonstration`).

    Raises:
        UserError: where a chat file has a row that cannot be read, or nothing is left to imitate.
    """
    sequences, num_dropped = [], 0
    with progress_bar("render", None, "trajectories") as bar:
        for trajectory in _trajectories(ingest_dir, paths):
            rendered = renderer.render_demonstration(trajectory.messages, trajectory.tools, trajectory.tool_origin, max_tokens=max_tokens)
            sequences += rendered.sequences
            num_dropped += rendered.num_dropped_turns
            bar.advance(1)
    if not sequences:
        raise UserError(
            f"no demonstration is left ({num_dropped} turns were too long or cannot be written in the action format)",
            rule=f"at least one assistant turn must fit sft.max_sequence_tokens, {max_tokens} tokens",
            fix="raise it, or give other trajectories",
        )
    if num_dropped:
        sys.stderr.write(f"sft: {num_dropped} turns left out: longer than {max_tokens} tokens, or not expressible in the action format\n")
    return Demonstrations(tuple(sequences), num_dropped)


def _trajectories(ingest_dir: Path | None, paths: Sequence[Path]) -> Iterator[Trajectory]:
    if ingest_dir is not None:
        train_ids = {candidate.trajectory_id for candidate in CandidateStore.open(ingest_dir).iterate() if candidate.split is Split.TRAIN}
        yield from (trajectory for trajectory in TrajectoryStore.open(ingest_dir).iterate() if trajectory.id in train_ids)
    for path in paths:
        yield from _chat_trajectories(path)


def _chat_trajectories(path: Path) -> Iterator[Trajectory]:
    adapter = registry.adapter(_CHAT_FORMAT)
    for unit in adapter.group([path], path.parent):
        for row in adapter.rows(unit):
            try:
                if not isinstance(row, RawRow):
                    raise row
                yield adapter.convert(row, None).trajectory
            except RowDropped:
                continue
            except RowQuarantined as broken:
                raise UserError(
                    f"{path}, line {broken.line}: {broken.reason}",
                    rule="every row of sft.paths must be a chat conversation",
                    fix="correct the row, or ingest the file instead (`sft.use_ingested: true`), which sets broken rows apart",
                ) from broken
