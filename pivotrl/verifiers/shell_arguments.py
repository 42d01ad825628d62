"""A command's words as options and operands, by the rules of `shell_commands`, without running anything.

Whatever the rules do not cover (an unknown option, an unknown command, an option whose name the shell would compute) leaves all
arguments in order: such commands are equal only word by word. Called by `shell_tree`.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pivotrl.verifiers.shell_commands import ALIASES, COMMANDS, SHARED_SUBCOMMANDS, SHELLS, SIGNALS, SUBCOMMAND_PROGRAMS, CommandRule
from pivotrl.verifiers.shell_find import begins_expression, find_expression
from pivotrl.verifiers.shell_nodes import Active, Command, Expanded, Operand, Redirect, Script, Word
from pivotrl.verifiers.shell_options import NotCovered, OptionValues, leading_options, split_options

# `sudo timeout 5 nice ...` deeper than this is read as plain words.
_MAX_NESTED_COMMANDS = 8
_PATH_TESTS = frozenset(("-path", "-ipath", "-wholename", "-iwholename", "-regex", "-iregex"))
# Without strings, patterns and comments, blanks at an awk program's braces and separators mean nothing.
_PLAIN_AWK = re.compile(r"[^\"/\\#\n]*")
_AWK_BLANKS = re.compile(r"[ \t]*([{};,])[ \t]*")
_APPENDED = Expanded((Active("appended", ""),))

type Values = tuple[tuple[str, Word | None], ...]


class ArgumentReader:
    """Reads command lines.

    Args:
        read_script: the script in an operand of ``bash -c``, or None where it cannot be read.
        directory: where relative paths start, or None where that is not known; follows the text.
        notes_directory: whether commands to which the working directory matters say it: where changes of directory are not kept.
        real: absolute paths that are directories and no links.
    """

    def __init__(
        self, read_script: Callable[[str], Script | None], directory: str | None, *, notes_directory: bool, real: frozenset[str] = frozenset()
    ) -> None:
        self._read_script = read_script
        self.directory = directory
        self._notes_directory = notes_directory
        self._real = real

    @property
    def _noted(self) -> str | None:
        return self.directory if self._notes_directory else None

    def command(self, words: Sequence[Word], *, depth: int = 0) -> Command:
        """The command that `words` (program first) are, without its assignments and redirections."""
        program = words[0]
        if not isinstance(program, str):
            return self._as_written(program, words[1:])
        name, extra = ALIASES.get(program, (program, ()))
        arguments = [*extra, *words[1:]]
        try:
            if depth > _MAX_NESTED_COMMANDS:
                raise NotCovered
            match name:
                case "find":
                    return self._find(arguments)
                case "echo":
                    return _echo(arguments)
                case "env":
                    return self._env(arguments, depth)
                case "python" | "python3":
                    return self._python(name, arguments, depth)
                case _ if name in SUBCOMMAND_PROGRAMS:
                    return self._subcommand(name, arguments, depth)
                case _ if name in COMMANDS:
                    return self._known(name, COMMANDS[name], arguments, depth)
        except NotCovered:
            pass
        return self._as_written(program, words[1:])

    def path(self, word: Word, *, keeps_slash: bool = False) -> Word:
        """A path without needless parts, absolute where the directory is known. ``..`` stays where a link may stand before it."""
        if not isinstance(word, str):
            return _dynamic_path(word)
        if not word or word == "-":
            return word
        path = normal_path(word, self.directory, keeps_slash=keeps_slash)
        return _without_parents(path, self._real) if self._real and "/.." in path else path

    @contextmanager
    def _elsewhere(self, is_elsewhere: bool) -> Iterator[None]:  # noqa: FBT001 - one condition, read aloud
        """Paths that start in another directory, or on another machine, stay as they are written."""
        directory = self.directory
        self.directory = None if is_elsewhere else directory
        try:
            yield
        finally:
            self.directory = directory

    def _as_written(self, program: Word, arguments: Sequence[Word]) -> Command:
        return Command(program, (), tuple(arguments), is_parsed=False, directory=self._noted)

    def _known(self, name: str, rule: CommandRule, arguments: Sequence[Word], depth: int) -> Command:
        if rule.dashless and arguments and isinstance(arguments[0], str) and arguments[0][:1] not in ("-", ""):
            bundle = "-" + arguments[0]
            _require_values_last(bundle, rule)
            arguments = [bundle, *arguments[1:]]
        if rule.numeric == "s":
            arguments = [_numbered_signal(word) for word in arguments]
        options, operands, separator = split_options(arguments, rule)
        if "e" in rule.pattern_options and operands and not {option.name for option, _ in options}.intersection(rule.pattern_options):
            # `grep x f` is `grep -e x f`.
            options.append((rule.options["e"], operands[0]))
            operands = operands[1:]
        if name == "awk" and operands and isinstance(operands[0], str) and _PLAIN_AWK.fullmatch(operands[0]):
            operands = [_AWK_BLANKS.sub(r"\1", operands[0]).strip(), *operands[1:]]
        values = self._values(options, rule)
        if rule.keeps_separator and separator is not None:
            operands = [*operands[:separator], "--", *(self.path(word) for word in operands[separator:])]
        if rule.nested_after is not None and len(operands) > rule.nested_after:
            return self._wrapper(name, rule, values, operands, depth)
        if name in SHELLS and operands:
            return self._shell(name, values, operands)
        is_sensitive = rule.first_path is None or rule.keeps_separator
        directory = self._noted if is_sensitive else None
        with self._elsewhere(rule.positional == "C" and any(option == "C" for option, _ in values)):
            read = self._operands(operands, values, rule)
        return Command(name, values, read, is_parsed=True, directory=directory)

    def _operands(self, operands: list[Word], values: Values, rule: CommandRule) -> tuple[Operand, ...]:
        if rule.first_path is not None:
            given = {name for name, _ in values}
            first_path = _first_path(rule, given)
            if rule.default_path is not None and len(operands) <= first_path and given.issuperset(rule.default_path_needs):
                operands = [*operands, rule.default_path]
            paths = [self.path(word, keeps_slash=rule.keeps_slash) for word in operands[first_path:]]
            operands = [*operands[:first_path], *paths]
        if rule.octal_first and operands and isinstance(operands[0], str) and operands[0].isdigit():
            operands = [operands[0].lstrip("0") or "0", *operands[1:]]
        if rule.set_from is None:
            return tuple(operands)
        return (*operands[: rule.set_from], *sorted(operands[rule.set_from :], key=_sort_key))

    def _values(self, options: OptionValues, rule: CommandRule) -> Values:
        values = [(option.name, self.path(value) if option.value == "/" and value is not None else value) for option, value in options]
        names = {option.name for option, _ in options}
        for name, value in rule.implied.items():
            if not names.intersection(next((group for group in rule.conflicts if name in group), name)):
                values.append((name, value))
        if any(len(names.intersection(group)) > 1 for group in rule.conflicts):
            return tuple(values)
        counted = {option.name for option, _ in options if option.value == "+"}
        kept: list[tuple[str, Word | None]] = []
        for item in values:
            if item[1] is not None or item[0] in counted or item not in kept:
                kept.append(item)
        # Stable, so repeated options with values keep their order.
        return tuple(sorted(kept, key=_option_name))

    def _wrapper(self, name: str, rule: CommandRule, values: Values, operands: list[Word], depth: int) -> Command:
        own = rule.nested_after or 0
        # What xargs appends takes the place of operands, so none may be assumed.
        appended = [_APPENDED] if name == "xargs" else []
        with self._elsewhere(name.startswith("docker ") or (name == "sudo" and ("i", None) in values)):
            nested = self.command([*operands[own:], *appended], depth=depth + 1)
        return Command(name, values, (*operands[:own], nested), is_parsed=True)

    def _shell(self, name: str, values: Values, operands: list[Word]) -> Command:
        first: Operand = operands[0]
        if any(option == "c" for option, _ in values):
            script = self._read_script(first) if isinstance(first, str) else None
            first = first if script is None else script
        else:
            first = self.path(operands[0])
        return Command(name, values, (first, *operands[1:]), is_parsed=True, directory=self._noted)

    def _python(self, name: str, arguments: list[Word], depth: int) -> Command:
        """``-m`` and ``-c`` end the interpreter's own options; the arguments of known modules are read by their rules."""
        place = next((place for place, word in enumerate(arguments) if word in ("-m", "-c") or not _is_dashed(word)), len(arguments))
        options, operands, _ = split_options(arguments[:place], COMMANDS[name])
        values = self._values(options, COMMANDS[name])
        rest = arguments[place:]
        if not rest or operands:
            return Command(name, values, (*operands, *rest), is_parsed=True, directory=self._noted)
        if rest[0] == "-m" and len(rest) > 1:
            nested = self.command(rest[1:], depth=depth + 1)
            return Command(f"{name} -m", values, (dataclasses.replace(nested, directory=None),), is_parsed=True, directory=self._noted)
        if rest[0] == "-c":
            return Command(f"{name} -c", values, tuple(rest[1:]), is_parsed=True, directory=self._noted)
        if rest == ["-"]:
            return Command(name, values, (), is_parsed=True, directory=self._noted)
        return Command(name, values, (self.path(rest[0]), *rest[1:]), is_parsed=True, directory=self._noted)

    def _subcommand(self, program: str, arguments: list[Word], depth: int) -> Command:
        options, rest = leading_options(arguments, SUBCOMMAND_PROGRAMS[program])
        if not rest or not isinstance(rest[0], str):
            raise NotCovered
        rule = COMMANDS.get(f"{SHARED_SUBCOMMANDS.get(program, program)} {rest[0]}")
        if rule is None:
            raise NotCovered
        with self._elsewhere(any(option.name == "C" for option, _ in options)):
            command = self._known(f"{program} {rest[0]}", rule, rest[1:], depth)
        before: list[tuple[str, Word | None]] = []
        for option, value in options:
            # `apt-get -y install` is `apt-get install -y`; `git -C` is not the `-C` of a subcommand.
            is_shared = (same := rule.options.get(option.name)) is not None and same.value == option.value
            name = option.name if is_shared else f"{program} {option.name}"
            before.append((name, self.path(value) if option.value == "/" and value is not None else value))
        if before:
            command = dataclasses.replace(command, options=tuple(sorted([*before, *command.options], key=_option_name)))
        return dataclasses.replace(_newer_git(command), directory=self._noted)

    def _env(self, arguments: list[Word], depth: int) -> Command:
        place = next((place for place, word in enumerate(arguments) if not _is_assignment(word)), len(arguments))
        nested = arguments[place:]
        if not nested or _is_dashed(nested[0]):
            raise NotCovered
        return Command("env", (), (*arguments[:place], self.command(nested, depth=depth + 1)), is_parsed=True)

    def _find(self, arguments: list[Word]) -> Command:
        place = next((place for place, word in enumerate(arguments) if begins_expression(word)), len(arguments))
        starts: list[Word] = arguments[:place] or ["."]
        expression = arguments[place:]
        if expression and expression[-1] == "-print":
            expression = expression[:-1]
        # Tests of whole paths are tests of how the starting points are written.
        directory = None if _PATH_TESTS.intersection(word for word in expression if isinstance(word, str)) else self.directory
        paths = [normal_path(word, directory) if isinstance(word, str) and word else self.path(word) for word in starts]
        return Command("find", (), (*paths, *find_expression(expression)), is_parsed=True)


