"""Whether an action's calls do what the expert's do: names, arguments, number and order. Shared by the verifiers that compare arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pivotrl.config.verifiers import CallComparison
from pivotrl.types import State, ToolCall, ToolOrigin, Verdict
from pivotrl.verifiers.argument_kinds import Kind, words_of_name
from pivotrl.verifiers.argument_schema import RecipeRules, RuleBook, ValueRule
from pivotrl.verifiers.canonical import MAX_PARSED_CHARS, Arguments, Prose, TooDeep, Tree, arguments_tree, difference, key_difference, read_object
from pivotrl.verifiers.matching import MAX_MATCHED, maximum_matching
from pivotrl.verifiers.text_similarity import DESTRUCTIVE_WORDS, similar_query, similar_text

_CACHED_EXPERT_CALLS = 8192

type Difference = tuple[str, str]


class MalformedExpert(ValueError):
    """The expert's arguments are not a JSON object."""


class MalformedAction(ValueError):
    """The action's arguments are not a JSON object."""


class CallComparator:
    """Whether two calls of one tool mean the same, under a recipe's rules. Shared by the verifiers that compare arguments."""

    def __init__(self, config: CallComparison, *, is_search: bool = False) -> None:
        kinds = {place: Kind(kind) for place, kind in config.kinds.items()}
        self._rules = RuleBook(RecipeRules(kinds, frozenset(config.unordered), frozenset(config.ignored_arguments), is_search))
        self._threshold = config.text_similarity
        self._deciding = frozenset(word.casefold() for word in config.destructive_words)
        self._experts: dict[tuple[int, bool, str], tuple[ValueRule, Arguments | None]] = {}

    def difference(self, state: State, expert: ToolCall, action: ToolCall) -> Difference | None:
        """(reason, argument) of the first difference, or None where the calls mean the same.

        Raises:
            MalformedExpert, MalformedAction, TooDeep: where a side's arguments cannot be compared.
        """
        if expert.name != action.name:
            return "wrong tool", ""
        rule = self._rules.rule(state, expert.name)
        is_parsed = may_be_parsed([expert], [action])
        theirs = self._expert(expert.arguments, rule, is_parsed=is_parsed)
        if expert.arguments == action.arguments:
            return None
        values = read_object(action.arguments)
        if values is None:
            raise MalformedAction
        if (found := key_difference(theirs, values, rule)) is not None:
            return found
        return difference(theirs.tree, arguments_tree(values, rule, is_parsed=is_parsed, like=theirs), self._similar)

    def differences(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Callable[[int, int], Difference | None]:
        """`difference` for every pair of an expert's and an action's call, each side read once.

        Raises:
            MalformedExpert, MalformedAction, TooDeep: where any call's arguments cannot be compared.
        """
        is_parsed = may_be_parsed(expert, action)
        theirs = [self._expert(call.arguments, self._rules.rule(state, call.name), is_parsed=is_parsed).tree for call in expert]
        ours: list[Tree] = []
        for call in action:
            if (values := read_object(call.arguments)) is None:
                raise MalformedAction
            ours.append(arguments_tree(values, self._rules.rule(state, call.name), is_parsed=is_parsed))

        def of_pair(i: int, j: int) -> Difference | None:
            return ("wrong tool", "") if expert[i].name != action[j].name else difference(theirs[i], ours[j], self._similar)

        return of_pair

    def is_destructive(self, name: str) -> bool:
        """Whether a tool's name holds a destructive word, of the built-in list or the recipe's."""
        words = words_of_name(name)
        return not (DESTRUCTIVE_WORDS.isdisjoint(words) and self._deciding.isdisjoint(words))

    def _similar(self, first: Prose, second: Prose) -> bool:
        similar = similar_query if first.is_query and second.is_query else similar_text
        return similar(first.text, second.text, threshold=self._threshold, deciding=self._deciding)

    def _expert(self, arguments: str, rule: ValueRule, *, is_parsed: bool) -> Arguments:
        """The expert's side, remembered for all samples of a state. The entry holds the rule, so the identity in its key is not reused."""
        key = (id(rule), is_parsed, arguments)
        if (entry := self._experts.get(key)) is None:
            if len(self._experts) >= _CACHED_EXPERT_CALLS:
                self._experts.clear()
            values = read_object(arguments)
            found = None if values is None else Arguments(values, arguments_tree(values, rule, is_parsed=is_parsed))
            entry = self._experts[key] = (rule, found)
        if entry[1] is None:
            raise MalformedExpert
        return entry[1]


def may_be_parsed(expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> bool:
    """Whether the strings of both sides are given to parsers: each side's arguments are within the bound, all calls together."""
    return all(sum(len(call.arguments) for call in calls) <= MAX_PARSED_CHARS for calls in (expert, action))


class CallsVerifier:
    """The verdict on an action's calls where the expert calls too.

    Reasons: ``malformed`` and ``arguments nested too deeply`` (invalid); ``same calls`` (reward 1, less the cost of surplus calls); ``missing
    call``, ``surplus call``, ``wrong tool``, ``unknown tool``, ``missing argument``, ``unexpected argument``, ``wrong argument value``, ``calls in
    another order``, ``expert call is malformed`` (reward 0).
    """

    def __init__(self, config: CallComparison, *, is_search: bool = False) -> None:
        self._config = config
        self._calls = CallComparator(config, is_search=is_search)

    def verify_calls(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        try:
            return self._verify_calls(state, expert, action)
        except TooDeep:
            return Verdict.invalid("arguments nested too deeply")
        except MalformedAction:
            return Verdict.invalid("malformed")
        except MalformedExpert:
            return Verdict.ok(0.0, "expert call is malformed")

    def _verify_calls(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        if len(expert) == len(action) == 1:
            found = self._calls.difference(state, expert[0], action[0])
            return Verdict.ok(1.0, "same calls") if found is None else self._rejected(state, expert[0], action[0], found)
        num_surplus = len(action) - len(expert)
        if num_surplus < 0:
            return Verdict.ok(0.0, "missing call", expert_calls=len(expert), action_calls=len(action))
        if num_surplus and not self._may_be_surplus(expert, action, num_surplus):
            return Verdict.ok(0.0, "surplus call", expert_calls=len(expert), action_calls=len(action))
        return self._compare(state, expert, action)

    def _may_be_surplus(self, expert: Sequence[ToolCall], action: Sequence[ToolCall], num_surplus: int) -> bool:
        """Whether the recipe lets an action with this many calls more keep a part of its reward."""
        if self._config.surplus_call_cost * num_surplus >= 1 or len(action) > MAX_MATCHED or self._config.ordered_calls:
            return False
        surplus = Counter(call.name for call in action) - Counter(call.name for call in expert)
        return not any(self._calls.is_destructive(name) for name in surplus)

    def _compare(self, state: State, expert: Sequence[ToolCall], action: Sequence[ToolCall]) -> Verdict:
        found = self._calls.differences(state, expert, action)
        in_order = [found(index, index) for index in range(len(expert))]
        num_surplus = len(action) - len(expert)
        reward = 1.0 - self._config.surplus_call_cost * num_surplus
        if not any(in_order):
            return Verdict.ok(reward, "same calls", surplus_calls=num_surplus) if num_surplus else Verdict.ok(1.0, "same calls")
        if len(action) <= MAX_MATCHED:
            pairs = maximum_matching(len(expert), len(action), lambda i, j: found(i, j) is None)
            if len(pairs) == len(expert):
                return Verdict.ok(0.0, "calls in another order") if self._config.ordered_calls else Verdict.ok(reward, "same calls")
        if not num_surplus and Counter(call.name for call in expert) != Counter(call.name for call in action):
            return Verdict.ok(0.0, "wrong tool", expert_tools=[call.name for call in expert], action_tools=[call.name for call in action])
        index = next(index for index, found in enumerate(in_order) if found)
        return self._rejected(state, expert[index], action[index], in_order[index] or ("", ""))

    def _rejected(self, state: State, expert: ToolCall, action: ToolCall, found: Difference) -> Verdict:
        reason, argument = found
        if reason != "wrong tool":
            return Verdict.ok(0.0, reason, tool=expert.name, argument=argument)
        has_list = state.tool_origin not in (ToolOrigin.INFERRED, ToolOrigin.NONE)
        is_unknown = has_list and all(tool.name != action.name for tool in state.tools)
        return Verdict.ok(0.0, "unknown tool" if is_unknown else "wrong tool", expert_tools=[expert.name], action_tools=[action.name])
