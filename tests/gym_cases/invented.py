"""Invented rows that exercise every branch of three public graders: knobs, expected action, response. Deterministic; no grader is needed here.

`grade.py` turns them into graded.jsonl with the graders' own verdicts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

type Case = dict[str, Any]
type Item = dict[str, Any]

EQUAL_LENGTH = 100


def message(*texts: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}


def refusal(text: str) -> Item:
    return {**message(), "content": [{"type": "refusal", "refusal": text}]}


def reasoning(text: str) -> Item:
    return {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}]}


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def call(name: str, arguments: Any) -> Item:
    return {"type": "function_call", "name": name, "arguments": written(arguments)}


def output_call(name: str, arguments: Any, number: int = 0) -> Item:
    return {**call(name, arguments), "call_id": f"c{number}"}


def batch(*calls: Item) -> Item:
    return {"type": "function_call_batch", "calls": list(calls)}


def single(expected: Item, output: list[Item], **knobs: Any) -> Case:
    return {
        "grader": "single_step",
        "knobs": {"word_count_similarity_threshold": 0.1, **knobs},
        "row": {"expected_action": expected},
        "output": output,
    }


def arguments(expected: Any, found: Any, **knobs: Any) -> Case:
    return single(call("f", expected), [output_call("f", found)], **knobs)


def swe(expected: Item, output: list[Item], **knobs: Any) -> Case:
    return {"grader": "swe_pivot", "knobs": knobs, "row": {"expected_action": expected}, "output": output}


def terminus(expected: Any, reply: Any, harness: str = "terminus_2", threshold: float | None = None, **knobs: Any) -> Case:
    settings = {"enable_string_similarity": True, "string_similarity_threshold": 0.9, "enable_llm_judge": False, **knobs}
    row = {"expected_answer": written(expected), "metadata": {"harness": harness}}
    if threshold is not None:
        row["threshold"] = threshold
    output = reply if isinstance(reply, list) else [message(written(reply))]
    return {"grader": "terminus", "knobs": settings, "row": row, "output": output}


def all_cases() -> list[Case]:
    """Every case, in a stable order."""
    random_source = random.Random(20261129)
    cases = [*_speak_or_call(), *_argument_values(), *_several_calls()]
    cases += [_random_arguments(random_source) for _ in range(80)]
    cases += [*_swe_levels(), *_swe_targets(), *_swe_edits(), *_swe_malformed()]
    cases += [_random_swe(random_source) for _ in range(160)]
    cases += [*_terminus_text(), *_terminus_schema(), *_terminus_keystrokes()]
    cases += [_random_terminus(random_source) for _ in range(60)]
    return cases


def _speak_or_call() -> Iterator[Case]:
    expected, right, other = call("f", {"a": 1}), output_call("f", {"a": 1}), output_call("g", {"a": 1})
    speaks = {"type": "message", "content": "hi there you"}
    outputs: list[list[Item]] = [
        [], [reasoning("hm")], [message("x")], [message("")], [message()], [message("  ")], [message("hi there you")], [refusal("no")],
        [refusal("no"), message("x")], [message("x"), right], [right, message("x")], [right], [other], [reasoning("hm"), right],
        [reasoning("hm"), message("x")], [output_call("F", {"a": 1})], [output_call("f", '{"a": ')], [message("<think>hm</think>x")],
        [message("<think>never closed")], [message('{"name": "f", "arguments": {"a": 1}}')],
    ]  # fmt: skip
    for output in outputs:
        yield single(expected, output)
        yield single(speaks, output)


def _argument_values() -> Iterator[Case]:
    pairs: list[tuple[Any, Any]] = [
        ("{}", "{}"), ("{}", {"a": 1}), ({"a": 1}, "{}"), ({"a": 1}, ""), ("[1]", "[1]"), ("[1]", "[2]"), ('"a b c"', '"a b c"'), ("null", "null"),
        ("null", "{}"), ("3", "3"), ({"a": 1}, '{"a":1, "a":1}'), ({"a": 1}, '{"a":2, "a":1}'), ({"a": 1}, "{'a': 1}"), ({"a": 1}, '{"a": 1} x'),
        ({"a": 1}, {"a": 1.0}), ({"a": 1.0}, {"a": 1}), ({"a": True}, {"a": 1}), ({"a": 1}, {"a": True}), ({"a": 0}, {"a": False}),
        ({"a": False}, {"a": 0}), ({"a": True}, {"a": False}), ({"a": None}, {"a": None}), ({"a": None}, {}), ({}, {"a": None}),
        ({"a": None}, {"a": 0}),
        ({"a": None}, {"a": ""}), ({"a": ""}, {"a": None}), ("{\"a\": NaN}", "{\"a\": NaN}"), ('{"a": Infinity}', '{"a": Infinity}'),
        ({"a": 1.0}, {"a": 1.0000005}), ({"a": 0.0}, {"a": 1e-6}), ({"a": 0.0}, {"a": 9.9e-7}), ({"a": 10**30}, {"a": 10**30}),
        ({"a": 10**30}, {"a": 10**30 + 1}), ({"a": "1"}, {"a": 1}), ({"a": 1}, {"a": "1"}), ({"a": "x"}, {"a": "x"}), ({"a": "x"}, {"a": "y"}),
        ({"a": "X"}, {"a": "x"}), ({"a": "x"}, {"a": "x y"}), ({"a": "x y"}, {"a": "x"}), ({"a": "x"}, {"a": " x "}), ({"a": ""}, {"a": ""}),
        ({"a": ""}, {"a": "x y"}), ({"a": "  "}, {"a": " "}), ({"a": "a b"}, {"a": "c d"}), ({"a": "Hello World"}, {"a": "hello world"}),
        ({"a": "STRASSE x"}, {"a": "stra\u00dfe x"}), ({"a": "\u0130x y"}, {"a": "i\u0307x y"}), ({"a": "caf\u00e9 x"}, {"a": "cafe\u0301 x"}),
        ({"a": "a\u00a0b"}, {"a": "a b"}), ({"a": "a\u2028b"}, {"a": "a b"}), ({"a": "a\u200bb"}, {"a": "a b"}), ({"a": "a\tb"}, {"a": "a b"}),
        ({"a": "a\u001cb"}, {"a": "a b"}), ({"a": [1, 2]}, {"a": [2, 1]}), ({"a": [1]}, {"a": [1, 2]}), ({"a": []}, {"a": []}),
        ({"a": []}, {"a": {}}),
        ({"a": {}}, {"a": {}}), ({"a": {"b": [{"c": "x"}]}}, {"a": {"b": [{"c": "x"}]}}), ({"a": {"b": [{"c": "x"}]}}, {"a": {"b": [{"c": "y"}]}}),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}), ({"a": 1, "b": [1]}, {"b": [], "a": "x"}), ({"b": [1], "a": 1}, {"a": "x", "b": []}),
        ({"a": "03106"}, {"a": 3106}), ({"a": "2024-01-02"}, {"a": "2024-1-2"}), ({"a": "/a/b"}, {"a": "/a/./b"}),
        ({"a": "{\"x\": 1}"}, {"a": "{\"x\":1}"}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'), ({"a": "\U0001f600 x"}, {"a": "\U0001f600 x"}), ({"a": "hello, world"}, {"a": "hello world"}),
        ({"a": "rm -rf /tmp x"}, {"a": "ls -la /tmp"}), ({"a": "one two three four five six seven eight nine ten"}, {"a": "one x x x x x x x x"}),
    ]  # fmt: skip
    for expected, found in pairs:
        for threshold in (0.0, 0.1, 0.5):
            if threshold == 0.1 or "a" in written(expected):
                yield arguments(expected, found, word_count_similarity_threshold=threshold)
    for threshold in (0.3, 1 / 3, 0.34, 0.5, 0.5000001, 0.51, 1.0):
        yield arguments({"a": "one two three"}, {"a": "one two three"}, word_count_similarity_threshold=threshold)
        yield arguments({"a": "three two one"}, {"a": "one two three"}, word_count_similarity_threshold=threshold)
        yield arguments({"a": "a a b"}, {"a": "a b b"}, word_count_similarity_threshold=threshold)
        yield arguments({"a": "x"}, {"a": "x"}, word_count_similarity_threshold=threshold)
    for threshold, difference in ((0.5, 0.4), (0.5, 0.5), (0.5, 0.6), (0.0, 0.0)):
        yield arguments({"a": 1.0}, {"a": 1.0 + difference}, floating_point_comparison_threshold=threshold)


def _several_calls() -> Iterator[Case]:
    a, b, c, d, broken = (call("f", {"x": 1}), call("f", {"x": 2}), call("g", {"x": 3}), call("g", {"x": 4}), call("f", "{"))
    # One string that is similar to both expected ones, so that a greedy pairing would miss the maximum.
    both, first, second = (call("f", {"t": text}) for text in ("p q r s", "p q x y", "r s z w"))
    shapes: list[tuple[Item, list[Item]]] = [
        (a, [a]), (a, [a, b]), (a, [b, a]), (a, [b, c]), (a, [a, a]), (a, [broken, a]), (a, [a, broken]), (a, [c, d, a]),
        (batch(a), [a]), (batch(a), [a, b]), (batch(a), [b]), (batch(a, b), [a, b]), (batch(a, b), [b, a]), (batch(a, b), [a]), (batch(a, b), [b]),
        (batch(a, b), [c]), (batch(a, b), [a, b, c]), (batch(a, b), [a, c]), (batch(a, b), [c, d]), (batch(a, b), [a, c, d]), (batch(a, b), [a, a]),
        (batch(a, a), [a]), (batch(a, a), [a, a]), (batch(a, b), [broken, a]), (batch(a, b, c), [c, a]), (batch(a, b, c), [d]),
        (batch(a, b, c), [a, b, d]), (batch(a, b, c), [a, b, c, d, d]), (batch(first, second), [both, first]), (batch(first, both), [both, second]),
    ]  # fmt: skip
    counts = {"parallel_tool_call_rewarding": True}
    settings: list[dict[str, Any]] = [{}, {"allow_superset": True}, {"allow_subset": True, "parallel_tool_call_reward_mode": "f1"}]
    settings += [
        {**counts, "allow_subset": subset, "allow_superset": superset, "parallel_tool_call_reward_mode": mode}
        for mode in ("binary_strict", "fractional", "f1")
        for subset in (False, True)
        for superset in (False, True)
    ]
    for number, (expected, found) in enumerate(shapes):
        output = [output_call(one["name"], one["arguments"], place) for place, one in enumerate(found)]
        # All settings for some shapes, a rotating choice for the others.
        for knobs in settings if number % 3 == 0 else (settings[0], settings[3 + number % 12], settings[3 + (number + 5) % 12]):
            yield single(expected, output, **knobs)
    yield single(batch(a, b), [message("x")])
    yield single(batch(a, b), [], parallel_tool_call_rewarding=True, allow_subset=True)
    yield single({"type": "message", "content": "x"}, [output_call("f", "{}"), output_call("g", "{}", 1)], parallel_tool_call_rewarding=True)


_WORDS = ["alpha", "beta", "Gamma", "delta", "7", "x-1"]


def _random_value(source: random.Random, depth: int) -> Any:
    kind = source.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return " ".join(source.choices(_WORDS, k=source.randint(0, 5)))
    if kind < 7:
        return source.choice([0, 1, 2, 0.0, 1.0, 1.5, True, False, None])
    if kind == 7:
        return [_random_value(source, depth + 1) for _ in range(source.randint(0, 3))]
    return {key: _random_value(source, depth + 1) for key in source.sample("abc", source.randint(0, 3))}


def _mutated(source: random.Random, value: Any) -> Any:
    if source.random() < 0.15:
        return _random_value(source, 2)
    if isinstance(value, dict):
        return {key: _mutated(source, member) for key, member in value.items() if source.random() < 0.95}
    if isinstance(value, list):
        return [_mutated(source, member) for member in value]
    if isinstance(value, str):
        words = value.split()
        source.shuffle(words)
        return " ".join(words + source.choices(_WORDS, k=source.choice([0, 0, 1, 3])))
    return value


def _random_arguments(source: random.Random) -> Case:
    expected = {key: _random_value(source, 1) for key in source.sample("abcd", source.randint(1, 4))}
    return arguments(expected, _mutated(source, expected), word_count_similarity_threshold=source.choice([0.0, 0.1, 0.3, 0.5]))


_LEVELS: tuple[dict[str, Any], ...] = (
    {}, {"enable_target_match": False, "enable_argument_similarity": False}, {"enable_target_match": False}, {"enable_argument_similarity": False},
    {"reward_mode": "continuous"}, {"reward_mode": "continuous", "enable_diff_size_shaping": False},
    {"reward_mode": "continuous", "enable_argument_similarity": False, "diff_size_alpha": 0.5},
)  # fmt: skip


def _swe_levels() -> Iterator[Case]:
    expected, right = call("execute_bash", {"command": "ls -la /a/b"}), output_call("execute_bash", {"command": "ls -la /a/b"})
    for output in ([right], [], [message("x")], [right, output_call("read", {})], [output_call("read", {}), right], [message("x"), right],
                       [message("")],
                   [message('{"name": "execute_bash", "arguments": {"command": "ls -la /a/b"}}')], [reasoning("hm"), right]):  # fmt: skip
        yield swe(expected, output)
    for name in ("Bash", "BASH", "shell_cmd", "read", "python", "execute-bash", "finish"):
        yield swe(expected, [output_call(name, {"command": "ls -la /a/b"})])
    for ours, theirs in (("browse", "browse"), ("browse", "Browse"), ("browse", "open"), ("think", "Think"), ("finish", "submit"), ("view", "read"),
                         ("todo_read", "updatePlan"), ("StrReplaceEditor", "apply_patch"), ("grep", "ls"), ("read", "grep")):  # fmt: skip
        yield swe(call(ours, {"path": "a/b"}), [output_call(theirs, {"path": "a/b"})])
    for knobs in _LEVELS:
        for command in ("ls -la /a/b | x", "ls -la /a/b | grep foo bar", "ls /a/b" + " zzzz" * 7, "cat /q/r"):
            yield swe(expected, [output_call("bash", {"command": command})], **knobs)
    written_text = call("edit", {"path": "a", "content": "x" * EQUAL_LENGTH})
    for same in (100, 90, 80, 60, 40, 39):
        text = "x" * same + "y" * (EQUAL_LENGTH - same)
        for knobs in (
            *_LEVELS[4:6],
            {},
            {"reward_mode": "continuous", "similarity_threshold": 0.5, "similarity_full_credit": 0.6, "diff_size_alpha": 1.0},
        ):
            yield swe(written_text, [output_call("edit", {"path": "a", "content": text})], **knobs)
    for size in (250, 500, 600):
        text = {"path": "a", "content": "x" * size}
        yield swe(call("edit", text), [output_call("edit", text)], reward_mode="continuous", diff_size_alpha=0.3)


def _swe_targets() -> Iterator[Case]:
    off = {"enable_argument_similarity": False}
    files = [("b.py", "b.py"), ("/b.py", "b.py"), ("b.py", "/a/b.py"), ("a/b.py", "/x/a/b.py"), ("x/a/b.py", "/q/a/b.py"), ("a/b.py/", "a/b.py"),
             ("./a/b.py", "a/b.py"), ("A/b.py", "a/b.py"), ("/w/p/q/f.py", "/z/p/q/f.py"), ("q/f.py", "/z/p/q/f.py"), (" a/b.py", "a/b.py"),
             ("", "a"),
             ("/", "a"), ("a//b", "b")]  # fmt: skip
    for ours, theirs in files:
        for tool in ("edit", "read", "grep", "think"):
            yield swe(call(tool, {"path": ours}), [output_call(tool, {"path": theirs})], **off)
    for key in ("file", "file_path", "filename", "file_name", "filepath", "target_file"):
        yield swe(call("edit", {"path": "a/b"}), [output_call("edit", {key: "a/c"})], **off)
    for ours, theirs in (("view", "create"), ("view", None), (None, "view"), ("view", "view")):
        expected, found = ({"path": "a/b", **({"command": command} if command else {})} for command in (ours, theirs))
        yield swe(call("edit", expected), [output_call("edit", found)], **off)
    ranges: list[tuple[Any, Any]] = [
        ([1, 50], [1, 50]), ([1, 50], [10, 50]), ([1, 50], [11, 60]), ([10, 20], [1, 100]), ([1, 100], [10, 20]), ([1, -1], [1, -1]), ([5, 10],
        [5, -1]),
        ([3, 3], [3, 3]), ([3, 4], [3, 4]), ("[1, 10]", [1, 10]), ("[1, 10]", "[20, 30]"), (["1", "10"], [20, 30]), ([1.7, 10.2], [1, 10]),
        (None, [1, 2]),
        ("x", [1, 2]), ([1], [1, 2]), ([1, "end"], [5, 9]), ([True, 9], [1, 9]), ({"a": 1}, [1, 2]), (7, [1, 2]), ([None, 5], [1, 2]), ([50, 1],
        [50, 1]),
    ]  # fmt: skip
    for ours, theirs in ranges:
        for command in ("view", "create"):
            expected, found = ({"command": command, "path": "a/b", "view_range": value} for value in (ours, theirs))
            yield swe(call("edit", expected), [output_call("edit", found)], **off)
    commands = [
        ("ls", "ls"), ("ls", "pwd"), ("ls a/b", "ls c/b"), ("ls a/b", "ls"), ("grep -r 'foo' src/models/", "grep -r 'foo' src/views/"),
        ("rm x", "rm zzzzzzzzzzzzzz"),
        ("grep foo a/b c/d", "grep foo c/d"), ("cd /w/x && pytest t/a.py", "cd /w/x && pytest t/b.py"), ("cd /w/x && ls", "cd /w/x && rm -rf /w/x"),
        ("cat /a/b/c/d.py", "cat /z/b/c/d.py"), ("cat /a/b/c/d.py", "cat /z/y/c/d.py"), ("cat ./a", "cat ../a"), ("/usr/bin/python a", "python a"),
        ("X=1 python a", "python a"), ("sed -n 1,5p /a/b", "sed -i s/x/y/ /a/b"), ("", "ls"), ("ls", ""), ("git diff", "git status"),
        ("cat /a", "cat /b"),
        ("x --f=a/b", "x --f=a/c"), ('x "a/b"', "x 'a/b'"), ("cat `a/b`", "cat `a/c`"), ("x >a/b", "x >a/c"),
        ("wget http://x.y/z", "wget http://x.y/w"),
        ("git log", "git commit -am 'x y z w v u t s r q p o n m'"), ("ls ~/a/b", "ls ~/a/c"), ("cat a/b/../c", "cat a/c"), (" ls", "ls "),
        ("(ls a/b)", "(ls a/b)"),
    ]  # fmt: skip
    for ours, theirs in commands:
        yield swe(call("bash", {"command": ours}), [output_call("bash", {"command": theirs})], **off)
        yield swe(call("bash", {"command": ours}), [output_call("shell", {"cmd": theirs})])


def _swe_edits() -> Iterator[Case]:
    edits: list[tuple[Any, Any]] = [
        ({"old_str": "abc", "new_str": "abd"}, {"old_str": "abc", "new_str": "abd"}),
        ({"old_str": "abc", "new_str": "abd"}, {"old_str": "abc", "new_str": "xyz"}),
        ({"old_str": "abc", "new_str": "abd"}, {"old_str": "xyz", "new_str": "abd"}), ({"new_str": "x"}, {"new_str": "x"}),
        ({"new_str": "x"}, {"file_text": "x"}),
        ({"old_str": "", "new_str": "x"}, {"old_str": "a", "new_str": "x"}), ({"old_str": "a", "new_str": ""}, {"old_str": "a", "new_str": ""}),
        ({"old_str": "", "new_str": ""}, {"old_str": "", "new_str": "", "content": "z"}), ({"old_str": "a"}, {"old_str": "b"}),
        ({"patch": "abc"}, {"diff": "abd"}),
        ({"content": "x"}, {"file_text": "x"}), ({"content": " x\n"}, {"content": "x"}), ({"patch": "abc", "content": "d"}, {"content": "d"}),
        ({}, {"content": "x"}),
        ({"content": "x"}, {}), ({}, {}), ({"content": ""}, {"content": ""}), ({"old_str": 5, "new_str": None}, {"old_str": "5", "new_str": "None"}),
        ({"content": ["a"]}, {"content": "['a']"}), ({"old_string": "a", "new_string": "b"}, {"old_string": "c", "new_string": "d"}),
        ({"content": "x" * 2100}, {"content": "x" * 2000 + "y" * 100}), ({"patch": "x" * 2000}, {"patch": "x" * 1900 + "y" * 200}),
        ({"content": ("abcdefghij" * 30) + "zz"}, {"content": ("bacdefghij" * 30) + "yy"}),
        ({"content": "return self.x\n" * 20}, {"content": "y" + "return self.x\n" * 20}),
    ]  # fmt: skip
    for expected, found in edits:
        for knobs in ({}, {"reward_mode": "continuous"}):
            yield swe(call("edit", {"path": "f", **expected}), [output_call("write", {"path": "f", **found})], **knobs)


def _swe_malformed() -> Iterator[Case]:
    for ours in ("{}", '{"command": "view", "path": "a/b"}', "null", "[1]", '["path"]', '"path"', "5", "true", '{"comm', ""):
        for theirs in ("{}", '{"path": "a/c"}', "null", "[]", '["path", "command"]', '"command"', "7", '{"comm', ""):
            for tool, knobs in (("edit", {}), ("bash", {}), ("read", {"enable_argument_similarity": False}), ("think", {})):
                # A quarter of the square is enough.
                if (len(ours) + 2 * len(theirs) + len(tool)) % 4 == 0:
                    yield swe(call(tool, ours), [output_call(tool, theirs)], **knobs)


def _random_swe(source: random.Random) -> Case:
    def path() -> str:
        names = source.choices(["a", "b.py", "src", "..", "foo_bar", "\u00e9"], k=source.randint(1, 4))
        return source.choice(["", "/", "./", "../"]) + "/".join(names) + source.choice(["", "", "/"])

    def command() -> str:
        words = ["ls", "cat", "grep", "cd", "-la", "'foo'", "&&", "|", "python", "x=", "("]
        return " ".join(source.choice(words) if source.random() < 0.7 else path() for _ in range(source.randint(1, 7)))

    def text() -> str:
        return "".join(source.choices(["foo ", "bar", "\n", "return 1", "  "], k=source.choice([0, 1, 3, 8, 60])))

    def lines() -> Any:
        return source.choice([None, [1, 20], [2, 21], [1, 18], [30, 40], "[1, 20]", [1, -1], "x"])

    makers = {"path": path, "command": lambda: source.choice(["view", "create", command(), command()]),
    "cmd": command, "old_str": text, "new_str": text,
              "patch": text, "content": text, "file_text": text, "view_range": lines}  # fmt: skip
    expected = {key: make() for key, make in makers.items() if source.random() < 0.4}
    found = {key: makers[key]() if source.random() < 0.25 else value for key, value in expected.items() if source.random() < 0.9}
    tool = source.choice(["edit", "edit", "bash", "bash", "read", "grep"])
    return swe(call(tool, expected), [output_call(tool, found)], **source.choice(_LEVELS))


def reply_2(*commands: Any, complete: bool | None = None, **members: Any) -> dict[str, Any]:
    given = [{"keystrokes": one, "duration": 1.0} if isinstance(one, str) else one for one in commands]
    flag = {} if complete is None else {"task_complete": complete}
    return {"analysis": "a", "plan": "p", "commands": given, **flag, **members}


def reply_1(*commands: Any, complete: bool = False, **members: Any) -> dict[str, Any]:
    given = [{"keystrokes": one, "is_blocking": True, "timeout_sec": 1} if isinstance(one, str) else one for one in commands]
    return {"state_analysis": "a", "explanation": "p", "commands": given, "is_task_complete": complete, **members}


_LIST = reply_2("ls\n")


def _terminus_text() -> Iterator[Case]:
    text = written(_LIST)
    for reply in (
        text, f"```json\n{text}\n```", f"I list: {text}", f"{text} done", f"<think>x</think>{text}", f"x</think>{text}",
        f"<think>x</think>y</think>\n\n{text}",
        f"<think>{text}", f"<THINK>x</THINK>{text}", f"<thinking>x</thinking>{text}", "", "[1]", "null", '{"analysis":', f"  \n{text}\n ",
        f"\u00a0{text}",
        f"\ufeff{text}", f"{text}{text}", text[:-1], "{" * 50, '{"analysis": "a\nb", "plan": "p", "commands": [{"keystrokes": "ls\\n"}]}',
    ):  # fmt: skip
        yield terminus(_LIST, reply)
    closing = reply_2("echo '</think>'\n")
    yield terminus(closing, closing)
    yield terminus(_LIST, closing)
    half = '{"analysis": "a", "plan": "p",'
    rest = '"commands": [{"keystrokes": "ls\\n"}]}'
    for output in (
        [], [reasoning("hm"), message(text)], [message("first"), message(text)], [message(text), message("later")], [message(half, rest)],
        [message(half), message(rest)], [message(text[:20], text[20:])], [message(""), message(text)], [message("<think>q</think>"), message(text)],
        [message(text), message(" ")], [message(text), message()], [refusal("no")], [output_call("f", "{}")], [message(text), output_call("f", "{}")],
    ):  # fmt: skip
        yield terminus(_LIST, output)
    for expected in ('{"a', "", "[1]", "{}", f" {text}\n", f"<think>x</think>{text}", f"```json\n{text}\n```", {**_LIST, "z": 1}, {"commands": []}):
        yield terminus(expected, _LIST)
        yield terminus(expected, "not JSON")


def _terminus_schema() -> Iterator[Case]:
    one = {"keystrokes": "ls\n"}
    for command in (one, {**one, "duration": "1"}, {**one, "duration": 1}, {**one, "duration": None}, {**one, "duration": True}, {**one,
                       "duration": -5},
                    {**one, "is_blocking": True}, {"keystrokes": 1}, {"keystrokes": None}, {}, {"duration": 1.0}, ["ls"],
                    {**one, "timeout_sec": 3}):  # fmt: skip
        yield terminus(_LIST, reply_2(command))
        yield terminus(reply_2(command), _LIST)
    for members in ({"analysis": None}, {"plan": 3}, {"task_complete": "true"}, {"task_complete": None}, {"task_complete": 1}, {"commands": {}},
                    {"commands": None}, {"commands": "ls"}, {"extra": 1}, {"is_task_complete": True}):  # fmt: skip
        yield terminus(_LIST, {**_LIST, **members})
    for missing in ("analysis", "plan", "commands"):
        yield terminus(_LIST, {key: value for key, value in _LIST.items() if key != missing})
    yield terminus(_LIST, '{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n", "duration": NaN}]}')
    yield terminus(_LIST, '{"analysis": "a", "plan": "p", "commands": [], "commands": [{"keystrokes": "ls\\n"}]}')
    old = reply_1("ls\n")
    blocking = {"keystrokes": "ls\n", "is_blocking": False, "timeout_sec": 3}
    for command in (blocking, {**blocking, "duration": 1}, {**blocking, "timeout_sec": True}, {**blocking, "is_blocking": 1}, {**blocking,
                       "timeout_sec": None},
                    {"keystrokes": "ls\n", "timeout_sec": 1}, {"keystrokes": "ls\n", "is_blocking": True}, one, {**blocking,
                    "timeout_sec": 0.5}):  # fmt: skip
        yield terminus(old, reply_1(command), "terminus_1")
    for missing in old:
        yield terminus(old, {key: value for key, value in old.items() if key != missing}, "terminus_1")
    yield terminus(old, old, "terminus_1")
    yield terminus(old, _LIST, "terminus_1")
    yield terminus(old, _LIST, "terminus_2")
    yield terminus(_LIST, old, "terminus_1")
    yield terminus(_LIST, old, "terminus_2")
    yield terminus(old, {**old, "task_complete": True}, "terminus_1")


def _terminus_keystrokes() -> Iterator[Case]:
    flags = [(None, None), (True, None), (None, True), (True, True), (True, False), (False, None), (False, True)]
    for ours, theirs in flags:
        yield terminus(reply_2("ls\n", complete=ours), reply_2("ls\n", complete=theirs))
        yield terminus(reply_1("ls\n", complete=bool(ours)), reply_1("ls\n", complete=bool(theirs)), "terminus_1")
    commit, near, far = (reply_2(f"git commit -m 'abc {text}'\n") for text in ("def ghi", "def ghj", "dxx gxj"))
    for threshold in (None, 0.0, 0.5, 0.9, 0.97, 1.0):
        for reply in (commit, near, far, reply_2("zzz")):
            yield terminus(commit, reply, threshold=threshold)
    for knobs in ({"enable_string_similarity": False}, {"string_similarity_threshold": 0.98}, {"string_similarity_threshold": 0.85}):
        for reply in (commit, near, far):
            yield terminus(commit, reply, **knobs)
    for ours, theirs in ((["ls\n", "pwd\n"], ["ls\npwd\n"]), (["l", "s"], ["ls"]), (["aaaa\n", "bbbb\n"], ["bbbb\n", "aaaa\n"]), ([], []), ([],
                       ["ls"]),
                         (["ls"], []), ([""], []), (["rm -rf a\n"], ["rm -rf b\n"]), (["C-c"], ["C-d"]), (["\u00e9\n"], ["e\u0301\n"])):  # fmt: skip
        yield terminus(reply_2(*ours), reply_2(*theirs))
    long = "print(self.value)\n" * 15
    for reply in (long, "x" + long, long[1:], long + "y", long.replace("value", "valeu", 1)):
        yield terminus(reply_2(long), reply_2(reply))
        yield terminus(reply_2(reply), reply_2(long))
    for ours, theirs in (
        (commit, commit),
        (commit, near),
        (commit, far),
        (reply_2("ls\n", complete=True), reply_2("ls\n")),
        (commit, "x"),
        (commit, {}),
    ):
        for similar in (True, False):
            yield terminus(ours, theirs, enable_llm_judge=True, enable_string_similarity=similar)


def _random_terminus(source: random.Random) -> Case:
    words = ["ls", "cat", "a.py", "-n", "|", "grep", "foo", "\n", "echo", "'x'"]
    commands = [" ".join(source.choices(words, k=source.choice([1, 3, 8, 60]))) for _ in range(source.randint(1, 3))]
    others = ["".join(letter for letter in one if source.random() > 0.05) if source.random() < 0.6 else one for one in commands]
    complete = source.choice([None, True, False])
    return terminus(reply_2(*commands, complete=complete), reply_2(*others, complete=complete), threshold=source.choice([None, 0.5, 0.8]))
