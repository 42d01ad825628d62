"""What is fuzzed: one input is bytes that name a target (a parser or a verifier) and hold its text; `check` runs it and its properties.

Properties: nothing raises; a verdict is one of the kinds, its reward within [0, 1], its reason short; the same input gives the same verdict;
an action that a verifier judges at all is accepted as its own expert (not by the compatibility modes); what a format reads it can write and
read back equal; and no call takes longer than `MAX_SECONDS` of processor time. Used by the fuzzer (run.py) and by the tests in CI.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fakes.processor_time import processor_seconds

from pivotrl.actions.protocol import InexpressibleAction, same_action
from pivotrl.actions.registry import ACTION_FORMAT_NAMES, action_format
from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_verifier
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Verifier

LABELLED = Path(__file__).parents[1] / "labelled"
# Bound of one parse or verdict on an input of at most `MAX_BYTES`, in processor time; verdicts of judges and sandboxes have deadlines of their own.
MAX_SECONDS = 1.0
MAX_BYTES = 16_384
_MAX_REASON_CHARS = 60
_SEPARATOR = "\x00"

VERIFIERS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "tool_call": ("message=similarity",),
    "message": ("content=similarity",),
    "search": (),
    "swe": ("granularity=arguments",),
    "terminal": (),
    "gym_single_step": ("word_count_similarity_threshold=0.1",),
    "gym_swe_pivot": (),
    "gym_terminus": ("enable_llm_judge=false",),
    "flipped": ("probability=0.5", "seed=1", "verifier={type: tool_call, message: similarity}"),
}
"""Every verifier that needs neither an endpoint nor a process, with the settings it must be given."""


# The public graders reject some actions even as their own expert; the compatibility modes do too. A flipped verdict is wrong on purpose.
_NOT_REFLEXIVE = ("gym_single_step", "gym_swe_pivot", "gym_terminus", "flipped")


class Finding(AssertionError):
    """A property that does not hold."""


@cache
def states() -> dict[str, State]:
    """The states of the labelled pairs, and one whose schema says the odd things that schemas in the wild say."""
    known = {
        name: State((), tuple(Tool(**tool) for tool in state["tools"]), ToolOrigin(state["tool_origin"]))
        for name, state in json.loads((LABELLED / "states.json").read_text()).items()
    }
    return {**known, "odd": State((), (Tool("odd", "", _ODD_SCHEMA),), ToolOrigin.ROW)}


_ODD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "self": {"$ref": "#"},
        "nowhere": {"$ref": "#/$defs/none"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string", "format": "date"}, {"type": "null"}]},
        "set": {"type": "array", "uniqueItems": True, "items": {"anyOf": [{}, True]}},
        "all": {"allOf": [{"type": "object"}, {"properties": {"x": {"default": [1, {"y": None}]}}}]},
        "pattern": {"type": "string", "pattern": "(a+)+$", "format": "regex"},
        "flag": True,
        "query": {"type": "string", "description": "SQL"},
        "path": {"type": ["string", "null"], "default": ""},
        "list": {"type": "array", "items": [{"type": "string"}]},
    },
    "required": None,
    "additionalProperties": {"$ref": "#/properties/self"},
}


@cache
def targets() -> dict[str, Callable[[str], None]]:
    """Target by name, parsers first; the first byte of an input chooses one."""
    parsers = {f"parse {name}": _parser_target(name) for name in ACTION_FORMAT_NAMES}
    return {**parsers, **{f"verify {name}": _verifier_target(name) for name in VERIFIERS}}


def check(data: bytes) -> str:
    """Runs one input and returns its target's name.

    Raises:
        Finding: where a property does not hold.
        Exception: whatever the target raised.
    """
    names = list(targets())
    name = names[data[0] % len(names)] if data else names[0]
    targets()[name](data[1:MAX_BYTES].decode("utf-8", "surrogateescape"))
    return name


def encode_case(verifier: str, state: str, expert: Any, action: Any) -> bytes:
    """The input that makes `check` judge one pair, given in the labelled file's form."""
    text = _SEPARATOR.join((state, json.dumps(expert), json.dumps(action)))
    return bytes([list(targets()).index(f"verify {verifier}")]) + text.encode()


