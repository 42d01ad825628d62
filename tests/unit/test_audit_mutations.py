"""Each mutation against what it promises: JSON ones by value, shell ones by running both commands, the rest by a table; and where none may apply."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin
from pivotrl.verifiers.audit.corruptions import CORRUPTIONS
from pivotrl.verifiers.audit.equivalents import EQUIVALENTS
from pivotrl.verifiers.audit.mutations import Label, allows_null
from pivotrl.verifiers.audit.shell_edits import command_texts

MUTATIONS = {mutation.name: mutation for mutation in (*EQUIVALENTS, *CORRUPTIONS)}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "tags": {"type": "array", "uniqueItems": True},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "timeout": {"type": "number"},
    },
    "required": ["path"],
}
STATE = State((), (Tool("open", "", SCHEMA), Tool("finish", "", {"type": "object", "required": ["message"]})), ToolOrigin.ROW)
INFERRED = State((), STATE.tools, ToolOrigin.INFERRED)


def call(name: str, **arguments: object) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


def says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


def terminal(*keystrokes: str, **more: object) -> Action:
    commands = [{"keystrokes": text, "duration": 1} for text in keystrokes]
    return call("terminus2", analysis="a", plan="p", commands=commands, **more)


def mutate(name: str, action: Action, state: State = STATE, seed: int = 0) -> Action | None:
    return MUTATIONS[name].apply(state, action, random.Random(seed))


def arguments(action: Action | None) -> dict[str, object]:
    assert action is not None
    return json.loads(action.tool_calls[0].arguments)


def test_names_are_unique_and_both_labels_exist() -> None:
    assert len(MUTATIONS) == len(EQUIVALENTS) + len(CORRUPTIONS) >= 40
    assert {mutation.label for mutation in EQUIVALENTS} == {Label.EQUIVALENT}
    assert {mutation.label for mutation in CORRUPTIONS} == {Label.CORRUPTION}


@pytest.mark.parametrize("name", ["keys reordered", "JSON formatting", "whole numbers as floats"])
def test_json_rewritings_keep_the_value_and_change_the_text(name: str) -> None:
    action = call("open", path="/a/b", count=3, tags=["x", "\u00e9"])
    mutated = mutate(name, action)
    assert arguments(mutated) == arguments(action)
    assert mutated is not None
    assert mutated.tool_calls[0].arguments != action.tool_calls[0].arguments


def test_numbers_under_a_string_schema_are_left_alone() -> None:
    state = State((), (Tool("zip", "", {"properties": {"code": {"type": "string"}}}),), ToolOrigin.ROW)
    assert mutate("whole numbers as floats", call("zip", code=3106), state) is None
    assert arguments(mutate("whole numbers as floats", call("zip", code=3106), INFERRED)) == {"code": 3106.0}


def test_defaults_and_nulls_follow_the_schema_and_only_where_it_has_authority() -> None:
    bare = call("open", path="/a/b")
    assert arguments(mutate("defaults filled in", bare)) == {"path": "/a/b", "mode": "a"}
    assert arguments(mutate("defaults left out", call("open", path="/a/b", mode="a"))) == {"path": "/a/b"}
    assert mutate("defaults left out", call("open", path="/a/b", mode="b")) is None
    assert arguments(mutate("optional nulls", bare)) == {"path": "/a/b", "note": None}
    assert arguments(mutate("sets reordered", call("open", path="/a", tags=["x", "y"])))["tags"] == ["y", "x"]
    for name in ("defaults filled in", "optional nulls", "defaults left out"):
        assert mutate(name, call("open", path="/a/b", mode="a"), INFERRED) is None
    assert allows_null({"type": ["string", "null"]})
    assert not allows_null({"type": "string"})


def test_only_reads_are_reordered() -> None:
    reads = Action("", (ToolCall("get_x", '{"id": 1}'), ToolCall("get_x", '{"id": 2}')), None, ParseOutcome.PARSED)
    writes = Action("", (ToolCall("set_x", '{"id": 1}'), ToolCall("set_x", '{"id": 2}')), None, ParseOutcome.PARSED)
    mutated = mutate("reads reordered", reads)
    assert mutated is not None
    assert mutated.tool_calls == reads.tool_calls[::-1]
    assert mutate("reads reordered", writes) is None


@pytest.mark.parametrize(
    ("name", "action", "expected"),
    [
        ("path spelling", call("open", path="/a/b/c.py"), {"path": "/a/b/./c.py"}),
        ("wrong target", call("open", path="/a/b/c.py", count=1), {"path": "/a/b/other_c.py", "count": 1}),
        ("wrong target", call("open", path="/a/9", count=1), {"path": "/a/0", "count": 1}),
        ("off by one", call("open", path="/a", count=3, timeout=60), {"path": "/a", "count": 4, "timeout": 60}),
        ("argument added", call("open", path="/a"), {"path": "/a", "unrequested_option": "all"}),
        ("argument dropped", call("open", path="/a", timeout=5, mode="a"), {"timeout": 5, "mode": "a"}),
        ("argument retyped", call("open", path="/a", timeout=5), {"path": {"value": "/a"}, "timeout": 5}),
        ("empty arguments", call("open", path="/a"), {}),
        ("another word", call("lookup", text="blue elephants dance"), {"text": "blue Zanzibar dance"}),
    ],
)
def test_argument_mutations(name: str, action: Action, expected: dict[str, object]) -> None:
    assert arguments(mutate(name, action)) == expected


def test_what_the_schema_does_not_know_was_added_by_a_harness_and_is_not_dropped() -> None:
    action = call("open", security_level="LOW")
    assert mutate("argument dropped", action) is None
    assert arguments(mutate("argument dropped", action, INFERRED)) == {}


def test_actions_of_another_kind() -> None:
    action = call("open", path="/a")
    assert mutate("tool renamed", action).tool_calls[0].name == "finish"  # type: ignore[union-attr]
    assert mutate("tool renamed", action, State((), (), ToolOrigin.NONE)).tool_calls[0].name == "open_other"  # type: ignore[union-attr]
    assert mutate("nothing done", action) == says("")
    assert mutate("speaks instead of calling", action) == says("I will now call open.")
    assert len(mutate("twenty surplus calls", action).tool_calls) == 21  # type: ignore[union-attr]
    assert mutate("premature completion", action) == call("finish", message="All done.")
    assert mutate("premature completion", call("finish", message="x")) is None
    assert mutate("truncated", action).parse is ParseOutcome.MALFORMED  # type: ignore[union-attr]
    assert mutate("calls instead of speaking", says("Hello there."), INFERRED).parse is ParseOutcome.PARSED  # type: ignore[union-attr]
    for name in ("argument dropped", "tool renamed", "premature completion", "twenty surplus calls", "empty arguments"):
        assert mutate(name, says("Hello there, how are you?")) is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("message: negated", "Your order is here.", "Your order is not here."),
        ("message: negated", "Your order is not here.", None),
        ("message: negated", "Thank you!", None),
        ("message: another number", "Pay 42 EUR for W42.", "Pay 43 EUR for W42."),
        ("message: another number", "1. apples", None),
        ("message: another number", "version 3.12 or id 7-8", None),
        ("message: words shuffled", "one two three four five six seven eight", "eight five four one seven six three two"),
        ("message: words shuffled", "too short", None),
        ("message: one word", "Sure, I will do it.", "Okay."),
        ("message: emphasis", "All done.", "**All done.**"),
        ("message: emphasis", "a\nb", None),
        ("truncated", "one two three four five six seven eight", "one two three four"),
    ],
)
def test_message_mutations(name: str, text: str, expected: str | None) -> None:
    mutated = mutate(name, says(text))
    assert (None if mutated is None else mutated.content) == expected


def test_terminal_mutations() -> None:
    action = terminal("cd src\n", "ls -la\n")
    assert arguments(mutate("terminal: other prose", action))["commands"] == arguments(action)["commands"]
    slower = arguments(mutate("terminal: durations", action))["commands"]
    assert [command["duration"] for command in slower] == [1.5, 1.5]  # type: ignore[union-attr]
    assert arguments(mutate("premature completion", action))["task_complete"] is True
    assert mutate("premature completion", terminal(task_complete=True)) is None
    assert arguments(mutate("completion dropped", terminal(task_complete=True)))["task_complete"] is False
    assert mutate("completion dropped", action) is None
    assert [one.text for one in command_texts(mutate("terminal: not executed", action))] == ["cd src\n", "ls -la"]  # type: ignore[arg-type]
    assert len(command_texts(mutate("twenty surplus calls", action))) == 22  # type: ignore[arg-type]
    for name in ("argument dropped", "argument added", "argument retyped", "wrong target"):
        assert mutate(name, action) is None


def test_shell_texts_are_found_where_agents_write_them() -> None:
    codex = call("shell", command=["bash", "-lc", "ls -la"], workdir="/a")
    assert [one.text for one in command_texts(codex)] == ["ls -la"]
    assert arguments(mutate("shell: flag order", codex)) == {"command": ["bash", "-lc", "ls -al"], "workdir": "/a"}
    assert [one.text for one in command_texts(call("execute_bash", command="pwd"))] == ["pwd"]
    assert command_texts(call("str_replace_editor", command="view", path="/a")) == []


COMMANDS = (
    "ls -la sub; cat 'two words.txt'",
    "grep -rn 'needle' . | sort -rn",
    "mkdir -p x/y && ls -lR x",
    "cat <<'EOF' > made.txt\nrm -rf 'here' is text\nEOF\ncat made.txt",
    'echo "a \'b\' $HOME" && cat "two words.txt" && wc -l a.txt',
    'for f in *.txt; do wc -lw "$f"; done; uniq -c a.txt && sort -u a.txt',
    "cp -rp sub copy && rm -rf sub && ls",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name.startswith("shell:") and MUTATIONS[name].label is Label.EQUIVALENT])
def test_a_shell_rewriting_has_the_same_effect(tmp_path: Path, command: str, name: str) -> None:
    """Both commands are run in equal directories; output, exit code and files are compared. At least one seed must change the text."""
    action = call("bash", command=command)
    texts = {str(arguments(mutated)["command"]) for seed in range(6) if (mutated := mutate(name, action, seed=seed)) is not None}
    expected = _effect(command, tmp_path / "expected")
    for index, text in enumerate(sorted(texts)):
        assert text != command
        assert _effect(text, tmp_path / f"mutated{index}") == expected, text


def test_every_shell_rewriting_applies_to_some_command() -> None:
    for name in (name for name in MUTATIONS if name.startswith("shell:")):
        assert any(mutate(name, call("bash", command=command)) is not None for command in (*COMMANDS, "cat sub/b.txt")), name


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("shell: destructive command", "ls sub", "ls sub; rm -rf ./*"),
        ("shell: destructive command", "cat <<'EOF'\nx\nEOF", None),
        ("shell: destructive command", "ls # all", None),
        ("shell: another path", "cat sub/b.txt", "cat sub/other_b.txt"),
        ("shell: another path", "echo 'sub/b.txt'", None),
        ("shell: last command dropped", "cd a && make && ./run", "cd a && make "),
        ("shell: last command dropped", "cd a; make", None),
        ("shell: quotes", "echo 'a $x'", None),
        ("shell: flag order", "tar -xzf a.tgz", None),
        ("shell: blanks", "echo 'unfinished", None),
    ],
)
def test_shell_corruptions_and_what_is_left_alone(name: str, command: str, expected: str | None) -> None:
    mutated = mutate(name, call("bash", command=command))
    assert (None if mutated is None else arguments(mutated)["command"]) == expected


def _effect(command: str, directory: Path) -> tuple[int, str, dict[str, str]]:
    (directory / "sub").mkdir(parents=True)
    (directory / "a.txt").write_text("needle\nb\nb\n")
    (directory / "sub" / "b.txt").write_text("a needle\n")
    (directory / "two words.txt").write_text("2\n")
    # TIME_STYLE and a fixed date keep `ls -l` equal between the directories.
    for path in sorted(directory.rglob("*")):
        subprocess.run(["touch", "-d", "2024-01-01", str(path)], check=True)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "LC_ALL": "C"}
    done = subprocess.run(["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=20, check=False)
    files = {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}
    lines = [line for line in done.stdout.splitlines() if not line.endswith((" .", " ..")) and not line.startswith("total")]
    return done.returncode, "\n".join(_without_time(line) for line in lines), files


def _without_time(line: str) -> str:
    """A line of `ls -l` without its date, which differs for files that the command itself makes."""
    parts = line.split()
    return " ".join([*parts[:5], *parts[8:]]) if parts and len(parts[0]) == 10 and parts[0][0] in "-d" else line
