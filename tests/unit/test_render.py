"""Rendering: what the prompt shows, what a completion is, and which tokens carry loss, exactly, by token id."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from fakes import tiny_tokenizer as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.actions.protocol import InexpressibleAction, same_action
from pivotrl.config.schema import RenderConfig
from pivotrl.errors import UserError
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.render_template import UnrenderableState, action_of
from pivotrl.types import Action, Message, Origin, ParseOutcome, Role, State, Tool, ToolCall, ToolOrigin

TOKENIZER = tiny.tiny_tokenizer()
TOOL = Tool("look_up", "Looks up.", {"type": "object", "properties": {"key": {"type": "string"}}})
NO_LIMIT = 10**9


def _renderer(source: str, *, action_format: str = "hermes", history_reasoning: str = "template") -> Renderer:
    config = RenderConfig.model_validate(
        {"action_format": action_format, "history_reasoning": history_reasoning, "max_prompt_tokens": 1000},
    )
    return Renderer.build(TOKENIZER, config, source)


CHATML = _renderer(tiny.CHATML)
NATIVE = _renderer(tiny.NATIVE_CALLS)
KEEP = _renderer(tiny.CHATML, history_reasoning="keep")
DROPS = _renderer(tiny.DROPS_OLD_THINKING)


def _user(text: str) -> Message:
    return Message(Role.USER, text)


def _says(text: str, *, reasoning: str | None = None, origin: Origin = Origin.MODEL) -> Message:
    return Message(Role.ASSISTANT, text, reasoning=reasoning, origin=origin)


def _calls(arguments: str, text: str = "", *, reasoning: str | None = None) -> Message:
    call = ToolCall("look_up", arguments)
    return Message(Role.ASSISTANT, text, (call,), reasoning, origin=Origin.MODEL, parse=ParseOutcome.PARSED)


def _state(*messages: Message) -> State:
    return State(messages, (TOOL,), ToolOrigin.ROW)


def _text(token_ids: tuple[int, ...]) -> str:
    text = TOKENIZER.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


# Text an agent might write; the special tokens are inexpressible and tested apart.
_WORDS = st.text(st.sampled_from('ab \n{}"<>\\é漢\u2028'), max_size=12)
_ARGUMENTS = st.dictionaries(st.text("abc", max_size=3), _WORDS | st.integers(-9, 9) | st.none(), max_size=3).map(json.dumps)
# Thinking is rare, so that conversations without any, which one sequence can hold, are common.
_THINKING = st.sampled_from([None, None, None, "hm", "a\n"])
_MODEL_TURNS = st.builds(_says, _WORDS.filter(str.strip), reasoning=_THINKING) | st.builds(_calls, _ARGUMENTS, _WORDS, reasoning=_THINKING)
_OTHERS = (
    st.builds(_user, _WORDS) | st.builds(lambda text: Message(Role.TOOL, text), _WORDS) | st.builds(_says, _WORDS, origin=st.just(Origin.HARNESS))
)
_CONVERSATIONS = st.lists(st.tuples(_OTHERS, _MODEL_TURNS), min_size=1, max_size=5).map(lambda pairs: [m for pair in pairs for m in pair])


@settings(max_examples=100)
@given(message=_MODEL_TURNS, reasoning=st.none() | _WORDS)
@pytest.mark.parametrize("renderer", [CHATML, NATIVE, KEEP, DROPS, _renderer(tiny.OPENS_THINKING)])
def test_a_rendered_action_parses_to_itself(renderer: Renderer, message: Message, reasoning: str | None) -> None:
    action = dataclasses.replace(action_of(message), reasoning=reasoning)
    try:
        ids = renderer.render_action(action)
    except InexpressibleAction:
        return
    assert same_action(renderer.parse(ids), action)
    assert ids[-1] == TOKENIZER.eos_token_id
    assert not set(ids[:-1]) & set(renderer.stop_token_ids)


@settings(max_examples=60)
@given(messages=_CONVERSATIONS)
@pytest.mark.parametrize("renderer", [CHATML, NATIVE, KEEP])
def test_turn_by_turn_equals_the_whole_and_the_mask_is_exact(renderer: Renderer, messages: list[Message]) -> None:
    """Rebuilt independently of the builder: every loss run must be one turn's completion, and stand behind that turn's own prompt."""
    made = renderer.render_demonstration(messages, (TOOL,), ToolOrigin.ROW, max_tokens=NO_LIMIT)
    expected: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    num_inexpressible = 0
    for index, message in enumerate(messages):
        if message.origin is Origin.MODEL:
            try:
                expected.append((renderer.render_prompt(_state(*messages[:index])), renderer.render_action(action_of(message))))
            except InexpressibleAction:
                num_inexpressible += 1
    assert made.num_dropped_turns == num_inexpressible
    found = [(one.token_ids[:start], one.token_ids[start:end]) for one in made.sequences for start, end in _loss_runs(one.loss_mask)]
    assert found == expected


def _loss_runs(mask: tuple[int, ...]) -> list[tuple[int, int]]:
    """Half-open runs of ones."""
    edges = [i for i, (a, b) in enumerate(zip((0, *mask), (*mask, 0), strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_stable_templates_give_one_sequence_that_is_the_last_prompt_and_its_completion() -> None:
    messages = [_user("Hi"), _says("Hello"), _user("Alpha?"), _calls('{"key": "alpha"}'), Message(Role.TOOL, "1"), _says("It is 1.")]
    made = CHATML.render_demonstration(messages, (TOOL,), ToolOrigin.ROW, max_tokens=NO_LIMIT)
    (one,) = made.sequences
    assert CHATML.prefix_stable
    assert one.token_ids == CHATML.render_prompt(_state(*messages[:-1])) + CHATML.render_action(action_of(messages[-1]))
    trained = [_text(one.token_ids[start:end]) for start, end in _loss_runs(one.loss_mask)]
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "alpha"}}\n</tool_call><|im_end|>'
    assert trained == ["Hello<|im_end|>", call, "It is 1.<|im_end|>"]


def test_harness_turns_are_context_without_loss() -> None:
    messages = [_says("Hi! How can I help?", origin=Origin.HARNESS), _user("Alpha?"), _says("1")]
    (one,) = CHATML.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=NO_LIMIT).sequences
    assert "How can I help?" in _text(one.token_ids)
    assert [_text(one.token_ids[start:end]) for start, end in _loss_runs(one.loss_mask)] == ["1<|im_end|>"]


def test_a_template_that_drops_old_thinking_is_unstable_and_renders_each_state_whole() -> None:
    assert not DROPS.prefix_stable
    messages = [_user("Hi"), _says("Hello", reasoning="old"), _user("Bye"), _says("Ciao", reasoning="new")]
    prompt = _text(DROPS.render_prompt(_state(*messages[:3])))
    assert "old" not in prompt
    made = DROPS.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=NO_LIMIT)
    texts = [_text(one.token_ids) for one in made.sequences]
    assert [text.count("assistant") for text in texts] == [1, 2]
    assert [_text(one.token_ids[start:]) for one in made.sequences for start, _ in _loss_runs(one.loss_mask)] == [
        "<think>\nold\n</think>\n\nHello<|im_end|>",
        "<think>\nnew\n</think>\n\nCiao<|im_end|>",
    ]


@pytest.mark.parametrize(("mode", "shown"), [("template", False), ("drop", False), ("keep", True)])
def test_history_reasoning_decides_what_earlier_turns_show(mode: str, shown: bool) -> None:
    """`keep` holds even under a template that cuts thinking out of contents."""
    renderer = _renderer(tiny.DROPS_OLD_THINKING, history_reasoning=mode)
    prompt = _text(renderer.render_prompt(_state(_user("Hi"), _says("Hello", reasoning="because"), _user("Bye"))))
    assert ("<think>\nbecause\n</think>\n\nHello" in prompt) == shown
    assert renderer.prefix_stable == shown


def test_the_template_is_given_reasoning_where_it_shows_it() -> None:
    prompt = _text(DROPS.render_prompt(_state(_user("Hi"), _calls("{}", reasoning="because"), Message(Role.TOOL, "1"))))
    assert "<think>\nbecause\n</think>\n\n<tool_call>" in prompt


def test_calls_are_native_only_where_the_template_writes_what_the_format_writes() -> None:
    assert NATIVE.template.calls_are_native
    assert not CHATML.template.calls_are_native
    assert not _renderer(tiny.NATIVE_CALLS, action_format="qwen3_coder").template.calls_are_native


@pytest.mark.parametrize("renderer", [CHATML, NATIVE])
@pytest.mark.parametrize("arguments", ['{"key": "alpha"}', '{"key":"alpha"}', '{"key": 1.0, "b": "\\u00e9"}', '{"key": '])
def test_the_history_shows_arguments_as_they_were_written(renderer: Renderer, arguments: str) -> None:
    """Spelling counts: a template's own JSON writer would normalise it, and broken arguments must not become {}."""
    message = dataclasses.replace(_calls(arguments, " I look. "), parse=ParseOutcome.MALFORMED if arguments.endswith(" ") else ParseOutcome.PARSED)
    prompt = _text(renderer.render_prompt(_state(_user("Hi"), message, Message(Role.TOOL, "1"))))
    assert f'assistant\n I look. \n<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call><|im_end|>' in prompt


