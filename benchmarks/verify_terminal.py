"""Prints verdicts per second and p99 of the terminal verifier, one core, beside two comparisons that read no shell.

Every action is new to the verifier (an own file name), so no cache answers for the parser; the expert's side is cached as in a run. CPU time.
Run: ``python benchmarks/verify_terminal.py``.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable

from pivotrl.config.verifiers import TerminalVerifierConfig
from pivotrl.types import Action, ParseOutcome, State, ToolCall, ToolOrigin
from pivotrl.verifiers.terminal import TerminalVerifier

_NUM_VERDICTS = 4_000
_TEMPLATES = (
    "ls -la /app/data_{i}\n",
    "cd /app && grep -rn 'def total' src_{i} --include='*.py' | head -20\n",
    "python3 -m pytest tests/test_{i}.py -x -q 2>&1 | tail -30\n",
    "sed -n '{i},40p' src/models.py\n",
    "cat > run_{i}.py << 'EOF'\nimport os\n\nfor name in os.listdir('.'):\n    print(name)\nEOF\n",
    "pip install -q numpy pandas_{i}\n",
    "find . -type f -name '*_{i}.log' -mtime +7\n",
    'export PATH="$PATH:/opt/bin_{i}" && make -j4 test\n',
)


def _turn(keystrokes: str) -> Action:
    arguments = {"analysis": "The tests fail.", "plan": "Look closer.", "commands": [{"keystrokes": keystrokes, "duration": 1.0}]}
    return Action("", (ToolCall("terminus2", json.dumps(arguments)),), None, ParseOutcome.PARSED)


def _times_s(judge: Callable[[Action, Action], object], expert: Action, actions: list[Action]) -> list[float]:
    times_s: list[float] = []
    for action in actions:
        started_s = time.thread_time()
        judge(expert, action)
        times_s.append(time.thread_time() - started_s)
    return times_s


def _keystrokes(action: Action) -> str:
    arguments = action.tool_calls[0].arguments_object() or {}
    return "".join(command["keystrokes"] for command in arguments["commands"])


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def main() -> None:
    state, verifier = State((), (), ToolOrigin.NONE), TerminalVerifier(TerminalVerifierConfig(type="terminal"))
    judges: dict[str, Callable[[Action, Action], object]] = {
        "syntax trees": lambda expert, action: verifier.verify(state, expert, action),
        "shlex words": lambda expert, action: _words(_keystrokes(expert)) == _words(_keystrokes(action)),
        "plain text": lambda expert, action: _keystrokes(expert) == _keystrokes(action),
    }
    expert = _turn("ls -al /app\n")
    actions = [_turn(_TEMPLATES[index % len(_TEMPLATES)].format(i=index)) for index in range(_NUM_VERDICTS)]
    rates: dict[str, float] = {}
    for name, judge in judges.items():
        times_s = sorted(_times_s(judge, expert, actions))
        rates[name] = len(times_s) / sum(times_s)
        median_us, p99_ms = times_s[len(times_s) // 2] * 1e6, times_s[len(times_s) * 99 // 100] * 1e3
        print(f"{name}: {rates[name]:,.0f} verdicts/s, p50 {median_us:.0f} us, p99 {p99_ms:.2f} ms")
    print(f"ratio to shlex {rates['syntax trees'] / rates['shlex words']:.2f}, to plain text {rates['syntax trees'] / rates['plain text']:.3f}")


if __name__ == "__main__":
    main()
