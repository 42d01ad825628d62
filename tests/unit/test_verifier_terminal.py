"""The terminal verifier: what a turn's keystrokes do, in order, and its claim of completion, in both Terminus forms."""

from __future__ import annotations

import json

import pytest

from pivotrl.config.verifiers import ShellRules, TerminalVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.terminal import TerminalVerifier

STATE = State((), (), ToolOrigin.NONE)


def _verifier(**rules: object) -> TerminalVerifier:
    return TerminalVerifier(TerminalVerifierConfig(type="terminal", shell=ShellRules(**rules)))  # pyright: ignore[reportArgumentType]


def _call(arguments: object, name: str = "terminus2") -> Action:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Action("", (ToolCall(name, text),), None, ParseOutcome.PARSED)


def _turn(*keystrokes: str, complete: bool | None = None, duration: float = 1.0, plan: str = "go on") -> Action:
    commands = [{"keystrokes": text, "duration": duration} for text in keystrokes]
    flag = {} if complete is None else {"task_complete": complete}
    return _call({"analysis": "a", "plan": plan, "commands": commands, **flag})


def _first_turn(*keystrokes: str, complete: bool = False, is_blocking: bool = True) -> Action:
    commands = [{"keystrokes": text, "is_blocking": is_blocking, "timeout_sec": 5} for text in keystrokes]
    return _call({"state_analysis": "s", "explanation": "e", "commands": commands, "is_task_complete": complete}, "terminus1")


def _judge(expert: Action, action: Action, **rules: object) -> Verdict:
    verifier = _verifier(**rules)
    verdict = verifier.verify(STATE, expert, action)
    assert verifier.verify(STATE, action, expert).reward == verdict.reward, "both sides are treated alike"
    assert verifier.verify(STATE, expert, expert).reward == 1
    return verdict


SAME = [
    (["ls -la\n"], ["ls -al\n"]),
    (["ls\npwd\n"], ["ls\n", "pwd\n"]),
    (["ls\n", "pwd\n"], ["ls; pwd\n"]),
    (["ls", "\n"], ["ls\n"]),
    (["ls", " -la\n"], ["ls -la\n"]),
    (["ls\n", ""], ["ls\n"]),
    (["# look\n", "ls\n"], ["ls\n"]),
    (["cd /app\n", "make\n"], ["cd /app && make\n"]),
    (["cd /app\n", "cat a\n"], ["cd /app; cat /app/a\n"]),
    (["mkdir -p out && cp a out/\n"], ["mkdir --parents out\n", "cp ./a out/\n"]),
    (["cat > f <<'EOF'\n", "x\n", "EOF\n"], ["cat > f <<'EOF'\nx\nEOF\n"]),
    (["ls\r"], ["ls\n"]),
    (["ls ~/src\n"], ['ls "$HOME/src"\n']),
    (["cd\n"], ["cd $HOME\n"]),
    (["awk '{print $2}' f\n"], ["awk '{ print $2 }' f\n"]),
    (["cd /app\n", "npm install\n", "npm test\n"], ["cd /app && npm install && npm test\n"]),
    (["ls", "Enter"], ["ls\n"]),
    (["\x03"], ["C-c"]),
    (["^C"], ["C-c"]),
    (["C-c", "ls -la\n"], ["C-c", "ls -al\n"]),
    (["python3\n", "print(1)\n"], ["python3\n", "print(1)\n"]),
    (["python3\n", "print( 'a' )\n", "C-d", "ls -la\n"], ["python3\n", "print( 'a' )\n", "C-d", "ls -al\n"]),
    (["echo 'open\n"], ["echo 'open\n"]),
]


@pytest.mark.parametrize(("expert", "action"), SAME)
def test_same_commands(expert: list[str], action: list[str]) -> None:
    verdict = _judge(_turn(*expert), _turn(*action))
    assert (verdict.reward, verdict.reason) == (1, "same commands")
    assert _judge(_first_turn(*expert), _first_turn(*action)).reward == 1