@pytest.mark.parametrize("action_format", ["qwen3_coder", "terminus2", "plain"])
def test_other_formats_write_the_history_in_their_own_text(action_format: str) -> None:
    renderer = _renderer(tiny.CHATML, action_format=action_format)
    assert renderer.prefix_stable
    message = {
        "qwen3_coder": _calls('{"key": "alpha"}'),
        "terminus2": dataclasses.replace(_calls(""), tool_calls=(ToolCall("terminus2", '{"analysis":"","plan":"","commands":[]}'),)),
        "plain": _says("alpha"),
    }[action_format]
    completion = _text(renderer.render_action(action_of(message), (TOOL,)))
    assert f"assistant\n{completion}" in _text(renderer.render_prompt(_state(_user("Hi"), message, _user("Go on"))))


def test_a_generation_prompt_that_opens_thinking_belongs_to_the_action() -> None:
    renderer = _renderer(tiny.OPENS_THINKING)
    assert renderer.turn.opened_thinking == "<think>\n"
    thinks = Action("Hello", (), "Be kind.", ParseOutcome.ABSENT)
    assert _text(renderer.render_action(thinks)) == "Be kind.\n</think>\n\nHello<|im_end|>"
    assert renderer.parse(renderer.render_action(thinks)) == thinks
    silent = dataclasses.replace(thinks, reasoning=None)
    assert renderer.parse(renderer.render_action(silent)) == silent
    assert renderer.parse(TOKENIZER("never closed")["input_ids"]).parse is ParseOutcome.MALFORMED


