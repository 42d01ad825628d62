"""NeMo-Gym rows as tasks of whole episodes: a row names the agent that plays it and holds what that agent needs, none of which is read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.gym.rows import GymRow, read_rows
from pivotrl.identity import content_id
from pivotrl.trajectories.source import RowQuarantined

_PARAMS, _AGENT = "responses_create_params", "agent_ref"
_RULE = f"a row is a JSON object with `{_PARAMS}` and an `{_AGENT}` that names an agent of NeMo-Gym"


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One task."""

    id: str
    """Content id of the row: two equal rows are one task."""
    family: str
    """The agent's name, by which scores are split."""
    value: Mapping[str, Any]

    def request(self, *, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """The body of POST /run: the row, sampled as the recipe says."""
        params = {**self.value[_PARAMS], "temperature": temperature, "top_p": 1.0, "max_output_tokens": max_new_tokens}
        return {**self.value, _PARAMS: params}


def read_episode_rows(paths: Sequence[Path], *, key: str, agent: str | None = None) -> tuple[EpisodeRow, ...]:
    """The rows of files and folders, each once, in order.

    Args:
        key: the recipe's key, for errors.
        agent: plays rows that name no agent.

    Raises:
        UserError: for a path without rows, and for a row that cannot be read or names no agent, with its file and line.
    """
    rows: dict[str, EpisodeRow] = {}
    for found in read_rows(paths):
        if isinstance(found, RowQuarantined):
            raise _unusable(key, f"{found.file}:{found.line}", found.reason)
        row = _row(found, key, agent)
        rows.setdefault(row.id, row)
    if not rows:
        raise UserError(f"{key} names no row", rule="an environment's tasks are rows", fix=f"give JSONL files of NeMo-Gym rows as {key}")
    return tuple(rows.values())


def _row(found: GymRow, key: str, agent: str | None) -> EpisodeRow:
    stated = found.value.get(_AGENT)
    name = stated.get("name") if isinstance(stated, dict) else agent if stated is None else None
    if not isinstance(name, str) or not name:
        raise _unusable(key, found.place, f"`{_AGENT}` has no name, and environment.agent is null" if stated is None else f"`{_AGENT}` has no name")
    if not isinstance(found.value.get(_PARAMS), dict):
        raise _unusable(key, found.place, f"`{_PARAMS}` is not an object")
    return EpisodeRow(content_id(dict(found.value)), name, found.value)


def _unusable(key: str, place: str, reason: str) -> UserError:
    return UserError(f"{key}: {place}: {reason}", rule=_RULE, fix="correct the row, or name the agent as environment.agent")
