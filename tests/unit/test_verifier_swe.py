"""The swe verifier at its three granularities, on calls in the forms of SWE-agent, SWE-smith, mini-swe-agent, OpenHands and codex."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from pivotrl.config.verifiers import ShellRules, SweVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Tool, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.swe import SweVerifier

STATE = State((), (), ToolOrigin.NONE)
type Granularity = Literal["name", "target", "arguments"]
EDIT = {"command": "str_replace", "path": "/app/a.py", "old_str": "    if low < x:", "new_str": "    if low <= x:"}


def _act(name: str, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, json.dumps(arguments)),), None, ParseOutcome.PARSED)


def _bash(command: Any, **more: Any) -> Action:
    return _act("bash", command=command, **more)


def _edit(**changes: Any) -> Action:
    return _act("str_replace_editor", **{**EDIT, **changes})


def _judge(expert: Action, action: Action, granularity: Granularity, **rules: Any) -> Verdict:
    verifier = SweVerifier(SweVerifierConfig(type="swe", granularity=granularity, shell=ShellRules(**rules)))
    verdict = verifier.verify(STATE, expert, action)
    assert verifier.verify(STATE, action, expert).reward == verdict.reward, "both sides are treated alike"
    assert verifier.verify(STATE, expert, expert).reward == 1
    return verdict


# (expert, action, reward at `target`, reward at `arguments`); at `name` all of them earn 1.
CALLS: list[tuple[Action, Action, float, float]] = [
    (_bash("ls -la src"), _bash("ls -al ./src"), 1, 1),
    (_bash("ls -la src"), _bash("ls src"), 1, 0),
    (_bash("ls -la src"), _bash("ls -la lib"), 0, 0),
    (_bash("ls -la /tmp"), _bash("rm -rf /tmp x"), 0, 0),
    (_bash("cat a.py"), _bash("cat /app/a.py"), 1, 0),
    (_bash("cat a.py"), _bash("cat /app/ba.py"), 0, 0),
    (_bash("grep -rn foo src | head -20"), _bash("grep -r foo src | head -50"), 1, 0),
    (_bash("grep -rn foo src"), _bash("grep -rn bar src"), 0, 0),
    (_bash("sed -n '1,9p' a.py"), _bash("sed -n '5,20p' a.py"), 1, 0),
    (_bash("sed -n '1,9p' a.py"), _bash("sed -i '1,9d' a.py"), 0, 0),
    (_bash("cd /app && python a.py"), _bash("cd /app; python ./a.py"), 1, 1),
    (_bash("cd /app && python a.py"), _bash("cd /app && python b.py"), 0, 0),
    (_bash("pytest -x t.py"), _bash("pytest t.py -v"), 1, 0),
    (_bash("cat > a.py <<'EOF'\nx\nEOF"), _bash("cat <<'END' > a.py\nx\nEND"), 1, 1),
    (_bash("cat > a.py <<'EOF'\nx\nEOF"), _bash("cat > a.py <<'EOF'\ny\nEOF"), 1, 0),
    (_bash("cat > a.py <<'EOF'\nx\nEOF"), _bash("cat > b.py <<'EOF'\nx\nEOF"), 0, 0),
    (_bash("cat > a.py <<'EOF'\nx\nEOF"), _bash("cat >> a.py <<'EOF'\nx\nEOF"), 0, 0),
    (_bash("python -c 'a'"), _bash("python -c 'b'"), 0, 0),
    (_bash("git reset a.py"), _bash("git reset --hard a.py"), 0, 0),
    (_bash("find . -name a"), _bash("find . -name a -delete"), 0, 0),
    (_bash("ls"), _bash("ls; ls"), 0, 0),
    (_bash("edit 1:2\nx('\nend_of_edit"), _bash("edit 1:2\nx('\nend_of_edit"), 1, 1),
    (_bash("edit 1:2\nx('\nend_of_edit"), _bash("edit 1:3\nx('\nend_of_edit"), 0, 0),
    (_bash("ls", security_risk="LOW"), _bash("ls", timeout=5), 1, 1),
    (_bash("ls"), _bash("ls", frobnicate=True), 1, 0),
    (_act("execute_bash", command="C-c", is_input="true"), _act("execute_bash", command="C-c"), 0, 0),
    (_act("execute_bash", command="y", is_input="true"), _act("execute_bash", command="y ", is_input="true"), 0, 0),
    (
        _act("shell", command=["bash", "-lc", "ls -la"], workdir="/app"),
        _act("shell", command=["bash", "-lc", "ls -al"], workdir="/app/"),
        1,
        1,
    ),
    (_act("shell", command=["bash", "-lc", "ls"], workdir="/app"), _act("shell", command=["bash", "-lc", "ls"], workdir="/lib"), 0, 0),
    (_act("shell", command=["ls", "-la"]), _act("shell", command=["ls", "-a", "-l"]), 1, 1),
    (_act("shell", command=["ls", "a b"]), _act("shell", command=["ls", "a", "b"]), 0, 0),
    (_act("shell", command=["ls", "*"]), _act("shell", command=["bash", "-lc", "ls *"]), 0, 0),
    (_act("shell", command=["ls", "x; rm y"]), _act("shell", command=["bash", "-lc", "ls x; rm y"]), 0, 0),
    (_act("shell", command=["A=1", "ls"]), _act("shell", command=["bash", "-lc", "A=1 ls"]), 0, 0),
    (_act("shell", command=["rm", "a"]), _act("shell", command=["rm", "b"]), 0, 0),
    (_edit(), _edit(path="/app/./a.py"), 1, 1),
    (_edit(), _edit(path="/app/b.py"), 0, 0),
    (_edit(), _edit(old_str="if low < x:", new_str="if low <= x:"), 1, 1),
    (_edit(), _edit(old_str="    if low < x:\n        y", new_str="    if low <= x:\n        y"), 1, 1),
    (_edit(), _edit(old_str="    if low < x:\n        y", new_str="    if low <= x:\n        z"), 1, 0),
    (_edit(), _edit(new_str="    if low <=  x:"), 1, 0),
    (_edit(), _edit(new_str="    IF low <= x:"), 1, 0),
    (_edit(), _edit(old_str="<", new_str="<="), 1, 0),
    (_edit(), _act("str_replace_editor", command="view", path="/app/a.py"), 0, 0),
    (_edit(), _act("str_replace_editor", command="undo_edit", path="/app/a.py"), 0, 0),
    (_edit(new_str=""), _act("str_replace_editor", command="str_replace", path="/app/a.py", old_str=EDIT["old_str"]), 1, 1),
    (
        _act("str_replace_editor", command="view", path="/app/a.py", view_range=[1, 5]),
        _act("str_replace_editor", command="view", path="/app/a.py", view_range=[1.0, 5]),
        1,
        1,
    ),
    (
        _act("str_replace_editor", command="view", path="/app/a.py", view_range=[1, 5]),
        _act("str_replace_editor", command="view", path="/app/a.py", view_range=[1, 50]),
        1,
        0,
    ),
    (
        _act("str_replace_editor", command="create", path="/app/a.py", file_text="x = 1\n"),
        _act("str_replace_editor", command="create", path="/app/a.py", file_text=""),
        1,
        0,
    ),
    (
        _act("str_replace_editor", command="insert", path="/app/a.py", insert_line=1, new_str="x"),
        _act("str_replace_editor", command="insert", path="/app/a.py", insert_line=2, new_str="x"),
        1,
        0,
    ),
    (_act("open", path="src/a.py", line_number=10), _act("open", path="./src/a.py", line_number=10), 1, 1),
    (_act("open", path="src/a.py", line_number=10), _act("open", path="src/a.py", line_number=99), 1, 0),
    (_act("find_file", file_name="a.py", dir="src"), _act("find_file", file_name="b.py", dir="src"), 0, 0),
    (_act("edit", search="a = 1 + 1", replace="a = 2"), _act("edit", search="a = 1 + 1", replace="a = 3"), 1, 0),
    (
        _act("edit", start_line=1, end_line=2, replacement_text="a"),
        _act("edit", start_line=1, end_line=2, replacement_text="A"),
        1,
        0,
    ),
    (_act("submit"), _act("submit"), 1, 1),
]


@pytest.mark.parametrize(("expert", "action", "target", "arguments"), CALLS, ids=[str(index) for index in range(len(CALLS))])
def test_granularities(expert: Action, action: Action, target: float, arguments: float) -> None:
    assert _judge(expert, action, "name").reward == 1
    assert _judge(expert, action, "target").reward == target
    assert _judge(expert, action, "arguments").reward == arguments
    assert target >= arguments, "a finer rule never accepts more"


@pytest.mark.parametrize("granularity", ["name", "target", "arguments"])
def test_what_no_granularity_accepts(granularity: Granularity) -> None:
    expert = _bash("ls")
    call = expert.tool_calls[0]
    for action, reason in (
        (_act("submit"), "wrong tool"),
        (Action("", (call,) * 21, None, ParseOutcome.PARSED), "surplus call"),
        (Action("I would list the files.", (), None, ParseOutcome.ABSENT), "spoke instead of calling"),
    ):
        assert _judge(expert, action, granularity).reason == reason
    for action in (
        Action("", (ToolCall("bash", '{"command": '),), None, ParseOutcome.PARSED),
        Action("", (ToolCall("bash", "[1]"),), None, ParseOutcome.PARSED),
        Action("<tool_call>", (), None, ParseOutcome.MALFORMED),
        Action(" ", (), None, ParseOutcome.ABSENT),
    ):
        verdict = SweVerifier(SweVerifierConfig(type="swe", granularity=granularity)).verify(STATE, expert, action)
        assert (verdict.kind, verdict.reward) == (VerdictKind.INVALID, 0)


def test_empty_arguments_are_not_vacuously_right() -> None:
    assert _judge(_bash("ls"), _act("bash"), "arguments").reason == "missing argument"
    assert _judge(_bash("ls"), _act("bash"), "target").reward == 0
    nothing = Action("", (ToolCall("submit", ""),), None, ParseOutcome.PARSED)
    assert _judge(_act("submit"), nothing, "arguments").reward == 1, "no text is no arguments"


def test_reasons_name_the_harm() -> None:
    assert _judge(_bash("ls src"), _bash("rm -r src"), "arguments").reason == "destructive command"
    assert _judge(_bash("rm -r lib"), _bash("rm -r src"), "arguments").reason == "wrong argument value"
    assert _judge(_bash("ls src"), _bash("rm -r src"), "target").reason == "wrong target"


def test_a_fresh_shell_starts_in_the_working_directory() -> None:
    pair = (_bash("cd /testbed && python a.py"), _bash("python a.py"))
    assert _judge(*pair, "arguments").reward == 0
    assert _judge(*pair, "arguments", working_directory="/testbed").reward == 1
    assert _judge(*pair, "arguments", working_directory="/other").reward == 0


def test_the_recipe_names_the_shell_tools() -> None:
    """An argument called `command` is read as one anywhere, but only a shell has a working directory."""
    pair = (_act("console", command="cat /repo/a.py"), _act("console", command="cat a.py"))
    assert _judge(*pair, "arguments", tools=(), working_directory="/repo").reward == 0
    assert _judge(*pair, "arguments", tools=("console",), working_directory="/repo").reward == 1


def test_a_default_left_out_is_the_same_as_written() -> None:
    """Whatever kind of argument it is: a path is read as a path in both cases."""
    members = {"query": {"type": "string"}, "path": {"type": "string", "default": "./src/"}, "text": {"type": "string", "default": "a b"}}
    tool = Tool("grep", "", {"type": "object", "properties": members, "required": ["query"]})
    state = State((), (tool,), ToolOrigin.ROW)
    verifier = SweVerifier(SweVerifierConfig(type="swe", granularity="arguments"))
    short = _act("grep", query="x")
    for same in (_act("grep", query="x", path="src"), _act("grep", path="./src/", query="x", text="a b")):
        assert verifier.verify(state, short, same).reward == verifier.verify(state, same, short).reward == 1
    for other in (_act("grep", query="x", path="lib"), _act("grep", query="x", text="a  b")):
        assert verifier.verify(state, short, other).reward == verifier.verify(state, other, short).reward == 0