def test_parse_takes_one_stop_token_off_and_keeps_the_rest() -> None:
    eos = TOKENIZER.eos_token_id
    ids = TOKENIZER("Hi", add_special_tokens=False)["input_ids"]
    assert CHATML.parse([*ids, eos]).content == "Hi"
    assert CHATML.parse([*ids, eos, eos]).content == "Hi<|im_end|>"
    assert CHATML.parse(ids).content == "Hi"
    assert CHATML.parse([]).content == ""


def test_a_stop_token_inside_an_action_is_inexpressible() -> None:
    with pytest.raises(InexpressibleAction, match="stop token"):
        CHATML.render_action(Action("a <|im_end|> b", (), None, ParseOutcome.ABSENT))


def test_lone_surrogates_are_refused_by_name() -> None:
    with pytest.raises(InexpressibleAction, match="lone surrogate"):
        CHATML.render_action(Action("a\ud800", (), None, ParseOutcome.ABSENT))
    with pytest.raises(UnrenderableState, match="lone surrogate"):
        CHATML.render_prompt(_state(_user("a\ud800")))


def _long_conversation() -> list[Message]:
    return [Message(Role.SYSTEM, "sys"), *(message for i in range(6) for message in (_user(f"question {i} " * 3), _says(f"answer {i}")))]


