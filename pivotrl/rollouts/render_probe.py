"""What a chat template does, found by rendering small conversations once at load: no template is recognised by name.

Answers: which text opens an assistant turn, which token ends one, whether the template writes calls as our action format does, and whether a
longer history begins with the tokens of a shorter one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pivotrl.actions.protocol import InexpressibleAction, json_text
from pivotrl.actions.thinking import CLOSE, OPEN
from pivotrl.errors import UserError
from pivotrl.rollouts.render_template import ChatTemplate, UnrenderableState
from pivotrl.types import Action, Message, Origin, ParseOutcome, Role, State, Tool, ToolCall, ToolOrigin

_TOOL = Tool("look_up", "Looks up an entry.", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]})
_TERMINUS = json_text({"analysis": "Empty.", "plan": "List.", "commands": [{"keystrokes": "ls\n", "duration": 0.1}], "task_complete": False})
_QUESTION = Message(Role.USER, "What is alpha?")
_FOLLOW_UP = Message(Role.USER, "And beta?")
_RESULT = Message(Role.TOOL, "alpha: 1", name="look_up", tool_call_id="call_0")
_REASONING = "The user asks for alpha."


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """How the template frames an assistant turn."""

    generation_prompt: str
    opened_thinking: str
    """The part of the generation prompt that belongs to the action, ``<think>`` and a newline where the template opens thinking; else empty."""
    end_token_id: int
    tail: str
    """Text between the end-of-turn token and the next message's header."""


def probe_turn(template: ChatTemplate) -> TurnMarks:
    """Generation prompt and end-of-turn token.

    Raises:
        UserError: where the template has none, or cannot render user and assistant messages.
    """
    answer = Message(Role.ASSISTANT, "Alpha is 1.", origin=Origin.MODEL)
    try:
        base = template.text([_QUESTION], (), add_generation_prompt=False)
        prompt = template.text([_QUESTION], (), add_generation_prompt=True)
        middle = template.text([_QUESTION, answer, _FOLLOW_UP], (), add_generation_prompt=False)
        last = template.text([_QUESTION, answer], (), add_generation_prompt=False)
    except UnrenderableState as error:
        raise _unusable(f"it fails on a two-message conversation ({error})", "it must render user and assistant messages") from error
    if not prompt.startswith(base) or len(prompt) == len(base):
        raise _unusable("add_generation_prompt does not append an assistant header", "generation must start behind a header")
    generation_prompt = prompt[len(base) :]
    _, _, after = middle.rpartition(answer.content)
    _, _, after_last = last.rpartition(answer.content)
    after_ids = template.encode(after)
    end_token_id = after_ids[0] if after_ids else None
    if end_token_id is None or end_token_id not in template.tokenizer.added_tokens_decoder:
        raise _unusable(f"an assistant message is followed by {after[:20]!r}", "its text must be followed directly by an end-of-turn token")
    end_text = template.tokenizer.added_tokens_decoder[end_token_id].content
    opened = generation_prompt[generation_prompt.rfind(OPEN) :] if OPEN in generation_prompt else ""
    return TurnMarks(
        generation_prompt=generation_prompt,
        opened_thinking="" if CLOSE in opened else opened,
        end_token_id=end_token_id,
        tail=after_last.removeprefix(end_text) if after.startswith(after_last) else "",
    )


def calls_are_native(template: ChatTemplate) -> bool:
    """Whether the template, given `tool_calls`, writes the same text as the action format does.

    Raises:
        UserError: where it cannot render a conversation with tools at all.
    """
    native = dataclasses.replace(template, calls_are_native=True)
    as_content = dataclasses.replace(template, calls_are_native=False)
    call = ToolCall("look_up", json_text({"key": "alpha", "limit": 2}), "call_0")
    for content, calls in (("I will look.", (call,)), ("", (call,)), ("", (call, call))):
        asked = Message(Role.ASSISTANT, content, calls, origin=Origin.MODEL, parse=ParseOutcome.PARSED)
        messages = [_QUESTION, asked, _RESULT, _FOLLOW_UP]
        try:
            expected = as_content.text(messages, (_TOOL,), add_generation_prompt=True)
        except UnrenderableState as error:
            raise _unusable(f"it fails on a conversation with a tool result ({error})", "it must render tool messages") from error
        try:
            if native.text(messages, (_TOOL,), add_generation_prompt=True) != expected:
                return False
        except UnrenderableState:
            return False
    return True


def is_prefix_stable(
    template: ChatTemplate, render_prompt: Callable[[State], tuple[int, ...]], render_action: Callable[[Action], tuple[int, ...]]
) -> bool:
    """Whether prompt + completion of a turn are the first tokens of the next turn's prompt, in a conversation with calls, and with
    thinking where the template knows of it or the recipe keeps it.

    Raises:
        UserError: where the template refuses such a conversation.
    """
    thinks = template.history_reasoning == "keep" or OPEN in template.source or CLOSE in template.source or "reasoning" in template.source
    acts = _probe_action(template, render_action, _REASONING if thinks else None)
    says = Action("Alpha is 1.", (), acts.reasoning, ParseOutcome.ABSENT)
    script = (_QUESTION, acts, _RESULT, says, _FOLLOW_UP, acts, _RESULT, says, _FOLLOW_UP, says)
    messages: list[Message] = []
    so_far: tuple[int, ...] = ()
    for step in script:
        if isinstance(step, Message):
            messages.append(step)
            continue
        try:
            prompt = render_prompt(State(tuple(messages), (_TOOL,), ToolOrigin.ROW))
        except UnrenderableState as error:
            raise _unusable(f"it fails on a conversation of several turns ({error})", "it must render calls and results in turn") from error
        if prompt[: len(so_far)] != so_far:
            return False
        so_far = prompt + render_action(step)
        messages.append(step.as_message())
    return True


def _probe_action(template: ChatTemplate, render_action: Callable[[Action], tuple[int, ...]], reasoning: str | None) -> Action:
    """An acting action that the format can express; a message where it has none."""
    for call in (ToolCall("look_up", json_text({"key": "alpha"})), ToolCall("terminus2", _TERMINUS)):
        action = Action("", (call,), reasoning, ParseOutcome.PARSED)
        try:
            render_action(action)
        except InexpressibleAction:
            continue
        return action
    assert template.action_format.name == "plain", "every other format expresses one of the calls above"
    return Action("I will look.", (), reasoning, ParseOutcome.ABSENT)


def _unusable(problem: str, rule: str) -> UserError:
    return UserError(f"the chat template cannot be used: {problem}", rule=rule, fix="give another template as render.chat_template")
