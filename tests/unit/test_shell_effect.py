"""Shell effect: commands that do the same to a directory are the same, and what cannot be seen is not judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.shell_effect import ShellEffectVerifierConfig
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.errors import UserError
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin, Verdict, VerdictKind
from pivotrl.verifiers.protocol import Case
from pivotrl.verifiers.sandbox import runner
from pivotrl.verifiers.sandbox.shell_effect import ShellEffectVerifier

STATE = State((), (), ToolOrigin.NONE)
SECTION = {"type": "shell_effect", "executes_model_output": True, "fixture": "{recipe}/desk", "tools": ("bash",)}


def does(*commands: str, tool: str = "bash") -> Action:
    return Action("", tuple(ToolCall(tool, json.dumps({"command": command})) for command in commands), None, ParseOutcome.PARSED)


def says(text: str) -> Action:
    return Action(text, (), None, ParseOutcome.ABSENT)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("desk")
    (directory / "src").mkdir()
    (directory / "src" / "a.py").write_text("import os\nprint('a')\n")
    (directory / "src" / "b.py").write_text("print('b')\n")
    (directory / "notes.txt").write_text("b\na\n")
    return directory


@pytest.fixture(scope="module")
def build(fixture: Path) -> Callable[..., ShellEffectVerifier]:
    def make(**changes: object) -> ShellEffectVerifier:
        limits = {"deadline_s": 2.0, "cpu_s": 1, **changes.pop("limits", {})}  # type: ignore[dict-item]
        config = ShellEffectVerifierConfig.model_validate({**SECTION, "limits": limits, **changes})
        try:
            return ShellEffectVerifier(config, fixture)
        except UserError as error:
            pytest.skip(str(error))

    return make


@pytest.fixture(scope="module")
def verifier(build: Callable[..., ShellEffectVerifier]) -> ShellEffectVerifier:
    return build()


SAME = [
    ("grep -rn import src", "cd src && cd .. && grep -n import -r src"),
    ("sort notes.txt > sorted", "cat notes.txt | sort > sorted"),
    ("sed -i s/a/x/ notes.txt", 'while read -r line; do echo "${line/a/x}"; done < notes.txt > t; mv t notes.txt'),
    ("rm -r src", "find src -depth -delete"),
    ("chmod u+x src/a.py", "chmod 755 src/a.py"),
]
DIFFERENT = [
    ("cat notes.txt", "cat src/b.py", "other output"),
    ("rm src/a.py", "rm src/b.py", "other files"),
    ("rm src/a.py", "rm -rf src", "other files"),
    ("chmod u+x src/a.py", "chmod u+x src/b.py", "other files"),
    ("cat notes.txt", "cat notes.txt; false", "other exit status"),
    ("cat notes.txt", "cat notes.txt; rm notes.txt", "other files"),
    ("cat notes.txt", "cat notes.txt; sleep 60", "ran past its deadline"),
    ("cat notes.txt", "cat notes.txt; yes", "wrote too much output"),
    ("cat notes.txt", "if then", "other output"),
]


def test_the_same_effect_is_accepted_both_ways(verifier: ShellEffectVerifier) -> None:
    cases = [Case(STATE, does(one), does(other)) for pair in SAME for one, other in (pair, pair[::-1])]
    assert verifier.verify_many(cases) == [Verdict.ok(1.0, "same effect")] * len(cases)


def test_another_effect_is_not(verifier: ShellEffectVerifier) -> None:
    verdicts = verifier.verify_many([Case(STATE, does(expert), does(action)) for expert, action, _ in DIFFERENT])
    assert [(verdict.kind, verdict.reward, verdict.reason) for verdict in verdicts] == [(VerdictKind.OK, 0.0, reason) for *_, reason in DIFFERENT]


@pytest.mark.parametrize(
    ("expert", "reason"),
    [
        ("no_such_program", "expert fails here"),
        ("cat missing.txt; exit 1", "expert fails here"),
        ("sleep 60", "expert fails here"),
        ("cd src", "expert has no effect here"),
        ("touch notes.txt", "expert has no effect here"),
    ],
)
def test_what_shows_nothing_is_not_judged(verifier: ShellEffectVerifier, expert: str, reason: str) -> None:
    """Two commands that both fail, or both change nothing, are not the same for it."""
    for action in (does(expert), does("no_such_program either")):
        verdict = verifier.verify(STATE, does(expert), action)
        assert (verdict.kind, verdict.reason) == (VerdictKind.ABSTAIN, reason)


def test_an_effect_that_differs_from_itself_rejects_the_expert(verifier: ShellEffectVerifier) -> None:
    action = does("head -c 16 /dev/urandom | od -An -tx1")
    assert verifier.verify(STATE, action, action) == Verdict.ok(0.0, "other output")


def test_several_calls_are_one_script(verifier: ShellEffectVerifier) -> None:
    assert verifier.verify(STATE, does("cd src", "rm a.py"), does("rm src/a.py")).reward == 1
    assert verifier.verify(STATE, does("rm src/a.py", "rm src/b.py"), does("rm src/a.py")).reason == "other files"


@pytest.mark.parametrize(
    ("expert", "action", "kind", "reason"),
    [
        (does("ls"), Action("<tool_call>", (), None, ParseOutcome.MALFORMED), VerdictKind.INVALID, "malformed"),
        (does("ls"), says(""), VerdictKind.INVALID, "no action"),
        (does("ls"), says("I listed them."), VerdictKind.OK, "spoke instead of calling"),
        (says("Done."), says("Done!"), VerdictKind.ABSTAIN, "not a shell call"),
        (does("ls"), does("ls", tool="edit"), VerdictKind.ABSTAIN, "not a shell call"),
        (does("ls"), does("l\0s"), VerdictKind.INVALID, "not a command"),
        (does("ls"), does("ls # " + "x" * 140_000), VerdictKind.INVALID, "not a command"),
        (does("ls"), Action("", (ToolCall("bash", '{"command": ["ls"]}'),), None, ParseOutcome.PARSED), VerdictKind.ABSTAIN, "not a shell call"),
        (does("ls"), Action("", (ToolCall("bash", "[" * 100_000),), None, ParseOutcome.PARSED), VerdictKind.ABSTAIN, "not a shell call"),
    ],
)
def test_what_is_no_command_runs_nothing(
    verifier: ShellEffectVerifier, monkeypatch: pytest.MonkeyPatch, expert: Action, action: Action, kind: VerdictKind, reason: str
) -> None:
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: pytest.fail("something was run"))
    verdict = verifier.verify(STATE, expert, action)
    assert (verdict.kind, verdict.reward, verdict.reason) == (kind, 0.0, reason)


def test_what_is_compared_is_the_recipes_choice(build: Callable[..., ShellEffectVerifier]) -> None:
    files_only = build(compare=("files",))
    assert files_only.verify(STATE, does("rm src/a.py"), does("rm -v src/a.py; false")).reward == 1
    assert files_only.verify(STATE, does("rm src/a.py"), does("rm -v src/b.py")).reward == 0


def test_a_lost_sandbox_is_infra(verifier: ShellEffectVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside.py").write_text("raise SystemExit(9)")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_INSIDE", tmp_path / "inside.py")
        verdict = verifier.verify(STATE, does("cat src/a.py"), does("cat src/a.py # again"))
        assert (verdict.kind, verdict.reward, verdict.reason) == (VerdictKind.INFRA, 0.0, "sandbox refused")
    assert verifier.verify(STATE, does("cat src/a.py"), does("cat src/a.py # again")).reward == 1


def test_a_recipe_must_say_that_it_executes_and_a_row_that_is_not_judged_gets_no_reward(fixture: Path, build: Callable[..., object]) -> None:
    build()
    with pytest.raises(ValidationError, match="executes_model_output"):
        ShellEffectVerifierConfig.model_validate({key: value for key, value in SECTION.items() if key != "executes_model_output"})
    config = TypeAdapter(VerifierConfig).validate_python(SECTION)
    cascade = build_verifier(config, expand=lambda path: Path(path.replace("{recipe}/desk", str(fixture))))
    assert cascade.verify(STATE, does("cat notes.txt"), does("cat < notes.txt")).reward == 1
    assert cascade.verify(STATE, does("false"), does("false")) == Verdict.ok(0.0, "undecided", stages=["expert fails here"])
