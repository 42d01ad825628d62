"""Where a terminal's shell stands and which names are directories, as far as the conversation shows it. Pure; nothing is executed.

Unknown stays unknown: a prompt that shows no path, a change of directory that may have failed, a program in front, and a command that may have
changed the disk each take away what they put in doubt. Called by `terminal`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pivotrl.types import Message, Role
from pivotrl.verifiers.keystrokes import Key, Stroke, Typed, statements_of, typed_into
from pivotrl.verifiers.shell_commands import Effect
from pivotrl.verifiers.shell_effects import commands, effect
from pivotrl.verifiers.shell_nodes import AndOr, Command, Node, Word
from pivotrl.verifiers.terminal_turns import read_turn

# Earlier messages are not read: what they prove has nearly always been put in doubt since.
_MAX_MESSAGES = 32
_MAX_PROMPT_CHARS = 512
# What stands before a prompt on its line is an environment's name, or output that ended without a line break.
_FULL_PROMPT = re.compile(r"(?:[^#$]*[\w.-]+@[\w.-]+:|(?:\([^()\s]+\) ?)?(?:[\w.-]+:)?|(?:\([^()\s]+\) ?)?\[[\w.-]+@[\w.-]+ )(/[^\s#$:\]]*)\]? ?[#$]")
_SHORT_PROMPT = re.compile(r"(?:\([^()\s]+\) ?)?(?:\[[\w.-]+@[\w.-]+ ([^\s#$:/~\[\]]+)\]|([^\s#$:/~@\[\]()]+)) ?[#$]")
_ECHO = re.compile(r"^(?:\(\S+\) ?)?(?:\[\S+ \S+\]|\S+) ?[#$] \S.*$", re.MULTILINE)
_COMPLAINTS = re.compile(
    r"error|no such|not found|cannot|can't|denied|not a |is a dir|missing|invalid|usage:|unrecogni|refused|too many|exist|limited|omitted|truncated",
    re.IGNORECASE,
)
_LISTED_DIRECTORY = re.compile(r"^d[-rwxsStT]{9}[.+@]?\s.*?\s([\w.+-]+)$", re.MULTILINE)
# These may leave the shell in another directory, or another shell in front.
_LEAVING = "pushd popd eval source exec bash sh zsh fish ssh su sudo docker podman kubectl chroot nsenter exit logout login tmux screen"
_LEAVES = frozenset(_LEAVING.split())
# These name files that must be there, write only into files, or make directories: no directory is gone after them.
_READS_FILES = frozenset(("cat", "head", "tail", "wc", "ls", "nl", "stat", "file", "du", "md5sum", "sha256sum"))
_KEEPS_DIRECTORIES = frozenset(("mkdir", "touch", "echo", "cat", "printf"))
# These take away no directory but their operands.
_CHANGES_OPERANDS = frozenset(("mv", "cp", "rm", "rmdir", "chmod"))
_PLAIN_LISTING = frozenset("laAhtrS1")


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of the shell in front of the next action."""

    directory: str | None = None
    """Absolute working directory."""
    name: str | None = None
    """Last name of the working directory, where the prompt shows no more and nothing else proves where that is."""
    mentioned: frozenset[str] = frozenset()
    """Absolute paths ending with `name` that the conversation writes."""
    directories: frozenset[str] = frozenset()
    """Paths of directories, absolute or from the working directory, in the form of `shell_arguments.normal_path`."""
    real: frozenset[str] = frozenset()
    """Those of them that are no links."""

    def directory_for(self, texts: Sequence[str], *, is_destructive: bool) -> str | None:
        """The working directory to read `texts` (both sides' keystrokes) in, or None.

        Where the prompt shows the last name only, it is the one absolute path with that end which conversation and texts write; two such paths
        leave it unknown. Where the texts alone write it, nothing that destroys is read by it.
        """
        if self.directory is not None or self.name is None or (is_destructive and not self.mentioned):
            return self.directory
        found = self.mentioned.union(*(_mentions(text, self.name) for text in texts))
        return next(iter(found)) if len(found) == 1 else None

    def real_in(self, directory: str | None) -> frozenset[str]:
        """`real` as absolute paths."""
        return frozenset(posixpath.join(directory, path) for path in self.real) if directory is not None and self.real else frozenset()


NOWHERE = Place()
"""Nothing is known."""


def place_of(messages: Sequence[Message]) -> Place:
    """What a conversation proves of the shell after its last message.

    >>> place_of([Message(Role.USER, "New Terminal Output:\\nroot@0a1b:/app/src#")]).directory
    '/app/src'
    >>> place_of([Message(Role.USER, "root@0a1b:/app# python3")]) == NOWHERE
    True
    """
    if not messages or messages[-1].role not in (Role.USER, Role.TOOL):
        return NOWHERE
    follower = _Follower()
    entries: tuple[str, ...] | None = ()
    recent = messages[-_MAX_MESSAGES:]
    for message in recent:
        if message.role is Role.ASSISTANT:
            turn = read_turn(message.tool_calls[0]) if len(message.tool_calls) == 1 else None
            entries = None if turn is None else turn.keystrokes
        elif message.role in (Role.USER, Role.TOOL):
            follower.observe(entries, message.content)
            entries = ()
    name = follower.name if follower.directory is None else None
    mentioned = frozenset[str]() if name is None else frozenset[str]().union(*(_mentions(text, name) for text in _texts(recent)))
    return Place(follower.directory, name, mentioned, frozenset(follower.directories | follower.real), frozenset(follower.real))


