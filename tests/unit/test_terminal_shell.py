"""The tiny shell against what a shell does, by hand, and against any line at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.worlds.terminal_shell import Shell


def shell() -> Shell:
    made = Shell(cwd="/w")
    for path in ("/w", "/w/a", "/w/a/r1", "/w/keep"):
        made.make_dir(path)
    made.files["/w/a/r1/note"], made.modes["/w/a/r1/note"] = "draft\n", "644"
    return made


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("ls", "a keep"),
        ("ls -1 .", "a\nkeep"),
        ("ls -la a/r1", "644 note"),
        ("cat a/r1/note", "draft"),
        ("cat < a/r1/note", "draft"),
        ("cat 'a'/r1/\"note\"", "draft"),
        ("cat a/../a//r1/./note # look", "draft"),
        ("cd a && cat r1/note", "draft"),
        ("cd a; pwd; cd ..; pwd", "/w/a\n/w"),
        ("cd x && pwd", "no x"),
        ("cd x; pwd", "no x\n/w"),
        ("find . -name r1", "./a/r1"),
        ("find -name note", "./a/r1/note"),
        ("find /w -type d -name r1", "/w/a/r1"),
        ("find a", "a\na/r1\na/r1/note"),
        ("echo '>>' \"a b\" c\\ d", ">> a b c d"),
        ("cat a", "cat: is a directory"),
        ("cp a/r1 keep", "cp: is a directory"),
        ("rm a", "rm: is a directory"),
        ("rm -rf /", "rm: refused"),
        ("mv a a/r1", "mv: cannot do that"),
        ("cat x", "no x"),
        ("sudo ls", "sudo: not found"),
        ("ls | cat", "syntax error"),
        ("echo $HOME", "syntax error"),
        ("echo 'x", "syntax error"),
        ("ls &&", "syntax error"),
        ("; ls", "syntax error"),
        ("echo a >", "syntax error"),
        ("", ""),
    ],
)
def test_what_it_prints(line: str, printed: str) -> None:
    assert shell().run(line) == printed


@pytest.mark.parametrize(
    ("line", "paths"),
    [
        ("mv a/r1 keep", ["/w", "/w/a", "/w/keep", "/w/keep/r1", "/w/keep/r1/note"]),
        ("mv a b", ["/w", "/w/b", "/w/b/r1", "/w/b/r1/note", "/w/keep"]),
        ("cp -R a/r1 keep", ["/w", "/w/a", "/w/a/r1", "/w/a/r1/note", "/w/keep", "/w/keep/r1", "/w/keep/r1/note"]),
        ("rm --recursive -f a x", ["/w", "/w/keep"]),
        ("mkdir -p keep new && rm -r a", ["/w", "/w/keep", "/w/new"]),
        ("> log", ["/w", "/w/a", "/w/a/r1", "/w/a/r1/note", "/w/keep", "/w/log"]),
    ],
)
def test_what_it_leaves(line: str, paths: list[str]) -> None:
    made = shell()
    made.run(line)
    assert list(made.tree()) == paths
    assert set(made.files) == {path for path in paths if path.endswith(("note", "log"))}


def test_modes_and_redirections() -> None:
    made = shell()
    made.run("chmod -R 0700 a; echo 1 > x; echo 2 >> x; >> x echo 3; cat x > y")
    assert {made.modes[path] for path in ("/w/a", "/w/a/r1", "/w/a/r1/note")} == {"700"}
    assert made.files["/w/x"] == made.files["/w/y"] == "1\n2\n3\n"


LINES = st.lists(
    st.sampled_from(
        ["ls", "cat", "rm", "-rf", "mv", "cp", "-r", "a", "/", ".", "..", "a/r1", "x", ">", ">>", "<", "&&", ";", "cd", "echo", "'", "\u00e9"]
    ),
    max_size=12,
).map(" ".join)


@settings(max_examples=300)
@given(st.lists(st.text() | LINES, max_size=6))
def test_any_line_leaves_a_file_system(lines: list[str]) -> None:
    made = shell()
    for line in lines:
        assert len(made.run(line)) <= 120
    assert set(made.files) <= set(made.modes)
    assert all(path.rpartition("/")[0] in {"", *made.modes} for path in made.modes)
    assert made.cwd == "/" or made.is_dir(made.cwd)


def test_hostile_lines_stay_small() -> None:
    made = shell()
    for _ in range(30):
        made.run("cp -r . x; cp -r a keep; mv keep a; mkdir keep; cat a/r1/note a/r1/note >> a/r1/note; " * 10)
    assert len(made.modes) <= 60
    assert sum(map(len, made.files.values())) <= 60 * 400