DIFFERENT = [
    (["ls\n"], ["ls"], "command not executed"),
    (["ls\n"], [], "no commands"),
    ([], ["ls\n"], "unexpected commands"),
    (["ls\n"], ["\n"], "different commands"),
    (["ls\n", "pwd\n"], ["ls", "pwd\n"], "different commands"),
    (["ls\n", "pwd\n"], ["pwd\n", "ls\n"], "different commands"),
    (["ls\n"], ["ls\n", "pwd\n"], "different commands"),
    (["ls\n"], ["ls\n"] * 20, "different commands"),
    (["ls -la /tmp\n"], ["rm -rf /tmp x\n"], "destructive command"),
    (["cat f\n"], ["cat f > g\n"], "destructive command"),
    (["cat f\n"], ["X=$(rm g); cat f\n"], "destructive command"),
    (["ls\n"], ["sudo timeout 5 rm -r x\n"], "destructive command"),
    (["ls\n"], ["bash -c 'git reset --hard'\n"], "destructive command"),
    (["ls\n"], ["find . -name a -delete\n"], "destructive command"),
    (["rm a\n"], ["rm b\n"], "different commands"),
    (["cd /app && rm -rf x\n"], ["cd /app\n", "rm -rf x\n"], "different commands"),
    (["test -f x && make\n"], ["test -f x\n", "make\n"], "different commands"),
    (["make && ./app\n"], ["make\n", "./app\n"], "different commands"),
    (["C-c"], ["C-d"], "different commands"),
    (["C-c"], ["C-c\n"], "different commands"),
    (["y\n"], ["n\n"], "different commands"),
    (["y\n"], ["y"], "command not executed"),
    (["q"], ["q\n"], "different commands"),
    (["vim a\n", "ls -la\n"], ["vim a\n", "ls -al\n"], "different commands"),
    (["python3\n", "print(1)\n"], ["python3\n", "print( 1)\n"], "different commands"),
    (["python3\nprint(1)\n"], ["python3\nprint( 1)\n"], "different commands"),
    (["echo 'open\n"], ["echo  'open\n"], "different commands"),
    (["ls ~/src\n"], ["ls '$HOME/src'\n"], "different commands"),
    (["ls ~x\n"], ["ls ${HOME}x\n"], "different commands"),
    (["awk '{print \"a;b\"}' f\n"], ["awk '{print \"a; b\"}' f\n"], "different commands"),
    (["npm install a\n"], ["npm install b\n"], "different commands"),
]


@pytest.mark.parametrize(("expert", "action", "reason"), DIFFERENT)
def test_different_commands(expert: list[str], action: list[str], reason: str) -> None:
    verdict = _judge(_turn(*expert), _turn(*action))
    assert (verdict.kind, verdict.reward, verdict.reason) == (VerdictKind.OK, 0, reason)
    assert _judge(_first_turn(*expert), _first_turn(*action)).reason == reason


def test_completion_is_punished_both_ways() -> None:
    assert _judge(_turn("ls\n"), _turn("ls\n", complete=True)).reason == "premature completion"
    assert _judge(_turn("ls\n", complete=True), _turn("ls\n")).reason == "missing completion"
    assert _judge(_turn(complete=True), _turn(complete=True)).reward == 1
    assert _judge(_turn("ls\n", complete=False), _turn("ls\n")).reward == 1, "an absent flag is false"
    assert _judge(_first_turn("ls\n"), _first_turn("ls\n", complete=True)).reason == "premature completion"
    assert _judge(_turn(), _turn(complete=True)).reason == "premature completion"


def test_words_and_waiting_do_not_count() -> None:
    assert _judge(_turn("ls\n"), _turn("ls\n", duration=60, plan="something else")).reward == 1
    assert _judge(_turn("ls\n"), _turn("ls\n", "")).reward == 1
    assert _judge(_turn(""), _turn()).reward == 1, "both only wait"
    assert _judge(_first_turn("ls\n"), _first_turn("ls\n", is_blocking=False)).reward == 1