def in_place(read: tuple[Stroke, ...], place: Place, directory: str | None, entries: Sequence[str]) -> tuple[Stroke, ...]:
    """Strokes read in `directory`, without a change to the directory in which the shell stands and without slashes that do nothing."""
    directories = {posixpath.join(directory, path) for path in place.directories} if directory is not None else place.directories
    strokes = list(read)
    if directory is not None and not any(mark in entry for entry in entries for mark in ("cd -", "OLDPWD", "~-", "dirs", "pushd")):
        strokes = _without_standing(strokes, directory)
    for index, stroke in enumerate(strokes):
        if isinstance(stroke, Key | Typed):
            break
        node, is_background = stroke
        strokes[index] = (_without_slashes(node, directories), is_background)
        # What stood before this may be gone.
        if effect(node) is not Effect.READS:
            break
    return tuple(strokes)


def _without_standing(strokes: list[Stroke], directory: str) -> list[Stroke]:
    """Strokes without changes to `directory` at their beginning, as long as anything is left: that is where the shell stands."""
    while strokes and not isinstance(first := strokes[0], Key | Typed):
        node, is_background = first
        if _is_move_to(node, directory) and not is_background and len(strokes) > 1:
            strokes = strokes[1:]
        elif (
            isinstance(node, AndOr)
            and not is_background
            and _is_move_to(node.first, directory)
            and all(operator == "&&" for operator, _ in node.rest)
        ):
            following = node.rest[0][1]
            strokes = [(AndOr(following, node.rest[1:]) if len(node.rest) > 1 else following, False), *strokes[1:]]
        else:
            break
    return strokes


def _is_move_to(node: Node, directory: str) -> bool:
    return node == Command("cd", (), (directory,), is_parsed=True)


def _without_slashes(node: Node, directories: frozenset[str] | set[str]) -> Node:
    """A node whose first command, where it is ``mv`` or ``cp``, ends without a slash that changes nothing.

    GNU coreutils put several sources into the last operand or fail. A single directory goes into a directory, becomes a missing name, and is
    refused by any other file, with the slash and without. Into a known directory everything goes.
    """
    if isinstance(node, AndOr):
        return AndOr(_without_slashes(node.first, directories), node.rest)
    if not isinstance(node, Command) or node.program not in ("mv", "cp") or not node.is_parsed or any(name in ("t", "T") for name, _ in node.options):
        return node
    *sources, target = node.operands or ("",)
    if not sources or not isinstance(target, str) or not target.endswith("/"):
        return node
    bare = target.rstrip("/")
    if not bare or not (len(sources) > 1 or sources[0] in directories or bare in directories):
        return node
    return Command(node.program, node.options, (*sources, bare), is_parsed=True, assignments=node.assignments, redirects=node.redirects)


@dataclass(slots=True)
class _Follower:
    """Follows one shell over a conversation."""

    directory: str | None = None
    name: str | None = None
    directories: set[str] = field(default_factory=set[str])
    real: set[str] = field(default_factory=set[str])

    def observe(self, entries: Sequence[str] | None, screen: str) -> None:
        """Takes note of what was typed (None where that is not known) and of the screen after it."""
        prompt = _prompt(screen)
        if entries is None or prompt is None:
            self.directory, self.name = (_full(prompt), _short(prompt)) if prompt is not None else (None, None)
            self.directories, self.real = set(), set()
            return
        read, after = typed_into(entries, self.directory, frozenset(path for path in self.real if path.startswith("/")))
        nodes = [node for node, _ in statements_of(read)]
        run = [command for node in nodes for command in commands(node)]
        is_followed = not any(isinstance(stroke, Typed) or (isinstance(stroke, Key) and stroke.name != "Enter") for stroke in read)
        is_followed &= all(isinstance(command.program, str) and command.program.split(" ")[0] not in _LEAVES for command in run)
        num_moves = sum(command.program == "cd" for command in run)
        before, name, self.directory = self.directory, self.name, _full(prompt)
        if self.directory is None and is_followed and num_moves < 2:
            self.directory = self._proven(before, after, prompt, nodes, screen)
        self.name = _short(prompt)
        doubtful = [path for node in nodes for path in _doubtful(node)] if is_followed else [""]
        self.directories, self.real = ({path for path in paths if not _is_in_doubt(path, doubtful)} for paths in (self.directories, self.real))
        if num_moves:
            # Names from the directory that is left behind are kept where that is known, or written in this turn.
            found = {before} if before is not None else set[str]() if name is None else set[str]().union(*(_mentions(text, name) for text in entries))
            left = found.pop() if len(found) == 1 else None
            self.directories, self.real = (_absolute(paths, left) for paths in (self.directories, self.real))
        if doubtful:
            return
        reached, listed = (set(paths) for paths in _shown_directories(nodes, screen))
        self.directories |= _absolute(reached, None) if num_moves else reached
        self.real |= _absolute(listed, None) if num_moves else listed

    def _proven(self, before: str | None, after: str | None, prompt: str, nodes: Sequence[Node], screen: str) -> str | None:
        """The directory behind a prompt that shows its last name: where the shell was, or where one change of directory visibly led."""
        if after is not None and posixpath.basename(after) == prompt and (after == before or self.name not in (None, prompt)):
            return after
        if nodes == [Command("pwd", (), (), is_parsed=True)]:
            printed = [line for line in screen.splitlines() if line.startswith("/") and posixpath.basename(line.rstrip()) == prompt]
            return printed[0].rstrip() if len(printed) == 1 else None
        return None


