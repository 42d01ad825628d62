"""What the terminal verifier takes from the conversation: where the shell stands and which names are directories; unknown stays unknown."""

from __future__ import annotations

import json
import posixpath
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.config.verifiers import TerminalVerifierConfig
from pivotrl.types import Action, Message, ParseOutcome, Role, State, ToolCall, ToolOrigin
from pivotrl.verifiers.terminal import TerminalVerifier
from pivotrl.verifiers.terminal_place import NOWHERE, Place, place_of

VERIFIER = TerminalVerifier(TerminalVerifierConfig(type="terminal"))
type Turn = tuple[Sequence[str], str]


def does(*entries: str) -> Action:
    commands = [{"keystrokes": f"{entry}\n"} for entry in entries]
    arguments = json.dumps({"analysis": "", "plan": "", "commands": commands})
    return Action("", (ToolCall("terminus2", arguments),), None, ParseOutcome.PARSED)


def state(first: str, *turns: Turn) -> State:
    messages = [Message(Role.USER, first)]
    for entries, screen in turns:
        messages += [does(*entries).as_message(), Message(Role.USER, screen)]
    return State(tuple(messages), (), ToolOrigin.NONE)


def accepts(before: State, one: str | Sequence[str], other: str | Sequence[str]) -> bool:
    expert, action = (does(*([entries] if isinstance(entries, str) else entries)) for entries in (one, other))
    accepted = VERIFIER.verify(before, expert, action).reward == 1
    assert (VERIFIER.verify(before, action, expert).reward == 1) is accepted, "both sides are treated alike"
    assert VERIFIER.verify(before, action, action).reward == 1
    return accepted


PROMPTS = [
    ("root@0a1b2c:/app#", Place("/app")),
    ("New Terminal Output:\nroot@0a1b:/app/data# ls\nx\nroot@0a1b:/app/data#\n\n\n", Place("/app/data")),
    ("(venv) user@my-host.local:/srv/app$ ", Place("/srv/app")),
    ("12.5root@0a1b:/app#", Place("/app")),
    ("/app # ", Place("/app")),
    ("/ #", Place("/")),
    ("[root@host /var/log]# ", Place("/var/log")),
    ("[root@host log]# ", Place(name="log")),
    ("w$", Place(name="w")),
    ("user@host:~$", NOWHERE),
    ("user@host:~/src$", NOWHERE),
    ("$ ", NOWHERE),
    (">>>", NOWHERE),
    ("root@0a1b:/app# python3", NOWHERE),
    ("root@0a1b:/app# echo a@b:/c#", NOWHERE),
    ("Installing collected packages: pandas", NOWHERE),
    ("", NOWHERE),
]


@pytest.mark.parametrize(("screen", "place"), PROMPTS)
def test_the_prompt_shows_the_directory(screen: str, place: Place) -> None:
    assert place_of(state(screen).messages) == place


def test_nothing_is_known_without_an_observation() -> None:
    assert place_of(()) == NOWHERE
    assert place_of((Message(Role.USER, "root@a:/app#"), does("ls").as_message())) == NOWHERE


FOLLOWED = [
    (((["cd /w/a"], "a$"),), "/w/a"),
    (((["cd /w/a && cat n"], "x\na$"),), "/w/a"),
    (((["cd /w/a"], "a$"), (["ls"], "n\na$")), "/w/a"),
    (((["cd /w/a"], "a$"), (["cd ../b"], "b$")), "/w/b"),
    (((["pwd"], "/home/w\nw$"),), "/home/w"),
    # Failed, or perhaps so: nothing is assumed.
    (((["cd /w/a"], "cd: no such directory\nw$"),), None),
    (((["cd /q/w"], "w$"),), None),
    (((["cd /w/a"], "a$"), (["cd /v/a"], "cd: no such directory\na$")), None),
    (((["cd /w; cd a"], "a$"),), None),
    (((["cd a"], "a$"),), None),
    (((["cd /w/a || cd /v/a"], "a$"),), None),
    (((["cd /w/a"], "a$"), (["source x.sh"], "a$")), None),
    (((["cd /w/a"], "a$"), (["vim n"], "~")), None),
    (((["cd /w/a"], "a$"), (["ssh host"], "a$")), None),
]


