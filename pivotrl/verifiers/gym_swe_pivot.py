"""The verdicts of NeMo-Gym's `swe_pivot`, written from its observed behaviour (nemo-gym 0.4.0 and 0.7.0): category, target, similarity, edit size.

For comparing and migrating, not for training. Only the first call of the response is looked at; arguments that are not JSON count as empty, and empty
arguments pass every level; a command behind `cd x &&` has the verb `cd`; a file one directory up is another file while `a/b.py` is `z/a/b.py`.
docs/gym.md lists the holes and what closes each. Expected verdicts of both versions on invented rows are in tests/gym_cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pivotrl.config.gym_verifiers import GymSwePivotVerifierConfig, GymVersion
from pivotrl.types import Action, State, ToolCall, Verdict
from pivotrl.verifiers.gym_similarity import TooCostly, similarity
from pivotrl.verifiers.gym_single_step import is_unreadable

UNKNOWN = "unknown"

# Names in snake case; lower case and without underscores they are known too.
_TOOLS = {
    "edit": "str_replace_editor text_editor file_editor code_editor edit_file modify_file update_file file_edit edit modify apply_patch patch_file"
    " apply_diff apply_changes write write_file save_file create_file",
    "bash": "execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd run_shell_cmd exec_command exec_cmd",
    "search": "grep search_text find_pattern text_search glob find_files file_glob match_files grep_files search_files find_in_files code_search"
    " list_dir ls show_dir ls_dir list_directory",
    "read": "read read_file view_file cat_file view file_view inspect show_file read_file_content",
    "planning": "task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks update_tasks read_todos write_todos edit_plan"
    " modify_plan",
    "finish": "finish submit",
    "think": "think",
}
_CATEGORY = {spelling: category for category, names in _TOOLS.items() for name in names.split() for spelling in (name, name.replace("_", ""))}

_FILE_KEYS = ("path", "file", "file_path", "filename", "file_name")
_COMMAND_KEYS = ("command", "cmd")
_PATCH_KEYS = ("patch", "diff")
_CONTENT_KEYS = ("content", "file_text")

# A path in a shell command: absolute with one slash between names, relative with a leading dot, or two names with a slash; only behind a blank,
# an equals sign, a quote or an opening parenthesis.
_NAME = r"[\w.-]+"
_SHELL_PATH = re.compile(rf"""(?:^|[\s='"(])((?:/{_NAME})+|\.\.?/[\w./-]+|{_NAME}/[\w./-]+)""")
# A slash and one letter is no path.
_MIN_PATH_CHARS = 3

_MAX_SIMILARITY_CHARS = 2000
_MIN_COMMAND_SIMILARITY = 0.3
_MIN_RANGE_OVERLAP = 0.8
_FULL_SIZE_CHARS = 500
# Partial credit starts here.
_PARTIAL_REWARD = 0.5


class _Unreadable(ValueError):
    """Arguments that are JSON, but neither an object nor empty: the grader fails on them where it looks into them, and gives 0."""


class GymSwePivotVerifier:
    """Reasons: ``malformed``, ``no action``, ``too long to compare`` (invalid); ``same tool``, ``same target``, ``similar arguments`` (reward 1,
    or graded); ``spoke instead of calling``, ``wrong tool``, ``wrong target``, ``dissimilar arguments``, ``arguments are not an object``, ``expert
    speaks`` (reward 0). The detail holds ``similarity`` and ``size_penalty`` where they were computed.
    """

    def __init__(self, config: GymSwePivotVerifierConfig) -> None:
        self._config = config

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:  # noqa: ARG002 - the protocol's argument
        if is_unreadable(action):
            return Verdict.invalid("malformed")
        if not action.tool_calls and not action.content.strip():
            return Verdict.invalid("no action")
        if not expert.tool_calls:
            return Verdict.ok(0.0, "expert speaks")
        if not action.tool_calls:
            return Verdict.ok(0.0, "spoke instead of calling")
        expected, found = expert.tool_calls[0], action.tool_calls[0]
        category, expected_category = tool_category(found.name), tool_category(expected.name)
        if category != expected_category or (category == UNKNOWN and found.name.lower() != expected.name.lower()):
            return Verdict.ok(0.0, "wrong tool", action_tool=found.name)
        try:
            return self._verify_arguments(category, _arguments(expected), _arguments(found))
        except _Unreadable:
            return Verdict.ok(0.0, "arguments are not an object")
        except TooCostly:
            return Verdict.invalid("too long to compare")

    def _verify_arguments(self, category: str, expected: Any, found: Any) -> Verdict:
        config = self._config
        if config.enable_target_match and not _is_same_target(category, expected, found, config.version):
            return Verdict.ok(0.0, "wrong target")
        if not config.enable_argument_similarity:
            return self._shaped(1.0, "same target" if config.enable_target_match else "same tool", category, found)
        score = _argument_similarity(category, expected, found, config.version)
        if score >= config.similarity_full_credit:
            return self._shaped(1.0, "similar arguments", category, found, similarity=score)
        if config.reward_mode == "continuous" and score >= config.similarity_threshold:
            share = (score - config.similarity_threshold) / (config.similarity_full_credit - config.similarity_threshold)
            return self._shaped(_PARTIAL_REWARD + (1 - _PARTIAL_REWARD) * share, "similar arguments", category, found, similarity=score)
        return Verdict.ok(0.0, "dissimilar arguments", similarity=score)

    def _shaped(self, reward: float, reason: str, category: str, found: Any, **detail: float) -> Verdict:
        config = self._config
        if config.reward_mode == "binary" or not config.enable_diff_size_shaping or category != "edit":
            return Verdict.ok(reward, reason, **detail)
        size = min(len(_edit_text(found)) / _FULL_SIZE_CHARS, 1.0)
        penalty = config.diff_size_alpha * size
        return Verdict.ok(reward * (1 - penalty), reason, size_penalty=penalty, **detail)


def tool_category(name: str) -> str:
    """The public grader's category of a tool, `UNKNOWN` for names it does not know; case does not count.

    >>> tool_category("StrReplaceEditor"), tool_category("notebook_edit")
    ('edit', 'unknown')
    """
    return _CATEGORY.get(name.lower(), UNKNOWN)


def _arguments(call: ToolCall) -> Any:
    """The JSON value of the arguments; what is not JSON counts as no arguments."""
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}


def _is_same_target(category: str, expected: Any, found: Any, version: GymVersion) -> bool:
    match category:
        case "edit":
            return (
                _is_same_file(expected, found, 2)
                and _agree(_editor_command(expected), _editor_command(found), version)
                and _is_same_view(expected, found)
            )
        case "bash":
            commands = _text(expected, _COMMAND_KEYS), _text(found, _COMMAND_KEYS)
            return _is_same_command(*commands) if all(commands) else _agree(*commands, version)
        case "read" | "search":
            return _is_same_file(expected, found, 3)
        case _:
            return True


def _agree(expected: str, found: str, version: GymVersion) -> bool:
    """Equal, or in 0.4.0 one of them not given."""
    return expected == found or (version == "0.4.0" and not (expected and found))


def _is_same_file(expected: Any, found: Any, num_names: int) -> bool:
    """The last names of both paths are equal, or one of them is not given."""
    files = _text(expected, _FILE_KEYS), _text(found, _FILE_KEYS)
    return not all(files) or _last_names(files[0], num_names) == _last_names(files[1], num_names)


def _is_same_view(expected: Any, found: Any) -> bool:
    """For two views with a line range: the action's covers four fifths of the expert's. Ends are taken as they are, so -1 is no end of file."""
    if _editor_command(expected) != "view" or _editor_command(found) != "view":
        return True
    expected_range, found_range = _line_range(expected), _line_range(found)
    if expected_range is None or found_range is None:
        return True
    length = expected_range[1] - expected_range[0]
    overlap = min(expected_range[1], found_range[1]) - max(expected_range[0], found_range[0])
    return length > 0 and overlap / length >= _MIN_RANGE_OVERLAP


def _is_same_command(expected: str, found: str) -> bool:
    verbs = _verb(expected), _verb(found)
    if all(verbs) and verbs[0] != verbs[1]:
        return False
    expected_paths, found_paths = _shell_paths(expected), _shell_paths(found)
    if expected_paths and found_paths and expected_paths.isdisjoint(found_paths):
        return False
    return _capped_similarity(expected, found) >= _MIN_COMMAND_SIMILARITY


def _argument_similarity(category: str, expected: Any, found: Any, version: GymVersion) -> float:
    if category == "bash":
        expected_text, found_text = _text(expected, _COMMAND_KEYS), _text(found, _COMMAND_KEYS)
        if version == "0.4.0" and not (expected_text and found_text):
            return 1.0
        return _capped_similarity(expected_text, found_text)
    if category != "edit":
        return 1.0
    pairs = [(str(_member(expected, key, "")), str(_member(found, key, ""))) for key in ("old_str", "new_str")]
    if any(ours for ours, _ in pairs) and any(theirs for _, theirs in pairs):
        return min(_capped_similarity(ours, theirs) for ours, theirs in pairs)
    return _capped_similarity(_edit_text(expected), _edit_text(found))


def _capped_similarity(expected: str, found: str) -> float:
    return similarity(found[:_MAX_SIMILARITY_CHARS], expected[:_MAX_SIMILARITY_CHARS])


def _edit_text(arguments: Any) -> str:
    if _has(arguments, ("new_str",)):
        return f"{_member(arguments, 'old_str', '')}\n{_member(arguments, 'new_str', '')}"
    for key in (*_PATCH_KEYS, *_CONTENT_KEYS):
        if _has(arguments, (key,)):
            return str(_member(arguments, key, ""))
    return ""


def _text(arguments: Any, keys: Sequence[str]) -> str:
    """The first of `keys` that is there, as text without surrounding space, whatever its type; empty where none is."""
    for key in keys:
        if _has(arguments, (key,)):
            return str(_member(arguments, key, "")).strip()
    return ""


def _editor_command(arguments: Any) -> str:
    return str(_member(arguments, "command", ""))


def _has(arguments: Any, keys: Sequence[str]) -> bool:
    """Whether one of `keys` is in the arguments, which may be any JSON: an empty list has no member, null cannot be asked."""
    if not isinstance(arguments, dict | list | str):
        raise _Unreadable
    return any(key in arguments for key in keys)


def _member(arguments: Any, key: str, default: str) -> Any:
    if not isinstance(arguments, dict):
        raise _Unreadable
    return arguments.get(key, default)


def _line_range(arguments: Any) -> tuple[int, int] | None:
    value = _member(arguments, "view_range", "")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or len(value) != 2:
        return None
    try:
        start, end = (int(number) for number in value)
    except OverflowError as error:
        raise _Unreadable from error
    except (TypeError, ValueError):
        return None
    return start, end


def _last_names(path: str, count: int) -> str:
    return "/".join(path.strip("/").split("/")[-count:])


def _verb(command: str) -> str:
    """The first word without its directory; empty for one that ends in a slash."""
    return command.split()[0].rsplit("/", 1)[-1]


def _shell_paths(command: str) -> set[str]:
    return {_last_names(path, 3) for path in _SHELL_PATH.findall(command) if len(path) >= _MIN_PATH_CHARS}
