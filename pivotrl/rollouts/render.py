"""From messages to token ids and back: the only place a chat template is applied and the only place a completion is parsed.

Called by ingest-free stages (sft, profile, train, eval) in one process. A prompt is rendered whole, once, and kept as ids; completions are
never encoded again. Deterministic: what the template does is found by probing at load (`render_probe.py`), dates are fixed.

How assistant messages of the history are given to the template: calls as `tool_calls` where the probe shows that the template then writes
exactly what the action format writes, and the arguments are spelled as the template spells them; otherwise the format's own text is the
content and no `tool_calls` are passed. Either way the text of the history is the text that was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.actions.protocol import InexpressibleAction
from pivotrl.actions.registry import action_format
from pivotrl.actions.thinking import CLOSE
from pivotrl.artifacts import GenerationConfig, read_artifact
from pivotrl.config.schema import RenderConfig
from pivotrl.errors import UserError
from pivotrl.identity import bytes_id
from pivotrl.rollouts.render_demonstration import DemonstrationBuilder, Demonstrations
from pivotrl.rollouts.render_probe import TurnMarks, calls_are_native, is_prefix_stable, probe_turn
from pivotrl.rollouts.render_template import ChatTemplate, UnencodableText, action_of
from pivotrl.types import Action, Message, Origin, Role, State, Tool, ToolOrigin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders states, actions and demonstrations for one checkpoint's tokenizer, one chat template and one action format."""

    template: ChatTemplate
    turn: TurnMarks
    stop_token_ids: tuple[int, ...]
    """Tokens that end an action, the template's end-of-turn token first; generation must stop at any of them."""
    pad_token_id: int
    template_hash: str
    tokenizer_hash: str
    prefix_stable: bool
    """Whether prompt + completion of a turn are the first tokens of the next turn's prompt, as probed at load."""

    @staticmethod
    def load(checkpoint_dir: Path, config: RenderConfig, chat_template: str | None) -> Renderer:
        """Reads the tokenizer of a checkpoint directory; nothing is downloaded.

        Args:
            chat_template: Jinja source that replaces the tokenizer's own template.

        Raises:
            UserError: for a directory without a fast tokenizer, and for a missing or unusable chat template.
        """
        tokenizer = _load_tokenizer(checkpoint_dir)
        source = chat_template if chat_template is not None else tokenizer.chat_template
        if not isinstance(source, str):
            raise UserError(
                f"{checkpoint_dir} has no chat template",
                rule="prompts are rendered by a Jinja chat template",
                fix="give one as render.chat_template",
            )
        return Renderer.build(tokenizer, config, source, end_token_ids=_generation_end_tokens(checkpoint_dir))

    @staticmethod
    def build(tokenizer: PreTrainedTokenizerFast, config: RenderConfig, source: str, *, end_token_ids: Sequence[int] = ()) -> Renderer:
        """A renderer for a tokenizer in memory; see `load`.

        Args:
            end_token_ids: further tokens that end an action, as the checkpoint's generation config says.
        """
        template = ChatTemplate(tokenizer, source, action_format(config.action_format), config.history_reasoning, calls_are_native=False)
        turn = probe_turn(template)
        template = dataclasses.replace(template, calls_are_native=calls_are_native(template))
        pad = tokenizer.pad_token_id
        renderer = Renderer(
            template=template,
            turn=turn,
            stop_token_ids=_stop_tokens(tokenizer, [turn.end_token_id, *end_token_ids]),
            pad_token_id=pad if isinstance(pad, int) else turn.end_token_id,
            template_hash=bytes_id(source.encode()),
            tokenizer_hash=bytes_id(tokenizer.backend_tokenizer.to_str().encode()),
            prefix_stable=False,
        )
        stable = is_prefix_stable(template, renderer.render_prompt, renderer.render_action)
        return dataclasses.replace(renderer, prefix_stable=stable)

    def render_prompt(self, state: State) -> tuple[int, ...]:
        """Token ids of a state with the generation prompt.

        Raises:
            UnrenderableState: where the template refuses the conversation.
        """
        return self.template.encode(self.template.text(state.messages, state.tools, add_generation_prompt=True))

    def render_action(self, action: Action, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Token ids of the completion that is this action, end-of-turn token included.

        Args:
            tools: the state's tools; `qwen3_coder` types arguments by them. Give `parse` the same.

        Raises:
            InexpressibleAction: where the action format cannot write it, or its text holds a stop token.
        """
        try:
            ids = self.template.encode(self._completion_text(action, tools))
        except UnencodableText as error:
            raise InexpressibleAction(str(error)) from error
        if any(token in ids for token in self.stop_token_ids):
            raise InexpressibleAction("text holds a stop token")
        return (*ids, self.turn.end_token_id)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Action:
        """The action that generated tokens hold; never raises. One trailing stop token is taken off, other special tokens stay text."""
        return self.template.action_format.parse(self.completion_text(token_ids), tools)

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """The whole assistant text of generated tokens: thinking that the generation prompt opens in front, one trailing stop token taken off."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.turn.opened_thinking + self.decode(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens as it is, special tokens included: for parsing and for people."""
        text = self.template.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def render_demonstration(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        tool_origin: ToolOrigin,  # noqa: ARG002 - part of a state; a template shows inferred tools like any others
        *,
        max_tokens: int,
    ) -> Demonstrations:
        """A conversation as sequences to imitate; see `DemonstrationBuilder` for windows and dropped turns.

        Raises:
            UnrenderableState: where the template refuses the conversation.
        """
        completions: dict[int, tuple[int, ...]] = {}
        num_inexpressible = 0
        for index, message in enumerate(messages):
            if message.role is Role.ASSISTANT and message.origin is Origin.MODEL:
                try:
                    completions[index] = self.render_action(action_of(message), tools)
                except InexpressibleAction:
                    num_inexpressible += 1
        prompt_texts = {index: self.template.text(messages[:index], tools, add_generation_prompt=True) for index in completions}
        builder = DemonstrationBuilder(self.template, self.turn, max_tokens=max_tokens)
        demonstrations = builder.build(prompt_texts, completions, one_sequence=self.prefix_stable)
        return dataclasses.replace(demonstrations, num_dropped_turns=demonstrations.num_dropped_turns + num_inexpressible)

    def _completion_text(self, action: Action, tools: Sequence[Tool]) -> str:
        text = self.template.action_format.render(action, tools)
        opened = self.turn.opened_thinking
        if not opened:
            return text
        if not action.reasoning:
            text = f"{opened}\n{CLOSE}\n\n{text}"
        if not text.startswith(opened):
            raise InexpressibleAction("thinking does not begin as the generation prompt does")
        return text[len(opened) :]


def _load_tokenizer(checkpoint_dir: Path) -> PreTrainedTokenizerFast:
    # Imported here: it takes seconds, and most commands render nothing.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{checkpoint_dir} holds no tokenizer that transformers can read ({str(error).splitlines()[0]})",
            rule="a checkpoint directory holds tokenizer.json and tokenizer_config.json",
            fix="save the tokenizer beside the weights",
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"the tokenizer in {checkpoint_dir} is a {type(tokenizer).__name__}",
            rule="spans need a fast tokenizer (tokenizer.json)",
            fix="convert it with transformers' convert_slow_tokenizer",
        )
    return tokenizer


def _generation_end_tokens(checkpoint_dir: Path) -> tuple[int, ...]:
    """`eos_token_id` of the checkpoint's generation_config.json: one id, a list, or nothing."""
    path = checkpoint_dir / "generation_config.json"
    declared = read_artifact(path, GenerationConfig).get("eos_token_id") if path.exists() else None
    return (declared,) if isinstance(declared, int) else tuple(declared or ())


def _stop_tokens(tokenizer: PreTrainedTokenizerFast, end_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The given end tokens in their order, then the tokenizer's own."""
    eos = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*end_token_ids, *([eos] if isinstance(eos, int) else [])]))
