"""From a trajectory to its candidates, Eq. 3: which assistant turns are (state, expert action) pairs, under each domain's rule.

Pure. Content ids roll forward over the messages, so a trajectory costs one pass however many candidates it has; states are not stored
(`state_of` gives them back). Called by `trajectories/ingest.py`; `state_of` by rendering and profiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pivotrl.actions.terminus2 import TOOL_NAME
from pivotrl.identity import bytes_id, canonical_json, content_id, derive_seed
from pivotrl.types import Action, Candidate, Domain, Message, Origin, ParseOutcome, Role, Split, State, ToolCall, Trajectory

_SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class Extraction:
    """The candidates of one trajectory, and the expert's other turns by the reason they are none."""

    candidates: tuple[Candidate, ...]
    excluded: Mapping[str, int]


def extract_candidates(trajectory: Trajectory, *, encoded_messages: Sequence[bytes], held_out_frac: float, run_seed: int) -> Extraction:
    """The candidates of a trajectory in order of turn.

    id_t = H(h_t + json(a_t)), h_0 = H(json(tools)), h_{i+1} = H(h_i + json(message_i)), H = `bytes_id`: the content id of (state, action).
    Only turns that the model wrote count; greetings, demonstrations and copied context of the harness do not.

    Args:
        encoded_messages: json(message_i), the caller's `encode` of each message; also what is stored, so it is made once.
        held_out_frac: share of task ids held out.
    """
    split = split_of(trajectory.task_id, held_out_frac=held_out_frac, run_seed=run_seed)
    last_turn = max((index for index, message in enumerate(trajectory.messages) if is_expert_turn(message)), default=-1)
    prefix_id = content_id(trajectory.tools).encode()
    candidates: list[Candidate] = []
    excluded: Counter[str] = Counter()
    turn_index = 0
    for index, (message, encoded) in enumerate(zip(trajectory.messages, encoded_messages, strict=True)):
        if is_expert_turn(message):
            reason = _exclusion(trajectory.domain, message, trajectory.messages, index, is_last=index == last_turn)
            if reason is None:
                action = action_of(message)
                candidates.append(
                    Candidate(
                        id=bytes_id(prefix_id + canonical_json(action)),
                        trajectory_id=trajectory.id,
                        task_id=trajectory.task_id,
                        domain=trajectory.domain,
                        message_index=index,
                        turn_index=turn_index,
                        split=split,
                        expert_action=action,
                    )
                )
            else:
                excluded[reason] += 1
            turn_index += 1
        prefix_id = bytes_id(prefix_id + encoded).encode()
    return Extraction(tuple(candidates), excluded)


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


def _exclusion(domain: Domain, message: Message, messages: Sequence[Message], index: int, *, is_last: bool) -> str | None:
    """Why a turn of the expert is no candidate in its domain, or None."""
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
