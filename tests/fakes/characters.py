"""A renderer whose tokens are code points: no tokenizer, and every id can be read. Token 0 ends a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from pivotrl.actions.registry import action_format
from pivotrl.rollouts.render_template import UnrenderableState
from pivotrl.types import Action, Role, State, Tool

END = 0
_FORMAT = action_format("hermes")


@dataclass(frozen=True)
class CharacterRenderer:
    """The parts of `Renderer` that sampling and profiling use. Refuses a state whose last message is the assistant's."""

    template = SimpleNamespace(action_format=_FORMAT)
    stop_token_ids = (END,)
    pad_token_id = END
    template_hash = "template-hash"
    tokenizer_hash = "tokenizer-hash"
    prefix_stable = True

    def render_prompt(self, state: State) -> tuple[int, ...]:
        if state.messages[-1].role is Role.ASSISTANT:
            raise UnrenderableState("chat template: roles must alternate")
        lines = [f"{message.role}: {message.content}" for message in state.messages]
        return tuple(map(ord, "\n".join([*lines, "assistant: "])))

    def render_action(self, action: Action, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        return (*map(ord, _FORMAT.render(action, tools)), END)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Action:
        return _FORMAT.parse("".join(map(chr, token_ids)).removesuffix(chr(END)), tools)


def completion(text: str) -> tuple[int, ...]:
    """The tokens of a completion that ended by itself."""
    return (*map(ord, text), END)