def normal_path(path: str, directory: str | None = None, *, keeps_slash: bool = False) -> str:
    """`path` without ``./``, ``//``, ``/./`` and a slash at its end; joined to `directory` where it is relative and that is known.

    >>> normal_path("./a//b/./c/"), normal_path("a/../b"), normal_path("x", "/app"), normal_path("./")
    ('a/b/c', 'a/../b', '/app/x', '.')
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    text = "/".join(parts)
    if path.startswith("/"):
        text = "/" + text
    elif directory is not None:
        text = posixpath.join(directory, text) if text else directory
    # A dash in front would make an option of a file name that `./` protected.
    if text.startswith("-"):
        text = "./" + text
    return (text or ".") + ("/" if keeps_slash and path.endswith("/") and parts else "")


def _without_parents(path: str, real: frozenset[str]) -> str:
    """`path` without ``..`` behind directories that are `real`.

    >>> _without_parents("/app/src/../../x", frozenset({"/app/src"}))
    '/app/../x'
    """
    if not path.startswith("/"):
        return path
    done = ""
    for part in path.split("/")[1:]:
        done = posixpath.dirname(done).rstrip("/") if part == ".." and done in real else f"{done}/{part}"
    return done or "/"


def reading_file(command: Command, file: Word) -> Command | None:
    """A command that reads its standard input, made to read `file` instead, or None where that is not the same.

    ``cat f | grep x`` and ``grep x < f`` are ``grep x f``: a filter prints no name for one file.
    """
    rule = COMMANDS.get(command.program) if isinstance(command.program, str) else None
    if rule is None or not rule.is_filter or not command.is_parsed or any(redirect.descriptor == 0 for redirect in command.redirects):
        return None
    given = {name for name, _ in command.options}
    if given.intersection("rRH"):
        return None
    if len(command.operands) != _first_path(rule, given):
        return None
    return dataclasses.replace(command, operands=(*command.operands, file))


def with_input_operand(command: Command) -> Command:
    """`command` with ``< f`` as an operand, where that is the same."""
    sources = [redirect for redirect in command.redirects if redirect.descriptor == 0]
    if len(sources) != 1 or sources[0].operator != "<":
        return command
    others: tuple[Redirect, ...] = tuple(redirect for redirect in command.redirects if redirect.descriptor != 0)
    return reading_file(dataclasses.replace(command, redirects=others), sources[0].target) or command


def _first_path(rule: CommandRule, given: set[str]) -> int:
    if rule.first_path is None or (rule.pattern_options and given.intersection(rule.pattern_options)):
        return 0
    return rule.first_path


def _newer_git(command: Command) -> Command:
    """``git checkout -b x`` as ``git switch -c x``, and ``git checkout -- f`` as ``git restore f``: the same since git 2.23."""
    if command.program == "git checkout":
        if len(command.options) == 1 and command.options[0][0] == "b" and "--" not in command.operands:
            return dataclasses.replace(command, program="git switch", options=(("c", command.options[0][1]),))
        if not command.options and command.operands[:1] == ("--",):
            return dataclasses.replace(command, program="git restore", operands=command.operands[1:])
    return command


def _echo(arguments: list[Word]) -> Command:
    flags: set[str] = set()
    place = 0
    while place < len(arguments) and isinstance(word := arguments[place], str) and word[:1] == "-" and word[1:] and set(word[1:]) <= set("neE"):
        flags |= set(word[1:])
        place += 1
    if {"e", "E"} <= flags:
        raise NotCovered
    words = arguments[place:]
    if all(isinstance(word, str) for word in words):
        # The words are joined by one blank, so how they were divided does not show.
        words = [" ".join(word for word in words if isinstance(word, str))]
    return Command("echo", tuple((flag, None) for flag in sorted(flags - {"E"})), tuple(words), is_parsed=True)


def _dynamic_path(word: Expanded) -> Word:
    """A path with active parts: its literal text cleaned where no active part touches it."""
    parts = word.parts
    if isinstance(parts[0], str) and parts[0].startswith("./"):
        rest = parts[0][2:]
        if rest or (isinstance(parts[1], Active) and parts[1].kind == "glob"):
            return Expanded((rest, *parts[1:]) if rest else parts[1:])
    if len(parts) > 1 and isinstance(parts[-1], str) and isinstance(parts[0], Active) and parts[0].kind == "tilde":
        shorter = parts[-1].rstrip("/")
        return Expanded((*parts[:-1], shorter) if shorter else parts[:-1])
    return word


def _numbered_signal(word: Word) -> Word:
    if not isinstance(word, str):
        return word
    name = word.removeprefix("-").upper().removeprefix("SIG")
    number = SIGNALS.get(name)
    return word if number is None else ("-" if word.startswith("-") else "") + number


def _require_values_last(bundle: str, rule: CommandRule) -> None:
    for place, letter in enumerate(bundle[1:], start=1):
        option = rule.options.get(letter)
        if option is not None and option.value in ("=", "/") and place != len(bundle) - 1:
            raise NotCovered


def _is_dashed(word: Word) -> bool:
    return isinstance(word, str) and word.startswith("-") and word != "-"


def _is_assignment(word: Word) -> bool:
    text = word if isinstance(word, str) else word.parts[0]
    return isinstance(text, str) and "=" in text and text.partition("=")[0].isidentifier()


def _option_name(item: tuple[str, Word | None]) -> str:
    return item[0]


def _sort_key(word: Operand) -> str:
    return word if isinstance(word, str) else repr(word)