@pytest.mark.parametrize(("turns", "directory"), FOLLOWED)
def test_changes_of_directory_are_followed_while_the_prompt_bears_them_out(turns: tuple[Turn, ...], directory: str | None) -> None:
    assert place_of(state("w$", *turns).messages).directory == directory


AT_APP = state("root@0a1b:/app#")
SAME = [
    ("cat src/a.py", "cat /app/src/a.py"),
    ("rm -rf build", "rm -r -f /app/build/"),
    ("cd /app && make test", "make test"),
    ("cd /app && rm x", "rm ./x"),
    (["cd /app", "ls"], "ls"),
    ("cd src && cat a", "cd /app/src && cat /app/src/a"),
    ("echo x >> log", "echo x >> /app/log"),
    ("ls", "ls /app"),
    ("sudo cat a", "sudo cat /app/a"),
    ("git -C sub add x", "git -C /app/sub add ./x"),
]
DIFFERENT = [
    ("cat src/a.py", "cat /src/a.py"),
    ("cat a", "cat /app/src/a"),
    ("rm -rf build", "rm -rf /build"),
    ("rm x", "cat /app/x"),
    ("cat x", "cat /app/x && rm x"),
    ("cat x", "echo a > /app/x"),
    ("cat ../x", "cat /x"),
    ("cd src && make", "make"),
    ("cd /app || make", "make"),
    (["cd /app", "cd -"], "cd -"),
    ("cd /app", ""),
    ("echo src/a", "echo /app/src/a"),
    ("docker exec c cat a", "docker exec c cat /app/a"),
    ("git -C sub add x", "git -C sub add /app/x"),
    ("tar -C sub -czf /o.tgz x", "tar -C sub -czf /o.tgz /app/x"),
    ("sudo -i cat a", "sudo -i cat /app/a"),
    ("grep src/a f", "grep /app/src/a f"),
    ("find . -path './a/*'", "find /app -path './a/*'"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_paths_are_compared_where_the_shell_stands(one: str | list[str], other: str | list[str]) -> None:
    assert accepts(AT_APP, one, other)
    assert not accepts(state("root@0a1b:/app# python3"), one, other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_paths_and_other_effects_stay_different(one: str | list[str], other: str | list[str]) -> None:
    assert not accepts(AT_APP, one, other)


def test_a_last_name_stands_for_the_only_path_that_is_written_with_it() -> None:
    assert accepts(state("w$"), "cat a/n", "cat /w/a/n")
    assert not accepts(state("w$"), "cat a/n", "cat /v/a/n")
    assert not accepts(state("w$"), "cat w/n", "cat /v/w/n /w/n")
    assert not accepts(state("Look at /home/w/notes.\nw$"), "cat a/n", "cat /w/a/n")
    assert accepts(state("Look at /home/w/notes.\nw$"), "cat a/n", "cat /home/w/a/n")
    # What destroys is read by the conversation alone.
    assert not accepts(state("w$"), "rm -r a", "rm -r /w/a")
    assert accepts(state("Look at /w/notes.\nw$"), "rm -r a", "rm -r /w/a")


SLASHES = [
    ((["cat d/n"], "x\n"), True),
    ((["ls -l"], "drwxr-xr-x 2 root root 4096 Oct 22 21:53 d\n"), True),
    ((["mkdir d"], ""), True),
    ((["cat d/n"], "cat: d/n: No such file or directory\n"), False),
    ((["cat d/n"], "bash: cat: command not found\n"), False),
    ((["ls -l"], "-rw-r--r-- 1 root root 4096 Oct 22 21:53 d\n"), False),
    ((["ls"], "d\n"), False),
    ((["cat d"], "x\n"), False),
    ((["cat d/n", "rm -r d"], "x\n"), False),
    ((["cat d/n", "./clean.sh"], "x\n"), False),
]


@pytest.mark.parametrize(("turn", "is_known"), SLASHES)
@pytest.mark.parametrize("prompt", ["root@0a1b:/app#", "w$"])
def test_a_slash_behind_the_target_counts_unless_a_directory_is_proven(turn: Turn, is_known: bool, prompt: str) -> None:
    before = state(prompt, (turn[0], f"{turn[1]}{prompt}"))
    assert accepts(before, "mv d keep/", "mv d keep") is is_known
    assert accepts(before, "cp -r x d/", "cp -r x d") is is_known
    assert not accepts(before, "mv x keep/", "mv x keep")
    assert not accepts(before, "rm -r d; mv d keep/", "rm -r d; mv d keep")
    assert not accepts(before, "mv -T d keep/", "mv -T d keep")


def test_what_was_removed_is_no_longer_known() -> None:
    prompt = "root@0a1b:/app#"
    turns = [(["cat d/e/n"], f"x\n{prompt}"), (["rm -r d/e"], prompt)]
    assert place_of(state(prompt, *turns).messages).directories == {"/app", "/app/d"}
    assert place_of(state(prompt, *turns, (["python3 x.py"], prompt)).messages).directories == frozenset()


def test_the_parent_of_a_directory_that_is_no_link_is_where_its_path_says() -> None:
    turns = [(["find . -name r1"], "./c/r1\nw$"), (["cd /w/c && cat r1/n"], "x\nc$")]
    assert accepts(state("w$", *turns), "mv r1 ../keep", "mv /w/c/r1 /w/keep")
    assert not accepts(state("w$", *turns), "cat r1/../x", "cat /w/c/x")
    assert not accepts(state("w$", turns[1]), "mv r1 ../keep", "mv /w/c/r1 /w/keep")


@pytest.mark.parametrize("target", ["true", "mkdir keep", "echo f > keep", "mkdir q; ln -s q keep", "ln -s z keep", "echo q > q; ln -s q keep"])
@pytest.mark.parametrize("command", ["mv", "cp -r"])
def test_the_rule_for_slashes_is_that_of_the_programs(tmp_path: Path, target: str, command: str) -> None:
    """The real ``mv`` and ``cp`` do the same to a directory with and without the slash, whatever the target is."""
    outcomes: list[tuple[int, str]] = []
    for slash in ("", "/"):
        place = tmp_path / f"at{len(slash)}"
        place.mkdir()
        script = f"mkdir d; echo x > d/n; {target}; {command} d keep{slash} 2> /dev/null; echo $? > rc; find . -printf '%p %y %l\\n' | sort"
        outcomes.append((int(subprocess.run(["bash", "-c", script], cwd=place, check=True, capture_output=True).returncode), _tree(place)))
    assert outcomes[0] == outcomes[1]


def _tree(place: Path) -> str:
    found = subprocess.run(["find", ".", "-printf", "%p %y %l\n"], cwd=place, check=True, capture_output=True, text=True).stdout
    return "\n".join([*sorted(found.splitlines()), (place / "rc").read_text()])


NAMES = st.sampled_from(["a", "b", "w", "."])
RELATIVE = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
PATHS = RELATIVE | RELATIVE.map(lambda path: f"/{path}")


@given(
    directory=st.lists(st.sampled_from(["a", "b", "w"]), min_size=1, max_size=2).map(lambda names: "/" + "/".join(names)),
    paths=st.tuples(PATHS, PATHS),
    command=st.sampled_from(["cat", "rm -r", "touch", "chmod 700", "cat x >", "cd x && cat"]),
    move=st.sampled_from(["", "cd . && ", "cd {directory} && "]),
)
def test_only_paths_that_resolve_to_the_same_are_equal(directory: str, paths: tuple[str, str], command: str, move: str) -> None:
    one, other = paths
    start = posixpath.join(directory, "x") if command.startswith("cd") else directory
    is_same = posixpath.normpath(posixpath.join(start, one)) == posixpath.normpath(posixpath.join(start, other))
    assert accepts(state(f"root@0a1b:{directory}#"), f"{command} {one}", move.format(directory=directory) + f"{command} {other}") is is_same


@given(
    texts=st.lists(st.sampled_from(["cat a", "cat /w/a", "rm a", "rm /w/a", "mv a b/", "mv /w/a /w/b", "cd /w && ls", "ls"]), min_size=2, max_size=2),
    turns=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["cd a", "cd /w", "cat a/n", "rm -r a", "ls -l"]), min_size=1, max_size=2),
            st.sampled_from(["w$", "a$", "x\nw$", "cd: no such file\nw$", "root@h:/w#", "> "]),
        ),
        max_size=4,
    ),
)
def test_no_conversation_makes_what_destroys_equal_to_what_does_not(texts: list[str], turns: list[Turn]) -> None:
    is_accepted = accepts(state("w$", *turns), texts[0], texts[1])
    programs = [text.removeprefix("cd /w && ").split()[0] for text in texts]
    assert not is_accepted or programs[0] == programs[1]