def _prompt(screen: str) -> str | None:
    """The directory in the prompt with which a screen ends, absolute or its last name; None where no prompt waits there."""
    line = screen.rstrip()[-_MAX_PROMPT_CHARS:].rpartition("\n")[2].strip()
    if (full := _FULL_PROMPT.fullmatch(line)) is not None:
        return posixpath.normpath(full.group(1))
    short = _SHORT_PROMPT.fullmatch(line)
    return None if short is None else short.group(1) or short.group(2)


def _full(prompt: str) -> str | None:
    return prompt if prompt.startswith("/") else None


def _short(prompt: str) -> str | None:
    return None if prompt.startswith("/") else prompt


def _doubtful(node: Node) -> Sequence[str]:
    """Paths at and below which a statement may have taken directories away; an empty one stands for all paths."""
    is_single = len(list(commands(node))) == 1
    if effect(node) is Effect.READS or (isinstance(node, Command) and node.program in _KEEPS_DIRECTORIES and is_single):
        return ()
    if (
        not isinstance(node, Command)
        or not is_single
        or node.program not in _CHANGES_OPERANDS
        or not node.is_parsed
        or any(map(_value, node.options))
    ):
        return ("",)
    return [operand if isinstance(operand, str) and ".." not in operand and operand not in (".", "/") else "" for operand in node.operands]


def _value(option: tuple[str, Word | None]) -> Word | None:
    return option[1]


def _is_in_doubt(path: str, doubtful: Sequence[str]) -> bool:
    # An absolute path and one from an unknown directory may be the same.
    return any(not other or path.startswith("/") != other.startswith("/") or f"{path}/".startswith(f"{other.rstrip('/')}/") for other in doubtful)


def _absolute(paths: set[str], directory: str | None) -> set[str]:
    return {posixpath.join(directory or "", path) for path in paths if directory is not None or path.startswith("/")}


def _shown_directories(nodes: Sequence[Node], screen: str) -> tuple[Iterable[str], Iterable[str]]:
    """Directories that a turn without complaint proves (above files that were read, changed to, made); those that a listing shows to be no links."""
    output = _ECHO.sub("", screen)
    if _COMPLAINTS.search(output):
        return (), ()
    reached: list[str] = []
    for node in nodes:
        for command in (node.first, *(part for operator, part in node.rest if operator == "&&")) if isinstance(node, AndOr) else (node,):
            if isinstance(command, Command) and (command.program in _READS_FILES or command.program in ("cd", "mkdir")):
                reached += _proven_by(command, output)
    match nodes:
        case [Command(program="ls", operands=(str(start),)) as command] if _is_plain_listing(command):
            names = [name for name in _LISTED_DIRECTORY.findall(output) if name not in (".", "..")]
            return reached, [posixpath.join("" if start == "." else start, name) for name in names]
        case [Command(program="find", is_parsed=True, operands=(str(start), *_), redirects=())]:
            return reached, _found_directories(start, output)
        case _:
            return reached, ()


def _is_plain_listing(command: Command) -> bool:
    names = {name for name, _ in command.options}
    return "l" in names and names <= _PLAIN_LISTING


def _found_directories(start: str, output: str) -> Iterator[str]:
    """Directories below `start` in which ``find``, which follows no links, found what it printed."""
    for line in output.splitlines():
        if line.startswith(f"{start}/") and ".." not in line:
            path = posixpath.dirname(line)
            while len(path) > len(start):
                yield path.removeprefix("./")
                path = posixpath.dirname(path)


def _proven_by(command: Command, output: str) -> Iterator[str]:
    for operand in command.operands:
        # A complaint about a file names it.
        if not isinstance(operand, str) or ".." in operand or (last := posixpath.basename(operand)) in ("", ".") or last in output:
            continue
        path = operand if command.program in ("cd", "mkdir") else posixpath.dirname(operand)
        while path not in ("", "/", "."):
            yield path
            path = posixpath.dirname(path)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield message.content
        for call in message.tool_calls:
            yield call.arguments.replace("\\n", "\n")


def _mentions(text: str, name: str) -> set[str]:
    """Absolute paths in `text` up to a part called `name`."""
    return set(re.findall(rf"(?<![\w.~)}}/-])((?:/[\w.+-]+)*/{re.escape(name)})(?![\w.+-])", text)) if name in text else set()
