"""A tiny shell on a tiny file system: a dozen commands with their usual options, quotes, `;`, `&&`, and redirections. Nothing real is touched.

What it does not know (pipes, globs, variables, other commands) is answered with an error, as a shell answers. Every text is safe to run: sizes
are bounded, and `Shell.run` never raises.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Bounds on what hostile text can make: characters of a line that are read, nodes and characters of a file that fit on the disk.
_MAX_LINE_CHARS = 1000
_MAX_NODES = 60
_MAX_FILE_CHARS = 400
_MAX_SCREEN_CHARS = 120

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+)|(?P<operator>&&|;|>>|>|<)|(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\[^\n]|[^\s;&|<>'"\\`$*?(){}])+)""",
    re.VERBOSE,
)
_PIECE = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)""")
_LONG_OPTIONS = {"--recursive": "r", "--force": "f", "--all": "a", "--parents": "p"}
# Options of each command, one letter each; R is a second name of r.
_OPTIONS: Mapping[str, str] = MappingProxyType({"ls": "al1", "rm": "rRf", "cp": "rR", "mv": "f", "chmod": "rR", "mkdir": "p"})
_MODE = re.compile(r"0?[0-7]{3}")


class ShellError(Exception):
    """What a command complains of; never leaves `Shell.run`."""


@dataclass(slots=True)
class Shell:
    """The file system and where the shell stands in it. Paths are absolute and normal; "/" is always there."""

    files: dict[str, str] = field(default_factory=dict)
    """Text by path."""
    modes: dict[str, str] = field(default_factory=dict)
    """Octal mode by path of every file and directory; a path with a mode and no text is a directory."""
    cwd: str = "/"
    read: set[str] = field(default_factory=set)
    """Files whose text was shown or copied to the screen."""

    def tree(self) -> dict[str, tuple[str, str | None]]:
        """(mode, text) by path; text is None for a directory. All that a command can change for good."""
        return {path: (self.modes[path], self.files.get(path)) for path in sorted(self.modes)}

    def run(self, line: str) -> str:
        """Runs one line and gives what it prints, cut to a small screen."""
        printed: list[str] = []
        try:
            for operator, words, redirects in _commands(line[:_MAX_LINE_CHARS]):
                try:
                    self._command(words, redirects, printed)
                except ShellError as error:
                    printed.append(str(error))
                    if operator == "&&":
                        break
        except ShellError as error:
            printed.append(str(error))
        return "\n".join(filter(None, printed))[:_MAX_SCREEN_CHARS]

    def _command(self, words: list[str], redirects: list[tuple[str, str]], printed: list[str]) -> None:
        sources = [target for operator, target in redirects if operator == "<"]
        name, arguments = (words[0], words[1:]) if words else ("", [])
        command = _COMMANDS.get(name)
        if command is None and name:
            raise ShellError(f"{name}: not found")
        output = command(self, [*arguments, *(sources if name == "cat" and not arguments else ())]) if command is not None else ""
        outputs = [(operator, self.absolute(target)) for operator, target in redirects if operator != "<"]
        for operator, path in outputs:
            self._write(path, (self.files.get(path, "") if operator == ">>" else "") + (f"{output}\n" if output else ""))
        if not outputs:
            printed.append(output)

    def absolute(self, path: str) -> str:
        """The normal absolute form of a path as typed."""
        return "/" + posixpath.normpath(posixpath.join(self.cwd, path)).lstrip("/") if path else self.cwd

    def is_dir(self, path: str) -> bool:
        return path == "/" or (path in self.modes and path not in self.files)

    def below(self, path: str) -> list[str]:
        """Everything inside a directory, in order of name."""
        prefix = path.rstrip("/") + "/"
        return sorted(inner for inner in self.modes if inner.startswith(prefix))

    def make_dir(self, path: str) -> None:
        self._add(path)
        self.modes[path] = "755"

    def _write(self, path: str, text: str) -> None:
        if self.is_dir(path):
            raise ShellError("is a directory")
        if len(text) > _MAX_FILE_CHARS:
            raise ShellError("disk full")
        self._add(path)
        self.files[path] = text
        self.modes.setdefault(path, "644")

    def _add(self, path: str) -> None:
        if not self.is_dir(posixpath.dirname(path)):
            raise ShellError("no such directory")
        if path not in self.modes and len(self.modes) >= _MAX_NODES:
            raise ShellError("disk full")

    def _existing(self, path: str) -> str:
        found = self.absolute(path)
        if found != "/" and found not in self.modes:
            raise ShellError(f"no {path[:40]}")
        return found

    def _cd(self, words: list[str]) -> str:
        target = self._existing(words[0]) if len(words) == 1 else "/w" if not words else None
        if target is None or not self.is_dir(target):
            raise ShellError("cd: no such directory")
        self.cwd = target
        return ""

    def _ls(self, words: list[str]) -> str:
        options, paths = _split_options("ls", words)
        names: list[str] = []
        for path in map(self._existing, paths or ["."]):
            inside = [inner for inner in self.below(path) if posixpath.dirname(inner) == path] if self.is_dir(path) else [path]
            names += [f"{self.modes[inner]} {posixpath.basename(inner)}" if "l" in options else posixpath.basename(inner) for inner in inside]
        return ("\n" if {"l", "1"} & options else " ").join(names)

    def _cat(self, words: list[str]) -> str:
        paths = list(map(self._existing, words))
        if not paths or any(map(self.is_dir, paths)):
            raise ShellError("cat: is a directory" if paths else "cat: nothing to show")
        self.read.update(paths)
        return "".join(self.files[path] for path in paths).removesuffix("\n")

    def _find(self, words: list[str]) -> str:
        start, tests = (words[0], words[1:]) if words and not words[0].startswith("-") else (".", words)
        wanted: dict[str, str] = dict(zip(tests[::2], tests[1::2], strict=False))
        if len(tests) % 2 or not set(wanted) <= {"-name", "-type"}:
            raise ShellError("find: bad test")
        top = self._existing(start)
        lines: list[str] = []
        for path in [top, *self.below(top)]:
            is_kind = wanted.get("-type", "d" if self.is_dir(path) else "f") == ("d" if self.is_dir(path) else "f")
            if is_kind and wanted.get("-name", posixpath.basename(path)) == posixpath.basename(path):
                lines.append(start.rstrip("/") + path.removeprefix(top.rstrip("/")) if path != top else start)
        return "\n".join(lines)

    def _mv(self, words: list[str]) -> str:
        _, (source, target) = self._pair("mv", words)
        moved = [source, *self.below(source)]
        for path in moved:
            new = target + path.removeprefix(source)
            self.modes[new] = self.modes.pop(path)
            if path in self.files:
                self.files[new] = self.files.pop(path)
        return ""

    def _cp(self, words: list[str]) -> str:
        options, (source, target) = self._pair("cp", words)
        if self.is_dir(source) and not {"r", "R"} & options:
            raise ShellError("cp: is a directory")
        copied = [source, *self.below(source)]
        if len(self.modes) + len(copied) > _MAX_NODES:
            raise ShellError("disk full")
        for path in copied:
            new = target + path.removeprefix(source)
            self.modes[new] = self.modes[path]
            if path in self.files:
                self.files[new] = self.files[path]
        return ""

    def _pair(self, name: str, words: list[str]) -> tuple[set[str], tuple[str, str]]:
        """Options, source and the place where it goes: inside the target where that is a directory."""
        options, paths = _split_options(name, words)
        if len(paths) != 2:
            raise ShellError(f"{name}: needs two paths")
        source, target = self._existing(paths[0]), self.absolute(paths[1])
        if self.is_dir(target):
            target = posixpath.join(target, posixpath.basename(source))
        if source == "/" or target == source or target.startswith(source + "/") or target in self.modes:
            raise ShellError(f"{name}: cannot do that")
        self._add(target)
        return options, (source, target)

    def _rm(self, words: list[str]) -> str:
        options, paths = _split_options("rm", words)
        if not paths and "f" not in options:
            raise ShellError("rm: no path")
        for path in paths:
            if self.absolute(path) not in {"/", *self.modes} and "f" in options:
                continue
            found = self._existing(path)
            if self.is_dir(found) and not {"r", "R"} & options:
                raise ShellError("rm: is a directory")
            if found == "/" or (self.cwd + "/").startswith(found + "/"):
                raise ShellError("rm: refused")
            for inner in [found, *self.below(found)]:
                self.modes.pop(inner)
                self.files.pop(inner, None)
        return ""

    def _chmod(self, words: list[str]) -> str:
        options, rest = _split_options("chmod", words)
        if len(rest) < 2 or not _MODE.fullmatch(rest[0]):
            raise ShellError("chmod: bad mode")
        for path in map(self._existing, rest[1:]):
            for changed in [path, *(self.below(path) if {"r", "R"} & options else ())]:
                if changed != "/":
                    self.modes[changed] = rest[0][-3:]
        return ""

    def _mkdir(self, words: list[str]) -> str:
        options, paths = _split_options("mkdir", words)
        for path in map(self.absolute, paths):
            if path != "/" and path not in self.modes:
                self.make_dir(path)
            elif "p" not in options:
                raise ShellError("mkdir: exists")
        return ""

    def _echo(self, words: list[str]) -> str:
        return " ".join(words)

    def _pwd(self, words: list[str]) -> str:
        del words
        return self.cwd


_COMMANDS: Mapping[str, Callable[[Shell, list[str]], str]] = MappingProxyType(
    {
        name: getattr(Shell, f"_{name}")  # the methods above, by the names that are typed
        for name in ("cd", "ls", "cat", "find", "mv", "cp", "rm", "chmod", "mkdir", "echo", "pwd")
    }
)


def _split_options(name: str, words: list[str]) -> tuple[set[str], list[str]]:
    options: set[str] = set()
    paths: list[str] = []
    for word in words:
        if word.startswith("--"):
            word = "-" + _LONG_OPTIONS.get(word, "?")
        if word.startswith("-") and len(word) > 1:
            if not set(word[1:]) <= set(_OPTIONS[name]):
                raise ShellError(f"{name}: bad option")
            options |= set(word[1:])
        else:
            paths.append(word)
    return options, paths


def _commands(line: str) -> list[tuple[str, list[str], list[tuple[str, str]]]]:
    """(operator that follows, words, redirections) of each simple command.

    Raises:
        ShellError: for what is no such line.
    """
    found: list[tuple[str, list[str], list[tuple[str, str]]]] = []
    words: list[str] = []
    redirects: list[tuple[str, str]] = []
    place, pending = 0, ""
    while place < len(line) and not line.startswith("#", place):
        token = _TOKEN.match(line, place)
        if token is None:
            raise ShellError("syntax error")
        place = token.end()
        if token["operator"] in (";", "&&"):
            if pending or not (words or redirects):
                raise ShellError("syntax error")
            found.append((token["operator"], words, redirects))
            words, redirects = [], []
        elif token["operator"]:
            if pending:
                raise ShellError("syntax error")
            pending = token["operator"]
        elif token["word"]:
            word = "".join(a or re.sub(r"\\(.)", r"\1", b) or c or d for a, b, c, d in _PIECE.findall(token["word"]))
            if pending:
                redirects.append((pending, word))
                pending = ""
            else:
                words.append(word)
    if pending or (found and found[-1][0] == "&&" and not (words or redirects)):
        raise ShellError("syntax error")
    return [*found, (";", words, redirects)] if words or redirects else found