def encode_text(format_name: str, text: str) -> bytes:
    """The input that makes `check` parse one completion."""
    return bytes([list(targets()).index(f"parse {format_name}")]) + text.encode("utf-8", "surrogateescape")


def _parser_target(name: str) -> Callable[[str], None]:
    chosen = action_format(name)

    def run(text: str) -> None:
        tools = states()["data"].tools
        action = _timed(f"parse {name}", lambda: chosen.parse(text, tools))
        if chosen.parse(text, tools) != action:
            raise Finding("parsing twice gives two actions")
        if (action.parse is ParseOutcome.PARSED) > bool(action.tool_calls):
            raise Finding("parsed without a call")
        try:
            written = chosen.render(action, tools)
        except InexpressibleAction:
            return
        if not same_action(chosen.parse(written, tools), action):
            raise Finding("what was rendered reads back as another action")

    return run


def _verifier_target(name: str) -> Callable[[str], None]:
    verifier = build_verifier(load_verifier(name, VERIFIERS[name]), expand=Path)

    def run(text: str) -> None:
        state_name, expert_text, action_text = (*text.split(_SEPARATOR, 2), "", "")[:3]
        state = states().get(state_name, states()["odd"])
        expert, action = decode_action(expert_text, state), decode_action(action_text, state)
        verdict = _judged(verifier, state, expert, action)
        if verdict != verifier.verify(state, expert, action):
            raise Finding("judging twice gives two verdicts")
        own = _judged(verifier, state, action, action)
        if name in _NOT_REFLEXIVE:
            return
        if own.kind is VerdictKind.OK and own.reward < 1 and own.reason not in ("expert call is malformed", "undecided"):
            raise Finding(f"not accepted as its own expert: {own.reason}")
        if own.kind is VerdictKind.INVALID and verdict.kind is VerdictKind.OK and verdict.reward >= 1:
            raise Finding(f"accepted, though invalid as its own expert: {own.reason}")

    return run


def _judged(verifier: Verifier, state: State, expert: Action, action: Action) -> Verdict:
    verdict = _timed("verify", lambda: verifier.verify(state, expert, action))
    if verdict.kind not in (VerdictKind.OK, VerdictKind.INVALID):
        raise Finding(f"verdict {verdict.kind} ({verdict.reason}) without an endpoint or a sandbox")
    if not 0 <= verdict.reward <= 1 or (verdict.kind is VerdictKind.INVALID and verdict.reward):
        raise Finding(f"reward {verdict.reward} of a verdict {verdict.kind}")
    if not 0 < len(verdict.reason) <= _MAX_REASON_CHARS:
        raise Finding(f"reason {verdict.reason[:200]!r}")
    return verdict


def _timed[T](what: str, run: Callable[[], T]) -> T:
    elapsed_s, result = processor_seconds(run)
    if elapsed_s > MAX_SECONDS:
        raise Finding(f"{what} took {elapsed_s:.1f} s")
    return result


def decode_action(text: str, state: State) -> Action:
    """The action of an input: the labelled file's form where the text is JSON of it, else a raw completion in Hermes' format."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return action_format("hermes").parse(text, state.tools)
    if isinstance(value, str):
        return Action(value, (), None, ParseOutcome.ABSENT)
    calls = tuple(call for item in value if (call := _call(item)) is not None) if isinstance(value, list) else ()
    return Action("", calls, None, ParseOutcome.PARSED) if calls else action_format("hermes").parse(text, state.tools)


def _call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or "arguments" not in item:
        return None
    arguments = item["arguments"]
    return ToolCall(item["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
