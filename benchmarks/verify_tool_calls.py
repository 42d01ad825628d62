"""Verdicts per second of the tool-call verifier on five-argument calls, one core, against a plain recursive comparator in the same run.

    python benchmarks/verify_tool_calls.py

Every action of a case is spelled differently, as samples are, so no verdict comes from a cache of actions; the expert's side is remembered, as
in profiling. The comparator does what a simple grader does: parse both sides with the standard library, then compare keys, numbers and
word overlap of strings recursively. Prints CPU time rates, the ratio and the verifier's p50 and p99, on one line per case.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pivotrl.config.verifiers import ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.tool_call import ToolCallVerifier

_NUM_VERDICTS = 20_000
_ROUNDS = 3
_PROPERTIES = {
    "user_id": {"type": "string"},
    "origin": {"type": "string"},
    "passengers": {"type": "integer"},
    "cabin": {"type": "string", "enum": ["economy", "business"]},
    "note": {"type": "string"},
    "insurance": {"type": "boolean", "default": False},
}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)[:5]}
_EXPERT = {"user_id": "u_12", "origin": "Paris", "passengers": 2, "cabin": "economy", "note": "give me a seat by the window"}
_CASES: dict[str, Callable[[int], dict[str, object]]] = {
    "same, respelled": lambda i: {**_EXPERT, "origin": "paris", "passengers": 2.0, "note": _spelled("Give me a  seat by the window", i)},
    "one value wrong": lambda i: {**_EXPERT, "origin": f"Rome {i}"},
    "prose paraphrased": lambda i: {**_EXPERT, "note": _spelled("please give me a seat by the window", i)},
    "invented argument": lambda i: {**_EXPERT, f"extra_{i}": i},
}


def _spelled(text: str, number: int) -> str:
    """The text with the letters in capitals that the number's bits name."""
    return "".join(letter.upper() if number >> place & 1 else letter for place, letter in enumerate(text))


def main() -> None:
    """Runs every case `_ROUNDS` times and prints the best of each, which a busy machine disturbs least."""
    tools = tuple(Tool(name, "", _SCHEMA) for name in (*(f"tool_{i}" for i in range(14)), "book"))
    state, expert = State((), tools, ToolOrigin.ROW), _act(_EXPERT)
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity"))
    for name, arguments in _CASES.items():
        actions = [_act(arguments(i)) for i in range(_NUM_VERDICTS)]
        rate = _rate(lambda action: verifier.verify(state, expert, action), actions)
        plain = _rate(lambda action: _plain(expert.tool_calls[0], action.tool_calls[0]), actions)
        p50_us, p99_us = _latencies_us(lambda action: verifier.verify(state, expert, action), actions)
        reason = verifier.verify(state, expert, actions[0]).reason
        print(f"{name}: {rate:,.0f} verdicts/s, {rate / plain:.1f}x the plain comparator, p50 {p50_us:.0f} us, p99 {p99_us:.0f} us ({reason})")


def _act(arguments: object) -> Action:
    return Action("", (ToolCall("book", json.dumps(arguments)),), None, ParseOutcome.PARSED)


def _rate(judge: Callable[[Action], Any], actions: Sequence[Action]) -> float:
    best_s = float("inf")
    for _ in range(_ROUNDS):
        started_s = time.process_time()
        for action in actions:
            judge(action)
        best_s = min(best_s, time.process_time() - started_s)
    return len(actions) / best_s


def _latencies_us(judge: Callable[[Action], Any], actions: Sequence[Action]) -> tuple[float, float]:
    spent_s: list[float] = []
    for action in actions:
        started_s = time.thread_time()
        judge(action)
        spent_s.append(time.thread_time() - started_s)
    spent_s.sort()
    return 1e6 * spent_s[len(spent_s) // 2], 1e6 * spent_s[len(spent_s) * 99 // 100]


def _plain(expert: ToolCall, action: ToolCall) -> bool:
    return expert.name == action.name and _plainly_same(json.loads(expert.arguments), json.loads(action.arguments))


def _plainly_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_plainly_same(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(_plainly_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, str) and isinstance(second, str):
        words, others = Counter(first.lower().split()), Counter(second.lower().split())
        return words == others if min(len(words), len(others)) < 2 else (words & others).total() / (words + others).total() >= 0.1
    return bool(first == second)


if __name__ == "__main__":
    main()
