"""Prints verdicts per second of the tool-call verifier on five-argument calls, one core. Run: ``python benchmarks/verify_tool_calls.py``."""

from __future__ import annotations

import json
import time

from pivotrl.config.schema import ToolCallVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.tool_call import ToolCallVerifier

_NUM_VERDICTS = 40_000
_PROPERTIES = {
    "user_id": {"type": "string"},
    "origin": {"type": "string"},
    "passengers": {"type": "integer"},
    "cabin": {"type": "string", "enum": ["economy", "business"]},
    "note": {"type": "string"},
    "insurance": {"type": "boolean", "default": False},
}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)[:5]}
_EXPERT = {"user_id": "u_12", "origin": "Paris", "passengers": 2, "cabin": "economy", "note": "window seat please"}
_ACTIONS = {
    "same, respelled": {**_EXPERT, "origin": "paris", "passengers": 2.0, "note": "Window  seat please", "insurance": False},
    "one value wrong": {**_EXPERT, "origin": "Rome"},
    "prose paraphrased": {**_EXPERT, "note": "please give me a seat by the window"},
}


def _act(arguments: object) -> Action:
    return Action("", (ToolCall("book", json.dumps(arguments)),), None, ParseOutcome.PARSED)


def main() -> None:
    tools = tuple(Tool(name, "", _SCHEMA) for name in (*(f"tool_{i}" for i in range(14)), "book"))
    state, expert = State((), tools, ToolOrigin.ROW), _act({**_EXPERT, "note": "give me a seat by the window"})
    verifier = ToolCallVerifier(ToolCallVerifierConfig(type="tool_call", message="similarity"))
    for name, arguments in _ACTIONS.items():
        action, chosen = _act(arguments), expert if name.startswith("prose") else _act(_EXPERT)
        started_s = time.process_time()
        for _ in range(_NUM_VERDICTS):
            verdict = verifier.verify(state, chosen, action)
        rate = _NUM_VERDICTS / (time.process_time() - started_s)
        print(f"{name}: {rate:,.0f} verdicts/s ({verdict.reason})")


if __name__ == "__main__":
    main()