def test_the_recipe_decides_about_chains_and_the_order_of_reads() -> None:
    chain = (_turn("cd /app && make\n"), _turn("cd /app\n", "make\n"))
    assert (_judge(*chain).reward, _judge(*chain, chains="strict").reward) == (1, 0)
    reads = (_turn("ls\n", "cat a\n", "make\n"), _turn("cat a\n", "ls\n", "make\n"))
    assert (_judge(*reads).reward, _judge(*reads, read_order="any").reward) == (0, 1)
    across = (_turn("ls\n", "cd x\n", "cat a\n"), _turn("cat a\n", "cd x\n", "ls\n"))
    assert _judge(*across, read_order="any").reward == 0, "a change of directory keeps its place"
    writes = (_turn("make\n", "ls\n"), _turn("ls\n", "make\n"))
    assert _judge(*writes, read_order="any").reward == 0


SCHEMA_FAULTS = [
    {"analysis": "a", "plan": "p"},
    {"analysis": "a", "commands": []},
    {"analysis": "a", "plan": "p", "commands": {}},
    {"analysis": "a", "plan": "p", "commands": ["ls\n"]},
    {"analysis": "a", "plan": "p", "commands": [{"duration": 1}]},
    {"analysis": "a", "plan": "p", "commands": [{"keystrokes": ["ls"]}]},
    {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\n", "duration": "1"}]},
    {"analysis": "a", "plan": "p", "commands": [], "task_complete": "true"},
    {"analysis": 1, "plan": "p", "commands": []},
    {"state_analysis": "a", "explanation": "p", "commands": [], "is_task_complete": True},
    {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\n"}] * 300},
]


@pytest.mark.parametrize("arguments", SCHEMA_FAULTS)
def test_the_harness_schema_is_kept(arguments: object) -> None:
    verdict = _verifier().verify(STATE, _turn("ls\n"), _call(arguments))
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, "wrong schema")


def test_what_is_no_turn_is_invalid_or_zero() -> None:
    judge = _verifier().verify
    assert judge(STATE, _turn("ls\n"), _call('{"analysis": ')).reason == "malformed"
    assert judge(STATE, _turn("ls\n"), _call("[1]")).kind is VerdictKind.INVALID
    assert judge(STATE, _turn("ls\n"), Action("I would list the files.", (), None, ParseOutcome.ABSENT)).reason == "spoke instead of calling"
    assert judge(STATE, _turn("ls\n"), Action("{", (), None, ParseOutcome.MALFORMED)).kind is VerdictKind.INVALID
    assert judge(STATE, _turn("ls\n"), _first_turn("ls\n")).reason == "wrong tool"
    twice = Action("", _turn("ls\n").tool_calls * 2, None, ParseOutcome.PARSED)
    assert judge(STATE, _turn("ls\n"), twice).reason == "surplus call"
    assert judge(STATE, _call("[1]"), _turn("ls\n")).reward == 0


HOSTILE = ["\0", "{\U000b0488", "\u2028ls\n", "x" * 100_000, ">" * 4_000 + "\n", "'\n" * 100, "cat <<E\n" * 50, "C-" * 20_000, "\\\n" * 4_000]


@pytest.mark.parametrize("text", HOSTILE, ids=[repr(text[:8]) for text in HOSTILE])
def test_hostile_keystrokes_get_a_verdict(text: str) -> None:
    assert _judge(_turn("ls\n"), _turn(text)).reward == 0
    assert _judge(_turn(text, "pwd\n"), _turn(text, "ls\n")).reward == 0
    assert _judge(_turn(*[text] * 20), _turn("ls\n")).reward == 0


def test_lone_surrogates_are_no_json() -> None:
    assert _verifier().verify(STATE, _turn("ls\n"), _turn("\ud800\n")).kind is VerdictKind.INVALID
