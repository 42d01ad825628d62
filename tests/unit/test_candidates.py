"""Which turns are candidates in each domain, and ids that are the content's own."""

from __future__ import annotations

import dataclasses
import hashlib

import orjson
import pytest

from pivotrl.pivots.candidates import Extraction, extract_candidates, split_of, state_of
from pivotrl.trajectories.encoded import encode_trajectory
from pivotrl.trajectories.store import encode
from pivotrl.types import Domain, Message, Origin, Outcome, ParseOutcome, Role, Split, State, Tool, ToolCall, ToolOrigin, Trajectory

TOOLS = (Tool("look", "Look at a thing", {"type": "object", "properties": {"at": {"type": "string"}}}),)


def user(text: str) -> Message:
    return Message(Role.USER, text)


def says(text: str, origin: Origin = Origin.MODEL) -> Message:
    return Message(Role.ASSISTANT, text, origin=origin)


def calls(*arguments: str, name: str = "look") -> Message:
    made = tuple(ToolCall(name, text) for text in arguments)
    return Message(Role.ASSISTANT, "", made, origin=Origin.MODEL, parse=ParseOutcome.PARSED)


def answer(text: str, *, is_error: bool = False) -> Message:
    return Message(Role.TOOL, text, is_error=is_error)


def trajectory(domain: Domain, *messages: Message, task_id: str = "t") -> Trajectory:
    return Trajectory("id", "invented", "rows.jsonl", 0, task_id, domain, Outcome.SUCCESS, 1.0, messages, TOOLS, ToolOrigin.ROW)


def extract(source: Trajectory, held_out_frac: float = 0.0) -> Extraction:
    return extract_candidates(source, encode_trajectory(source.messages, source.tools), held_out_frac=held_out_frac, run_seed=7)


def indices(source: Trajectory) -> list[int]:
    return [candidate.message_index for candidate in extract(source).candidates]


def test_conversation_every_model_turn_text_included() -> None:
    source = trajectory(
        Domain.CONVERSATIONAL,
        says("Hello, how can I help?", Origin.HARNESS),
        user("find it"),
        calls('{"at": "a"}'),
        answer("gone", is_error=True),
        says("It is gone."),
    )
    extraction = extract(source)
    assert [(c.message_index, c.turn_index) for c in extraction.candidates] == [(2, 0), (4, 1)]
    assert extraction.excluded == {}
    assert extraction.candidates[1].expert_action.is_message


def test_swe_calls_whose_answer_is_no_error() -> None:
    source = trajectory(
        Domain.SWE,
        user("fix it"),
        says("Let me think."),
        calls('{"at": "a"}'),
        answer("fine"),
        calls('{"at": "b"}', '{"at": "c"}'),
        answer("fine"),
        answer("no such file", is_error=True),
        calls('{"at": "d"}'),
    )
    assert indices(source) == [2, 7]
    assert extract(source).excluded == {"no tool call": 1, "tool error": 1}


def test_an_error_answers_the_last_turn_before_it_only() -> None:
    source = trajectory(Domain.SWE, user("x"), calls('{"at": "a"}'), answer("ok"), calls('{"at": "b"}'), answer("bad", is_error=True))
    assert indices(source) == [1]


@pytest.mark.parametrize(
    ("arguments", "is_candidate"),
    [
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": "ls\\n", "duration": 1}]}', True),
        ('{"analysis": "", "plan": "", "commands": [], "task_complete": true}', False),
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": "", "duration": 60}]}', False),
        ('{"analysis": "", "plan": "", "commands": [{"keystrokes": "", "duration": 1}, {"keystrokes": "C-c"}]}', True),
        ('{"commands": "ls"}', False),
        ('{"commands": [', False),
    ],
)
def test_terminal_turns_that_type_something(arguments: str, is_candidate: bool) -> None:
    source = trajectory(Domain.TERMINAL, user("do it"), calls(arguments, name="terminus2"))
    assert indices(source) == ([1] if is_candidate else [])
    assert extract(source).excluded == ({} if is_candidate else {"no command": 1})


