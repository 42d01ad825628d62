"""The known holes of the public graders (docs/gym.md): open in the compatibility modes, because the graders have them; closed in ours.

A case is one hole: the expert's action, the policy's, what the grader gives, what the verifier of ours gives that docs/gym.md names for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_verifier
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_SCHEMA = {
    "type": "object",
    "properties": {
        "q": _TEXT,
        "n": _NUMBER,
        "city": _TEXT,
        "limit": {"type": "integer", "default": 10},
        "tags": {"type": "array", "uniqueItems": True},
    },
}
STATE = State((), (Tool("find", "", _SCHEMA), Tool("drop_table", "", {"type": "object"})), ToolOrigin.ROW)


def acts(*calls: tuple[str, Any]) -> Action:
    return Action("", tuple(ToolCall(name, json.dumps(value)) for name, value in calls), None, ParseOutcome.PARSED)


def says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def find(**arguments: Any) -> Action:
    return acts(("find", arguments))


SINGLE, SEARCHES, SWE = ("word_count_similarity_threshold=0.1", "word_count_similarity_threshold=0.6", "word_count_similarity_threshold=0.0")
OLD_TEXT, NEW_TEXT = "please send the invoice again today", "please delete the invoice again tomorrow"
HOLES: dict[str, tuple[str, Action, Action, float, float]] = {
    "identical strings score 0.5": (SEARCHES, find(q="two words"), find(q="two words"), 0, 1),
    "any two strings pass at threshold 0": (SWE, find(q="rm -rf /tmp x"), find(q="ls -la /home"), 1, 0),
    "a few common words pass": (SINGLE, find(q=OLD_TEXT), find(q=NEW_TEXT), 1, 0),
    "any message passes": (SINGLE, says("Your order W12 was cancelled."), says("As a pirate I refuse."), 1, 0),
    "nothing at all passes as a message": (SINGLE, says("Your order W12 was cancelled."), says(""), 1, 0),
    "surplus calls are free": (SINGLE, find(q="x"), acts(("find", {"q": "x"}), ("drop_table", {"name": "users"})), 1, 0),
    "twenty surplus calls are free": (SINGLE, find(q="x"), acts(("find", {"q": "x"}), *[("find", {"q": str(i)}) for i in range(20)]), 1, 0),
    "1 is not 1.0": (SINGLE, find(n=1), find(n=1.0), 0, 1),
    "true is 1": (SINGLE, find(n=1), find(n=True), 1, 0),
    "a default left out": (SINGLE, find(q="x", limit=10), find(q="x"), 0, 1),
    "the order of a set": (SINGLE, find(tags=["a", "b"]), find(tags=["b", "a"]), 0, 1),
    "the case of one word": (SINGLE, find(city="Paris"), find(city="paris"), 0, 1),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_open_in_the_compatibility_mode_and_closed_in_ours(hole: str) -> None:
    threshold, expert, action, public, ours = HOLES[hole]
    compatible = build_verifier(load_verifier("gym_single_step", [threshold]), expand=Path)
    functional = build_verifier(load_verifier("tool_call", ["message=similarity"]), expand=Path)
    assert compatible.verify(STATE, expert, action).reward == public
    assert functional.verify(STATE, expert, action).reward == ours


EDIT = ("str_replace_editor", {"command": "str_replace", "path": "src/app/models.py", "old_str": "return None", "new_str": "return total"})


def unreadable(name: str) -> Action:
    return Action("", (ToolCall(name, '{"comm'),), None, ParseOutcome.MALFORMED)


SWE_HOLES: dict[str, tuple[Action, Action, dict[str, float]]] = {
    "a verb behind cd": (
        acts(("execute_bash", {"command": "cd /w/x && ls"})),
        acts(("execute_bash", {"command": "cd /w/x && rm -rf /w/x"})),
        {"0.4.0": 1, "0.7.0": 1},
    ),
    "unreadable arguments of an editor": (acts(EDIT), unreadable("code_editor"), {"0.4.0": 1, "0.7.0": 0}),
    "unreadable arguments of a reader": (acts(("read_file", {"path": "a/b.py"})), unreadable("view_file"), {"0.4.0": 1, "0.7.0": 1}),
    "another file of the same last names": (acts(EDIT), acts((EDIT[0], {**EDIT[1], "path": "other/app/models.py"})), {"0.4.0": 1, "0.7.0": 1}),
    "another file": (acts(EDIT), acts((EDIT[0], {**EDIT[1], "path": "src/app/views.py"})), {"0.4.0": 0, "0.7.0": 0}),
}


@pytest.mark.parametrize("hole", SWE_HOLES)
@pytest.mark.parametrize("version", ["0.4.0", "0.7.0"])
def test_holes_of_the_swe_grader(hole: str, version: str) -> None:
    """Targets alone, as recipes that compare targets set it."""
    expert, action, public = SWE_HOLES[hole]
    verifier = build_verifier(load_verifier("gym_swe_pivot", [f"version={version}", "enable_argument_similarity=false"]), expand=Path)
    assert verifier.verify(STATE, expert, action).reward == public[version]


def reply(*keys: str, complete: bool = False) -> Action:
    value = {"analysis": "", "plan": "", "commands": [{"keystrokes": one} for one in keys], "task_complete": complete}
    return says(json.dumps(value))


@pytest.mark.parametrize(
    ("expert", "action", "public"),
    [
        (reply("rm -rf build/old\n"), reply("rm -rf build/odd\n"), 1),
        (reply("ls\n", "pwd\n"), reply("ls\npwd\n"), 1),
        (reply("ls\n"), reply("ls\n", complete=True), 1),
        (reply("ls -la\n"), reply("ls -al\n"), 0),
        (reply("echo '</think>'\n"), reply("echo '</think>'\n"), 0),
        (reply("x = 1\n" * 40), reply("\n" + "x = 1\n" * 40), 0),
    ],
)
def test_holes_of_the_terminal_grader(expert: Action, action: Action, public: float) -> None:
    """One letter of a path, no separator, completing too early, flag order, the tag inside a command, difflib's autojunk on long texts."""
    verifier = build_verifier(load_verifier("gym_terminus", ["enable_llm_judge=false"]), expand=Path)
    assert verifier.verify(STATE, expert, action).reward == public
