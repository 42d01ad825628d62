"""The verdicts of NeMo-Gym's `single_step_tool_use_with_argument_comparison`, written from its observed behaviour (nemo-gym 0.4.0 and 0.7.0).

For comparing and migrating, not for training: any message passes where the expert spoke, surplus calls are free, two strings of two words or more
pass on a small overlap, and 1 is not 1.0. docs/gym.md lists the holes and what closes each; `tool_call` is the verifier without them.
Expected verdicts of both versions on invented rows are in tests/gym_cases.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pivotrl.config.gym_verifiers import GymSingleStepVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, Verdict
from pivotrl.verifiers.matching import MAX_MATCHED, maximum_matching

_CACHED_EXPERT_CALLS = 8192
# Deeper arguments are no tool's; the recursive comparison must not meet Python's limit.
_MAX_DEPTH = 200


class _NotComparable(ValueError):
    """Arguments that cannot be compared; the message is the verdict's reason."""


class GymSingleStepVerifier:
    """Reasons: ``malformed``, ``no action``, ``too many calls`` (invalid); ``any message``, ``same call``, ``same calls``; ``called instead of
    speaking``, ``spoke instead of calling``, ``wrong number of calls``, ``wrong tool``, ``arguments are not JSON``, ``arguments nested too
    deeply``, ``wrong argument type``, ``other argument names``, ``other list length``, ``wrong argument value``, ``expert call is malformed``.
    """

    def __init__(self, config: GymSingleStepVerifierConfig) -> None:
        self._config = config

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:  # noqa: ARG002 - the protocol's argument
        if is_unreadable(action):
            return Verdict.invalid("malformed")
        if not expert.tool_calls:
            # Any text will do, none at all included.
            return Verdict.ok(0.0, "called instead of speaking") if action.tool_calls else Verdict.ok(1.0, "any message")
        if not action.tool_calls:
            return Verdict.ok(0.0, "spoke instead of calling") if action.content else Verdict.invalid("no action")
        if self._config.version == "0.4.0":
            reason = self._difference(expert.tool_calls[0], action.tool_calls[0])
            return Verdict.ok(0.0, reason) if reason else Verdict.ok(1.0, "same call")
        return self._verify_calls(expert.tool_calls, action.tool_calls)

    def _verify_calls(self, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        config = self._config
        if len(action) > MAX_MATCHED:
            return Verdict.invalid("too many calls", action_calls=len(action))
        if config.parallel_tool_call_rewarding and (
            (len(action) < len(expert) and not config.allow_subset) or (len(action) > len(expert) and not config.allow_superset)
        ):
            return Verdict.ok(0.0, "wrong number of calls", expert_calls=len(expert), action_calls=len(action))
        differences = [[self._difference(ours, theirs) for theirs in action] for ours in expert]
        matched = maximum_matching(len(expert), len(action), lambda i, j: differences[i][j] is None)
        reward = self._reward(len(matched), len(expert), len(action))
        if reward == 1:
            return Verdict.ok(1.0, "same calls" if len(expert) > 1 else "same call")
        # The first call of the expert's without a partner, and why the first call of the response is not it.
        unmatched = [i for i in range(len(expert)) if i not in matched]
        reason = differences[unmatched[0]][0] if unmatched else None
        return Verdict.ok(reward, reason or "wrong number of calls", matched=len(matched), expert_calls=len(expert), action_calls=len(action))

    def _reward(self, num_matched: int, num_expert: int, num_action: int) -> float:
        config = self._config
        if not config.parallel_tool_call_rewarding:
            return float(num_matched == num_expert)
        if config.parallel_tool_call_reward_mode == "f1":
            return 2 * num_matched / (num_expert + num_action)
        num_required = min(num_expert, num_action) if config.allow_subset else num_expert
        if config.parallel_tool_call_reward_mode == "fractional":
            return num_matched / num_required
        return float(num_matched == num_required)

    def _difference(self, expert: ToolCall, action: ToolCall) -> str | None:
        """Why two calls are not the same, or None where they are."""
        if action.name != expert.name:
            return "wrong tool"
        try:
            expected = _expert_arguments(expert.arguments)
        except _NotComparable:
            return "expert call is malformed"
        try:
            return self._value_difference(expected, _arguments(action.arguments), 0)
        except _NotComparable as error:
            return str(error)

    def _value_difference(self, expected: Any, found: Any, depth: int) -> str | None:
        if depth > _MAX_DEPTH:
            raise _NotComparable("arguments nested too deeply")
        # true is an instance of int, so it passes where 1 is expected, and not the other way round.
        if not isinstance(found, type(expected)):
            return "wrong argument type"
        if isinstance(expected, dict):
            if expected.keys() != found.keys():
                return "other argument names"
            return self._first_difference([(value, found[key]) for key, value in expected.items()], depth)
        if isinstance(expected, list):
            if len(expected) != len(found):
                return "other list length"
            return self._first_difference(list(zip(expected, found, strict=True)), depth)
        if isinstance(expected, float):
            is_same = abs(expected - found) < self._config.floating_point_comparison_threshold
        elif isinstance(expected, str):
            is_same = self._is_similar(expected, found)
        else:
            is_same = expected == found
        return None if is_same else "wrong argument value"

    def _first_difference(self, pairs: Sequence[tuple[Any, Any]], depth: int) -> str | None:
        return next((reason for expected, found in pairs if (reason := self._value_difference(expected, found, depth + 1))), None)

    def _is_similar(self, expected: str, found: str) -> bool:
        words, found_words = expected.lower().split(), found.lower().split()
        if len(words) < 2 or len(found_words) < 2:
            return expected == found
        num_common = (Counter(words) & Counter(found_words)).total()
        return num_common / (len(words) + len(found_words)) >= self._config.word_count_similarity_threshold


def is_unreadable(action: Action) -> bool:
    """Whether a malformed action holds nothing for a public grader to look at: it sees calls whose arguments are not JSON, but no half-read text."""
    return action.parse is ParseOutcome.MALFORMED and all(call.arguments_object() is not None for call in action.tool_calls)


def _arguments(text: str) -> Any:
    """The JSON value of a call's arguments, of any type; NaN, infinities and integers of any size are read, as Python's `json` does.

    Raises:
        _NotComparable: for text that is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _NotComparable("arguments nested too deeply") from error
    except ValueError as error:
        raise _NotComparable("arguments are not JSON") from error


@lru_cache(maxsize=_CACHED_EXPERT_CALLS)
def _expert_arguments(text: str) -> Any:
    """The expert's arguments, the same for all samples of a state; not to be changed by callers."""
    return _arguments(text)
