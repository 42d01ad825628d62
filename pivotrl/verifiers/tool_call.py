"""Eq. 6 for conversational tool use: speak or call as the expert did, the same tools, arguments that mean the same.

Stricter than the public graders where those can be exploited (surplus calls, empty arguments, any message passes) and more lenient where they
reject equal meaning (1 and 1.0, defaults, order of sets); `canonical.py` says what equal means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from pivotrl.config.schema import ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, Verdict
from pivotrl.verifiers.argument_schema import ValueRule, rule_of
from pivotrl.verifiers.canonical import TooDeep, arguments_tree, difference, similar_text

_CACHED_EXPERT_CALLS = 8192
# Beyond this many parallel calls they are compared in order: matching is cubic, and no expert makes so many.
_MAX_MATCHED_CALLS = 64

type Tree = dict[str, Any]
type NamedTree = tuple[str, Tree]
type Difference = tuple[str, str]


class ToolCallVerifier:
    """Binary reward for one turn of conversational tool use.

    Reasons: ``malformed``, ``no action`` and ``arguments nested too deeply`` (invalid); ``same message``, ``same calls`` (reward 1); ``called
    instead of speaking``, ``spoke instead of calling``, ``different message``, ``missing call``, ``surplus call``, ``wrong tool``, ``missing
    argument``, ``unexpected argument``, ``wrong argument value``, ``calls in another order``, ``expert call is malformed`` (reward 0).
    """

    def __init__(self, config: ToolCallVerifierConfig) -> None:
        self._config = config

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        if action.parse is ParseOutcome.MALFORMED:
            return Verdict.invalid("malformed")
        if not action.tool_calls and not action.content.strip():
            return Verdict.invalid("no action")
        if not expert.tool_calls:
            return self._verify_message(expert, action)
        if not action.tool_calls:
            return Verdict.ok(0.0, "spoke instead of calling")
        return self._verify_calls(state, expert.tool_calls, action.tool_calls)

    def _verify_message(self, expert: Action, action: Action) -> Verdict:
        if action.tool_calls:
            return Verdict.ok(0.0, "called instead of speaking")
        match self._config.message:
            case "any":
                is_same = True
            case "exact":
                is_same = expert.content.strip() == action.content.strip()
            case "similarity":
                is_same = similar_text(expert.content, action.content, threshold=self._config.message_similarity)
        return Verdict.ok(1.0, "same message") if is_same else Verdict.ok(0.0, "different message")

    def _verify_calls(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        if len(action) != len(expert):
            reason = "surplus call" if len(action) > len(expert) else "missing call"
            return Verdict.ok(0.0, reason, expert_calls=len(expert), action_calls=len(action))
        if not _same_names(expert, action):
            return Verdict.ok(0.0, "wrong tool", expert_tools=[call.name for call in expert], action_tools=[call.name for call in action])
        rules = {call.name: _rule(state, call.name) for call in expert}
        try:
            expert_trees = [_expert_tree(call.arguments, call.name, _Identity(rules[call.name])) for call in expert]
            action_trees = [arguments_tree(call, rules[call.name]) for call in action]
        except TooDeep:
            return Verdict.invalid("arguments nested too deeply")
        if None in action_trees:
            return Verdict.invalid("malformed")
        if None in expert_trees:
            return Verdict.ok(0.0, "expert call is malformed")
        return self._compare(_named(expert, expert_trees), _named(action, action_trees))

    def _compare(self, expert: Sequence[NamedTree], action: Sequence[NamedTree]) -> Verdict:
        in_order = [self._difference(ours, theirs) for ours, theirs in zip(expert, action, strict=True)]
        if not any(in_order):
            return Verdict.ok(1.0, "same calls")
        if 1 < len(expert) <= _MAX_MATCHED_CALLS and _matches(len(expert), lambda i, j: self._difference(expert[i], action[j]) is None):
            return Verdict.ok(0.0, "calls in another order") if self._config.ordered_calls else Verdict.ok(1.0, "same calls")
        (name, _), (reason, argument) = next((call, found) for call, found in zip(expert, in_order, strict=True) if found)
        return Verdict.ok(0.0, reason, tool=name, argument=argument)

    def _difference(self, expert: NamedTree, action: NamedTree) -> Difference | None:
        if expert[0] != action[0]:
            return "wrong tool", ""
        return difference(expert[1], action[1], text_similarity=self._config.text_similarity)


def _named(calls: Sequence[ToolCall], trees: Sequence[Tree | None]) -> list[NamedTree]:
    return [(call.name, tree) for call, tree in zip(calls, trees, strict=True) if tree is not None]


def _same_names(expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> bool:
    if len(expert) == 1:
        return expert[0].name == action[0].name
    return Counter(call.name for call in expert) == Counter(call.name for call in action)


class _Identity:
    """A rule as a cache key by identity; rules are compiled once per tool."""

    __slots__ = ("rule",)

    def __init__(self, rule: ValueRule) -> None:
        self.rule = rule

    def __hash__(self) -> int:
        return id(self.rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.rule is self.rule


@lru_cache(maxsize=_CACHED_EXPERT_CALLS)
def _expert_tree(arguments: str, name: str, key: _Identity) -> Tree | None:
    """The expert's tree: the same for all samples of a state. Not to be changed by callers."""
    return arguments_tree(ToolCall(name, arguments), key.rule)


def _rule(state: State, name: str) -> ValueRule:
    tool = next((tool for tool in state.tools if tool.name == name), None)
    return rule_of(tool, state.tool_origin)


def _matches(size: int, is_same: Callable[[int, int], bool]) -> bool:
    """Whether a perfect matching exists (augmenting paths)."""
    matched_to: dict[int, int] = {}

    def augment(i: int, tried: set[int]) -> bool:
        for j in range(size):
            if j not in tried and is_same(i, j):
                tried.add(j)
                if j not in matched_to or augment(matched_to[j], tried):
                    matched_to[j] = i
                    return True
        return False

    return all(augment(i, set()) for i in range(size))
