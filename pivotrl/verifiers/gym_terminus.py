"""The verdicts of NeMo-Gym's `terminus_judge` up to its judge, written from its observed behaviour (nemo-gym 0.4.0 and 0.7.0).

For comparing and migrating, not for training: keystrokes are concatenated without a separator, completing too early costs nothing, prose or a fence
around the JSON is fatal, and so is ``</think>`` inside a command. docs/gym.md lists the holes and what closes each; `terminal` is the verifier
without them. Expected verdicts of both versions on invented rows are in tests/gym_cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pivotrl.actions.terminus2 import PLACEHOLDER
from pivotrl.config.gym_verifiers import GymTerminusVerifierConfig
from pivotrl.types import Action, State, Verdict
from pivotrl.verifiers.gym_similarity import TooCostly, similarity

NEEDS_JUDGE = "needs a judge"
"""Reason of the abstention where the public grader would ask its judge."""

_END_OF_THINKING = "</think>"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


type _Members = Mapping[str, Callable[[Any], bool]]

_COMMAND: dict[str, tuple[_Members, _Members]] = {
    "terminus_1": ({"keystrokes": _is_text, "is_blocking": _is_flag, "timeout_sec": _is_number}, {}),
    "terminus_2": ({"keystrokes": _is_text}, {"duration": _is_number}),
}
"""Per harness, the required and the optional members of a command; others are not allowed."""

_REPLY: dict[str, tuple[_Members, _Members]] = {
    "terminus_1": ({"state_analysis": _is_text, "explanation": _is_text, "is_task_complete": _is_flag}, {}),
    "terminus_2": ({"analysis": _is_text, "plan": _is_text}, {"task_complete": _is_flag}),
}
"""Per harness, the members of a reply beside `commands`."""


class GymTerminusVerifier:
    """Reasons: ``not a JSON object``, ``other schema``, ``too long to compare`` (invalid); ``similar keystrokes``, ``schema and flag agree``
    (reward 1); ``task not completed``, ``dissimilar keystrokes``, ``expert reply is unreadable`` (reward 0); ``needs a judge`` (abstains).
    The detail holds the ``similarity`` where it was computed.
    """

    def __init__(self, config: GymTerminusVerifierConfig) -> None:
        self._config = config

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:  # noqa: ARG002 - the protocol's argument
        config = self._config
        expected = _object(written(expert))
        if expected is None:
            return Verdict.ok(0.0, "expert reply is unreadable")
        found = _object(written(action).rsplit(_END_OF_THINKING, 1)[-1].strip())
        if found is None:
            return Verdict.invalid("not a JSON object")
        harness = _harness(expected) if config.harness == "auto" else config.harness
        if not _fits(expected, harness):
            return Verdict.ok(0.0, "expert reply is unreadable")
        if not _fits(found, harness):
            return Verdict.invalid("other schema")
        if _is_complete(expected) and not _is_complete(found):
            return Verdict.ok(0.0, "task not completed")
        return self._verify_keystrokes(_keystrokes(expected), _keystrokes(found))

    def _verify_keystrokes(self, expected: Sequence[str], found: Sequence[str]) -> Verdict:
        config, detail = self._config, dict[str, Any]()
        if config.enable_string_similarity:
            try:
                # A command without keystrokes is still one command more than none.
                score = similarity("".join(expected), "".join(found)) if expected and found else float(expected == found)
            except TooCostly:
                return Verdict.invalid("too long to compare")
            detail["similarity"] = score
            if score >= config.string_similarity_threshold:
                return Verdict.ok(1.0, "similar keystrokes", **detail)
        if config.enable_llm_judge:
            return Verdict.abstain(NEEDS_JUDGE, **detail)
        return Verdict.ok(0.0, "dissimilar keystrokes", **detail) if config.enable_string_similarity else Verdict.ok(1.0, "schema and flag agree")


def written(action: Action) -> str:
    """The reply as it was written, without its thinking: `actions/terminus2.py` took its JSON out of the content and made it a call."""
    if len(action.tool_calls) != 1 or not action.tool_calls[0].name.startswith("terminus"):
        return action.content
    arguments = action.tool_calls[0].arguments
    return action.content.replace(PLACEHOLDER, arguments, 1) if PLACEHOLDER in action.content else action.content + arguments


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _harness(reply: Mapping[str, Any]) -> str:
    return "terminus_1" if "state_analysis" in reply else "terminus_2"


def _fits(reply: Mapping[str, Any], harness: str) -> bool:
    """Whether the reply has the members of its harness, of the right types, and no others."""
    commands = reply.get("commands")
    if not isinstance(commands, list) or not all(isinstance(command, dict) and _has_members(command, *_COMMAND[harness]) for command in commands):
        return False
    return _has_members({key: value for key, value in reply.items() if key != "commands"}, *_REPLY[harness])


def _has_members(value: Mapping[str, Any], required: _Members, optional: _Members) -> bool:
    if not required.keys() <= value.keys() <= required.keys() | optional.keys():
        return False
    return all((required.get(key) or optional[key])(member) for key, member in value.items())


def _is_complete(reply: Mapping[str, Any]) -> bool:
    return bool(reply.get("task_complete") or reply.get("is_task_complete"))


def _keystrokes(reply: Mapping[str, Any]) -> list[str]:
    return [command["keystrokes"] for command in reply["commands"]]
