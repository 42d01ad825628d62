"""From a trajectory to its candidates, Eq. 3: which assistant turns are (state, expert action) pairs, under each domain's rule.

Pure. Content ids roll forward over the messages, so a trajectory costs one pass however many candidates it has; states are not stored
(`state_of` gives them back). Called by `trajectories/ingest.py`; `state_of` by rendering and profiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import orjson

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.identity import derive_seed, running_id
from pivotrl.trajectories.encoded import Encoded
from pivotrl.types import Action, Candidate, Domain, Message, Origin, ParseOutcome, Role, Split, State, ToolCall, Trajectory

_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class Extraction:
    """The candidates of one trajectory, and the expert's other turns by the reason they are none."""

    candidates: tuple[Candidate, ...]
    encoded_actions: tuple[bytes, ...]
    """JSON of each candidate's expert action: made for its id, and what is stored."""
    excluded: Mapping[str, int]


class HashedTurn(NamedTuple):
    """One candidate before it is a record. A tuple, since `pivotrl doctor` makes one for every turn of the data and few records."""

    turn_index: int
    message_index: int
    state: bytes
    """Content id of tools and messages before the turn, 16 bytes."""
    id: bytes
    """The candidate's id, 16 bytes."""
    action: bytes
    """JSON of the expert action."""


def extract_candidates(trajectory: Trajectory, encoded: Encoded, *, held_out_frac: float, run_seed: int) -> Extraction:
    """The candidates of a trajectory in order of turn.

    Only turns that the model wrote count; greetings, demonstrations and copied context of the harness do not.

    Args:
        encoded: of the trajectory.
        held_out_frac: share of task ids held out.

    Raises:
        TypeError: for text that UTF-8 cannot hold.
    """
    split = split_of(trajectory.task_id, held_out_frac=held_out_frac, run_seed=run_seed)
    turns, excluded = eligible_turns(trajectory)
    hashed = hashed_turns(trajectory, encoded, turns)
    return Extraction(tuple(candidate_of(trajectory, turn, split) for turn in hashed), tuple(turn.action for turn in hashed), excluded)


def hashed_turns(trajectory: Trajectory, encoded: Encoded, turns: Sequence[tuple[int, int]]) -> list[HashedTurn]:
    """Ids of the candidates at `turns`, which are as `eligible_turns` gives them.

    id_t = blake2b(json(tools) + json(message_0) + ... + json(message_{t-1}) + json(action_t)): the content id of (state, action). JSON arrays and
    objects end where they end, so the sum is unambiguous, and one running hash serves all turns.

    Raises:
        TypeError: for text that UTF-8 cannot hold.
    """
    running = running_id(encoded.tools)
    num_hashed = 0
    hashed: list[HashedTurn] = []
    for turn_index, index in turns:
        running.update(b"".join(encoded.messages[num_hashed:index]))
        num_hashed = index
        message = trajectory.messages[index]
        # As a dict, because orjson is slow on enum fields; the bytes are those of the record that `action_of` gives.
        action = orjson.dumps(
            {"content": message.content, "tool_calls": message.tool_calls, "reasoning": message.reasoning, "parse": message.parse._value_}
        )
        full = running.copy()
        full.update(action)
        hashed.append(HashedTurn(turn_index, index, running.digest(), full.digest(), action))
    return hashed


def candidate_of(trajectory: Trajectory, turn: HashedTurn, split: Split) -> Candidate:
    """The record of a hashed turn."""
    return Candidate(
        id=turn.id.hex(),
        trajectory_id=trajectory.id,
        task_id=trajectory.task_id,
        domain=trajectory.domain,
        message_index=turn.message_index,
        turn_index=turn.turn_index,
        split=split,
        expert_action=action_of(trajectory.messages[turn.message_index]),
    )


def eligible_turns(trajectory: Trajectory) -> tuple[list[tuple[int, int]], Counter[str]]:
    """(turn index, message index) of the turns that the domain's rule admits, and the expert's other turns by reason."""
    messages = trajectory.messages
    turns = [index for index, message in enumerate(messages) if is_expert_turn(message)]
    eligible: list[tuple[int, int]] = []
    excluded: Counter[str] = Counter()
    for turn_index, index in enumerate(turns):
        reason = _exclusion(trajectory.domain, messages, index, is_last=index == turns[-1])
        if reason is None:
            eligible.append((turn_index, index))
        else:
            excluded[reason] += 1
    return eligible, excluded


def is_expert_turn(message: Message) -> bool:
    """True for an assistant message that the expert model wrote."""
    return message.role is Role.ASSISTANT and message.origin is Origin.MODEL


def action_of(message: Message) -> Action:
    """An assistant message as an action."""
    return Action(message.content, message.tool_calls, message.reasoning, message.parse)


def state_of(trajectory: Trajectory, candidate: Candidate) -> State:
    """s_t: what the expert saw before the candidate's turn.

    Raises:
        ValueError: where the candidate is of another trajectory.
    """
    if candidate.trajectory_id != trajectory.id:
        raise ValueError(f"candidate {candidate.id} belongs to trajectory {candidate.trajectory_id}, not to {trajectory.id}")
    return State(trajectory.messages[: candidate.message_index], trajectory.tools, trajectory.tool_origin)


def split_of(task_id: str, *, held_out_frac: float, run_seed: int) -> Split:
    """The split of a task: held out with probability `held_out_frac`, by hash, so that all its trajectories are on one side.

    >>> split_of("task", held_out_frac=0.0, run_seed=0).value, split_of("task", held_out_frac=1.0, run_seed=0).value
    ('train', 'held_out')
    """
    draw = derive_seed(run_seed, "held_out", task_id) / (1 << _SEED_BITS)
    return Split.HELD_OUT if draw < held_out_frac else Split.TRAIN


def _exclusion(domain: Domain, messages: Sequence[Message], index: int, *, is_last: bool) -> str | None:
    """Why a turn of the expert is no candidate in its domain, or None."""
    message = messages[index]
    match domain:
        case Domain.CONVERSATIONAL:
            return None
        case Domain.SWE:
            if not message.tool_calls:
                return _no_call_reason(message)
            return "tool error" if _has_error_answer(messages, index) else None
        case Domain.TERMINAL:
            if not message.tool_calls:
                return _no_call_reason(message)
            return None if any(_runs_a_command(call) for call in message.tool_calls) else "no command"
        case Domain.SEARCH:
            return None if message.tool_calls or is_last else _no_call_reason(message)


def _no_call_reason(message: Message) -> str:
    return "malformed action" if message.parse is ParseOutcome.MALFORMED else "no tool call"


def _has_error_answer(messages: Sequence[Message], index: int) -> bool:
    for answer in messages[index + 1 :]:
        if answer.role is Role.ASSISTANT:
            return False
        if answer.role is Role.TOOL and answer.is_error:
            return True
    return False


def _runs_a_command(call: ToolCall) -> bool:
    """True for any call but a Terminus-2 action whose commands all type nothing (it only waits, or only declares the task complete)."""
    if call.name != TOOL_NAME:
        return True
    commands = (call.arguments_object() or {}).get("commands")
    if not isinstance(commands, list):
        return False
    return any(isinstance(command, dict) and bool(cast("dict[str, Any]", command).get("keystrokes")) for command in cast("list[Any]", commands))
