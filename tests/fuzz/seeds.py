"""Inputs to start from: the labelled pairs under their domain's verifiers, and completions with the faults that broke other systems."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fuzz.targets import LABELLED, VERIFIERS, encode_case, encode_text
from pivotrl.actions.registry import ACTION_FORMAT_NAMES

_CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/a"}}\n</tool_call>'
COMPLETIONS = (
    _CALL,
    f"<think>{_CALL}</think> Hello.",
    f"Thinking.</think>{_CALL}",
    f"Prose\n{_CALL}\nmore prose\n{_CALL}",
    _CALL.replace("}}", '}}{"path": "/a"}'),
    _CALL.replace('{"path": "/a"}', '"{\\"path\\": \\"/a}\\"}"'),
    '<tool_call>{"name": "read_file", "arguments": null}</tool_call>',
    "<tool_call><function=read_file><parameter=path>\n/a\n</parameter></function></tool_call>",
    '{"analysis": "a {", "plan": "b }", "commands": [{"keystrokes": "ls\\n", "duration": 1.0}], "task_complete": false}',
    'Text\n```json   \n{"analysis": "", "plan": "", "commands": []}\n```  \n',
    "```bash   \nls -la\n```  ",
    "a\u2028b",
    "",
)


def completion_seeds() -> Iterator[bytes]:
    """Every completion for every parser."""
    for name in ACTION_FORMAT_NAMES:
        for text in COMPLETIONS:
            yield encode_text(name, text)


def pair_seeds() -> Iterator[bytes]:
    """Every labelled pair for every verifier."""
    for path in sorted(LABELLED.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            pair = json.loads(line)
            for name in VERIFIERS:
                yield encode_case(name, pair["state"], pair["expert"], pair["action"])
