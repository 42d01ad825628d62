"""The chat template as a function from messages to text: the one call of `apply_chat_template` in the product.

Private to rendering (`render.py`). What the assistant wrote reaches the prompt unchanged whatever the template does to content (trimming,
cutting thinking out): the template is given a placeholder, and the text is put in its place afterwards.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError

from pivotrl.actions.protocol import ActionFormat, json_text
from pivotrl.types import Action, Message, ParseOutcome, Role, Tool

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

# Private-use characters; the pair around a number is written by nobody.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
# Templates that print the date would make prompts depend on the day of the run; this is the day Llama 3.1's template falls back to.
_FIXED_DATE = datetime.date(2024, 7, 26)

type HistoryReasoning = Literal["template", "keep", "drop"]


class UnrenderableState(ValueError):
    """The chat template refuses a conversation (for example roles that do not alternate); the message is the template's."""


class UnencodableText(UnrenderableState):
    """Text that no tokenizer can encode."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template and how assistant messages are given to it."""

    tokenizer: PreTrainedTokenizerFast
    source: str
    action_format: ActionFormat
    history_reasoning: HistoryReasoning
    calls_are_native: bool
    """Whether calls are given as `tool_calls`, for the template to write, or as part of the content."""

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Raises:
            UnrenderableState: where the template refuses it.
        """
        written: list[str] = []
        dicts = [self._message(message, tools, written) for message in messages]
        try:
            rendered = self.tokenizer.apply_chat_template(
                dicts,
                tools=[openai_tool(tool) for tool in tools] or None,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                strftime_now=_FIXED_DATE.strftime,
            )
        except (TemplateError, TypeError) as error:
            raise UnrenderableState(f"chat template: {error}") from error
        assert isinstance(rendered, str)
        return _PLACEHOLDER.sub(lambda match: written[int(match.group(1))] if int(match.group(1)) < len(written) else match.group(), rendered)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it is: nothing is added, special tokens in it are themselves.

        Raises:
            UnencodableText: for text with lone surrogates, which is no Unicode text.
        """
        return tuple(self.encode_with_offsets(text).ids)

    def encode_with_offsets(self, text: str) -> Encoding:
        """Like `encode`, with the place of each token in the text."""
        try:
            return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise UnencodableText("text holds a lone surrogate") from error

    def _message(self, message: Message, tools: Sequence[Tool], written: list[str]) -> dict[str, Any]:
        if message.role is Role.ASSISTANT:
            return self._assistant(action_of(message), message, tools, written)
        entry: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        return entry

    def _assistant(self, action: Action, message: Message, tools: Sequence[Tool], written: list[str]) -> dict[str, Any]:
        def placeholder(text: str) -> str:
            if not text:
                return ""
            written.append(text)
            return f"{_OPEN}{len(written) - 1}{_CLOSE}"

        entry: dict[str, Any] = {"role": message.role.value}
        if self.history_reasoning == "template" and action.reasoning:
            entry["reasoning_content"] = placeholder(action.reasoning)
        if self.history_reasoning != "keep":
            action = dataclasses.replace(action, reasoning=None)
        if self.calls_are_native and _is_native(action):
            entry["content"] = placeholder(action.content)
            entry["tool_calls"] = [_openai_call(call.name, call.arguments_object(), call.id) for call in action.tool_calls]
        else:
            entry["content"] = placeholder(self.action_format.transcribe(action, tools))
        return entry


def action_of(message: Message) -> Action:
    """An assistant message as an action."""
    well_formed = ParseOutcome.PARSED if message.tool_calls else ParseOutcome.ABSENT
    parse = message.parse if message.parse is ParseOutcome.MALFORMED else well_formed
    return Action(message.content, message.tool_calls, message.reasoning, parse)


def openai_tool(tool: Tool) -> dict[str, Any]:
    """A tool in the form templates expect."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def _is_native(action: Action) -> bool:
    """Whether a template that writes the calls itself writes them as they were: thinking apart, and arguments in the template's own spelling."""
    if not action.tool_calls or action.parse is not ParseOutcome.PARSED or action.reasoning:
        return False
    return all(json_text(call.arguments_object()) == call.arguments for call in action.tool_calls)


def _openai_call(name: str, arguments: dict[str, Any] | None, call_id: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return entry if call_id is None else {"id": call_id, **entry}
