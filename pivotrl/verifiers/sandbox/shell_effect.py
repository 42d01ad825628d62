"""Shell effect: two commands are the same if they do the same to copies of one directory.

It executes what a model wrote, so it is off unless a recipe names it, and runs in the sandbox or not at all. What it cannot see it does not
judge: an expert whose command fails, does nothing visible, or does something else each time gives an abstention. Time bound of a verdict:
two runs of the sandbox, `2 x (limits.deadline_s + 20 s)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pivotrl.config.shell_effect import ShellEffectVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, Verdict
from pivotrl.verifiers.protocol import Case
from pivotrl.verifiers.sandbox.runner import Effect, Fixture, Sandbox, SandboxRefused, is_runnable

# Expert effects kept: the same for all samples of a state. Dropped all at once beyond this many.
_MAX_KEPT = 4096

type Run = Effect | SandboxRefused


class ShellEffectVerifier:
    """Binary reward by comparing effects.

    Reasons: ``malformed``, ``no action``, ``not a command`` (invalid); ``same effect`` (reward 1); ``spoke instead of calling``,
    ``other files``, ``other output``, ``other exit status``, ``ran past its deadline``, ``wrote too much output`` (reward 0); ``not a shell
    call``, ``expert fails here``, ``expert has no effect here`` (abstention); ``sandbox refused`` (infra).

    Args:
        fixture: directory that every command starts in; read once.

    Raises:
        UserError: where the machine permits no sandbox, or the fixture does not fit.
    """

    def __init__(self, config: ShellEffectVerifierConfig, fixture: Path) -> None:
        self._config = config
        self._fixture = Fixture.load(fixture, config.limits)
        self._sandbox = Sandbox(config.limits)
        self._expert_runs: dict[str, Effect] = {}
        self._untouched = self._sandbox.run([config.shell, "-c", ":"], self._fixture)

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return self.verify_many([Case(state, expert, action)])[0]

    def verify_many(self, cases: Sequence[Case]) -> list[Verdict]:
        """`max_concurrency` commands at once, equal ones run once. The expert's is run apart from an equal candidate's: an effect that differs
        from itself is rejected, which quarantines the row."""
        pairs = [self._commands(case) for case in cases]
        experts = {pair[0]: None for pair in pairs if not isinstance(pair, Verdict)}
        actions = {pair[1]: None for pair in pairs if not isinstance(pair, Verdict)}
        with ThreadPoolExecutor(self._config.max_concurrency) as pool:
            expert_runs = dict(zip(experts, pool.map(self._run_expert, experts), strict=True))
            action_runs = dict(zip(actions, pool.map(self._run, actions), strict=True))
        return [pair if isinstance(pair, Verdict) else self._compare(expert_runs[pair[0]], action_runs[pair[1]]) for pair in pairs]

    def _commands(self, case: Case) -> tuple[str, str] | Verdict:
        """The expert's and the model's shell text, or the verdict that needs no run."""
        if case.action.parse is ParseOutcome.MALFORMED:
            return Verdict.invalid("malformed")
        if not case.action.tool_calls:
            if not case.action.content.strip():
                return Verdict.invalid("no action")
            return Verdict.ok(0.0, "spoke instead of calling") if case.expert.tool_calls else _NOT_SHELL
        expert, action = self._script(case.expert), self._script(case.action)
        if expert is None or action is None:
            return _NOT_SHELL
        return (expert, action) if is_runnable(expert) and is_runnable(action) else Verdict.invalid("not a command")

    def _script(self, action: Action) -> str | None:
        """The commands of all calls, one after the other; None where one of them is no shell call."""
        commands = [(call.arguments_object() or {}).get(self._config.argument) for call in action.tool_calls if call.name in self._config.tools]
        is_shell = bool(commands) and len(commands) == len(action.tool_calls)
        return "\n".join(map(str, commands)) if is_shell and all(isinstance(command, str) for command in commands) else None

    def _run(self, script: str) -> Run:
        try:
            return self._sandbox.run([self._config.shell, "-c", script], self._fixture)
        except SandboxRefused as error:
            return error

    def _run_expert(self, script: str) -> Run:
        if script not in self._expert_runs:
            found = self._run(script)
            if isinstance(found, SandboxRefused):
                return found
            if len(self._expert_runs) >= _MAX_KEPT:
                self._expert_runs.clear()
            self._expert_runs[script] = found
        return self._expert_runs[script]

    def _compare(self, expert: Run, action: Run) -> Verdict:
        for run in (expert, action):
            if isinstance(run, SandboxRefused):
                return Verdict.infra("sandbox refused", problem=str(run))
            if run.ended == "killed":
                return Verdict.infra("sandbox refused", problem="killed from outside")
        assert isinstance(expert, Effect)
        assert isinstance(action, Effect)
        if expert.ended != "exit" or expert.exit_status != 0:
            return Verdict.abstain("expert fails here", exit_status=expert.exit_status, stderr=expert.stderr[-200:].decode(errors="replace"))
        if not expert.stdout and expert.files == self._untouched.files:
            return Verdict.abstain("expert has no effect here")
        if action.ended != "exit":
            return Verdict.ok(0.0, "ran past its deadline" if action.ended == "deadline" else "wrote too much output")
        compared = {
            "files": ("other files", expert.files == action.files),
            "stdout": ("other output", expert.stdout == action.stdout),
            "exit_status": ("other exit status", expert.exit_status == action.exit_status),
        }
        reason = next((compared[name][0] for name in self._config.compare if not compared[name][1]), None)
        return Verdict.ok(1.0, "same effect") if reason is None else Verdict.ok(0.0, reason)


_NOT_SHELL = Verdict.abstain("not a shell call")