def test_long_conversations_become_windows_that_keep_the_head() -> None:
    messages = _long_conversation()
    whole = CHATML.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=NO_LIMIT).sequences[0]
    limit = len(whole.token_ids) // 2
    made = CHATML.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=limit)
    assert len(made.sequences) > 1
    assert made.num_dropped_turns == 0
    trained = [_text(one.token_ids[start:end]) for one in made.sequences for start, end in _loss_runs(one.loss_mask)]
    assert trained == [f"answer {i}<|im_end|>" for i in range(6)]
    head = "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\n" + messages[1].content + "<|im_end|>\n"
    for one in made.sequences:
        text = _text(one.token_ids)
        assert len(one.token_ids) <= limit
        assert text.startswith(head)
        assert text.endswith("<|im_end|>")
        assert "<|im_end|>\n\n" not in text
        assert "<|im_end|><|im_start|>" not in text


def test_a_turn_that_cannot_fit_is_dropped_and_counted() -> None:
    messages = [_user("q"), _says("a"), _user("long " * 60), _says("b"), _user("q"), _says("c")]
    made = CHATML.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=60)
    trained = [_text(one.token_ids[start:end]) for one in made.sequences for start, end in _loss_runs(one.loss_mask)]
    assert trained == ["a<|im_end|>", "c<|im_end|>"]
    assert made.num_dropped_turns == 1
    assert CHATML.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=3).num_dropped_turns == 3
    assert DROPS.render_demonstration(messages, (), ToolOrigin.NONE, max_tokens=60).num_dropped_turns == 2


def test_load_reads_a_checkpoint_directory_and_hashes_contents(tmp_path: Path) -> None:
    directory = tiny.save_checkpoint(tmp_path, chat_template=tiny.CHATML)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    config = RenderConfig(action_format="hermes", history_reasoning="template", max_prompt_tokens=10)
    loaded = Renderer.load(directory, config, None)
    assert loaded.stop_token_ids == (2, 3)
    assert loaded.pad_token_id == 0
    assert (loaded.template_hash, loaded.tokenizer_hash) == (CHATML.template_hash, CHATML.tokenizer_hash)
    other = Renderer.load(directory, config, tiny.NATIVE_CALLS)
    assert (other.template_hash != loaded.template_hash, other.tokenizer_hash == loaded.tokenizer_hash) == (True, True)


def test_user_errors_name_the_template(tmp_path: Path) -> None:
    config = RenderConfig(action_format="hermes", history_reasoning="template", max_prompt_tokens=10)
    with pytest.raises(UserError, match="has no chat template"):
        Renderer.load(tiny.save_checkpoint(tmp_path / "bare", chat_template=None), config, None)
    with pytest.raises(UserError, match="holds no tokenizer"):
        Renderer.load(tmp_path / "nothing", config, None)
    with pytest.raises(UserError, match="it fails on a two-message conversation"):
        _renderer("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="end-of-turn token"):
        _renderer(tiny.CHATML.replace("<|im_end|>", ""))
    with pytest.raises(UserError, match="does not append an assistant header"):
        _renderer(tiny.CHATML.split("{%- if add_generation_prompt")[0])
    with pytest.raises(UserError, match="it fails on a conversation with a tool result"):
        _renderer("{% for message in messages if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}" + tiny.CHATML)


def test_dates_in_a_template_do_not_change_prompts_from_day_to_day() -> None:
    renderer = _renderer("{{ '<|im_start|>system\\n' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + tiny.CHATML)
    assert "26 Jul 2024" in _text(renderer.render_prompt(_state(_user("Hi"))))