def test_terminal_calls_of_other_tools_are_commands_and_malformed_turns_are_named() -> None:
    broken = Message(Role.ASSISTANT, '{"commands": [', origin=Origin.MODEL, parse=ParseOutcome.MALFORMED)
    source = trajectory(Domain.TERMINAL, user("do it"), broken, user("what?"), calls('{"command": "ls"}', name="bash"), answer("a"), says("Done."))
    assert indices(source) == [3]
    assert extract(source).excluded == {"malformed action": 1, "no tool call": 1}


def test_search_calls_and_the_final_answer() -> None:
    source = trajectory(
        Domain.SEARCH, user("who?"), says("Let me see."), user("go on"), calls('{"at": "a"}'), answer("x"), says("It is x."), user("thanks")
    )
    assert indices(source) == [3, 5]
    assert extract(source).excluded == {"no tool call": 1}


def test_user_side_calls_are_nobodys_candidates() -> None:
    source = trajectory(Domain.CONVERSATIONAL, Message(Role.USER, "", (ToolCall("phone", "{}"),)), answer("rings"))
    assert indices(source) == []


def test_id_is_the_hash_of_tools_state_and_action() -> None:
    """Against the definition, written out: blake2b over the JSON of tools, of each message before the turn, and of the action."""
    source = trajectory(Domain.CONVERSATIONAL, user("a"), says("b"), user("c"), calls('{"at": "d"}'))
    action = source.messages[3]
    plain = {"content": "", "tool_calls": [{"name": "look", "arguments": '{"at": "d"}', "id": None}], "reasoning": None, "parse": "parsed"}
    data = (
        orjson.dumps(source.tools, option=orjson.OPT_SORT_KEYS) + b"".join(encode(message) for message in source.messages[:3]) + orjson.dumps(plain)
    )
    candidate = extract(source).candidates[1]
    assert candidate.id == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert candidate.expert_action.tool_calls == action.tool_calls


def test_id_changes_with_state_tools_and_action_and_with_nothing_else() -> None:
    base = trajectory(Domain.CONVERSATIONAL, user("a"), says("b"), user("c"), says("d"))

    def last(source: Trajectory) -> str:
        return extract(source).candidates[-1].id

    later = dataclasses.replace(base, messages=(*base.messages, user("e")))
    assert last(later) == last(base)
    assert last(dataclasses.replace(base, id="other", outcome=Outcome.UNKNOWN, task_id="u")) == last(base)
    for index in range(4):
        changed = list(base.messages)
        changed[index] = dataclasses.replace(changed[index], content="z")
        assert last(dataclasses.replace(base, messages=tuple(changed))) != last(base)
    assert last(dataclasses.replace(base, tools=())) != last(base)
    assert last(dataclasses.replace(base, messages=(user("a"), says("bc"), user(""), says("d")))) != last(base)


def test_state_is_what_came_before() -> None:
    source = trajectory(Domain.CONVERSATIONAL, user("a"), says("b"), user("c"), says("d"))
    candidate = extract(source).candidates[1]
    assert state_of(source, candidate) == State(source.messages[:3], TOOLS, ToolOrigin.ROW)
    with pytest.raises(ValueError, match="belongs to trajectory id"):
        state_of(dataclasses.replace(source, id="other"), candidate)


def test_split_is_by_task_and_close_to_the_share_asked_for() -> None:
    splits = [split_of(f"task-{number}", held_out_frac=0.2, run_seed=3) for number in range(4000)]
    # Binomial(4000, 0.2): standard deviation 25; five of them.
    assert abs(splits.count(Split.HELD_OUT) - 800) < 125
    assert splits == [split_of(f"task-{number}", held_out_frac=0.2, run_seed=3) for number in range(4000)]
    sources = [trajectory(Domain.CONVERSATIONAL, user(str(number)), says("b"), says("c"), task_id="task-1") for number in range(5)]
    assert len({candidate.split for source in sources for candidate in extract(source, 0.5).candidates}) == 1
