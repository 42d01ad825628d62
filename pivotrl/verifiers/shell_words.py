"""One word of a command from its syntax tree: quotes and escapes resolved, what the shell would expand kept as it is written.

Follows the rules of quote removal in POSIX.1-2024, Shell Command Language 2.2 and 2.6.7, and bash's ``$'...'``. Called by `shell_tree`.
Nothing is expanded: ``*.py`` stays a pattern and ``$HOME`` a variable, different from the same text in single quotes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

from tree_sitter import Node as SyntaxNode

from pivotrl.verifiers.shell_nodes import Active, Expanded, Script, Substitution, Word

_QUOTED_ESCAPE = re.compile(r'\\(?:\n|([$`"\\]))')
_ANSI_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
_ANSI_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
_ANSI_CHARACTERS |= {character: character for character in "\\'\"?"}
# Numbers, so neither splitting nor globbing can change them.
_NUMERIC_VARIABLES = frozenset("?#$!")
_SPECIAL = re.compile(r"[*?\[\]{}~]")
_WILDCARDS = re.compile(r"[*?]+")
_BRACE_EXPANSION = re.compile(r"\{.*(?:,|\.\.).*\}", re.DOTALL)
_BRACKET = re.compile(r"\[.+\]", re.DOTALL)
# Parts of one word that quoting or expansion separates; nobody writes more.
_MAX_PIECES = 512
_BLANK_IN_QUOTES = b" \t\n"


class Unreadable(ValueError):
    """Syntax that cannot be read with certainty; never leaves `shell_tree`."""


class WordReader:
    """Reads the words of one source text.

    Args:
        source: the whole text, as bytes.
        read_script: reads the statements among the children of a substitution.
    """

    def __init__(self, source: bytes, read_script: Callable[[SyntaxNode], Script]) -> None:
        self._source, self._read_script = source, read_script

    def text(self, node: SyntaxNode) -> str:
        """The source text of a node."""
        return self._source[node.start_byte : node.end_byte].decode()

    def word(self, node: SyntaxNode) -> Word:
        """The word that a node is.

        Raises:
            Unreadable: for syntax that is not a word.
        """
        if node.type == "word" and not node.child_count:
            text = self.text(node)
            if "\\" not in text and not _SPECIAL.search(text):
                return text
        elif node.type == "raw_string":
            return self.text(node)[1:-1]
        return _joined(self._pieces(node))

    def _pieces(self, node: SyntaxNode) -> list[tuple[str | Active | Substitution, bool]]:
        """(text or active part, whether quoting protects the text) in order."""
        match node.type:
            case "word" | "number" | "variable_name" | "special_variable_name" | "test_operator" if not node.child_count:
                return list(_unquoted(self.text(node)))
            case "raw_string":
                return [(self.text(node)[1:-1], True)]
            case "string":
                return list(self._quoted(node))
            case "ansi_c_string":
                return [(_ansi_text(self.text(node)[2:-1]), True)]
            case "concatenation":
                pieces: list[tuple[str | Active | Substitution, bool]] = []
                place = node.start_byte
                for child in node.children:
                    if child.start_byte != place:
                        raise Unreadable
                    place = child.end_byte
                    pieces += self._pieces(child)
                return pieces
            case "simple_expansion" | "expansion" | "command_substitution" | "arithmetic_expansion":
                return [(self._expansion(node, is_quoted=False), True)]
            case "process_substitution":
                return [(Substitution(self.text(node)[:2], self._read_script(node)), True)]
            case "brace_expression":
                return [(Active("brace", self.text(node)), True)]
            case "extglob_pattern" | "regex":
                return [(Active("glob", self.text(node)), True)]
            case _:
                raise Unreadable

    def _quoted(self, node: SyntaxNode) -> Iterable[tuple[str | Active | Substitution, bool]]:
        place, end = node.start_byte + 1, node.end_byte - 1
        if self._source[node.start_byte : place] != b'"' or self._source[end : end + 1] != b'"' or end < place:
            raise Unreadable
        for child in node.children:
            if child.type in ('"', "string_content"):
                continue
            # The grammar counts blanks in front of an expansion as part of it.
            start = child.start_byte
            while self._source[start] in _BLANK_IN_QUOTES:
                start += 1
            yield _QUOTED_ESCAPE.sub(r"\1", self._source[place:start].decode()), True
            yield self._expansion(child, is_quoted=True), True
            place = child.end_byte
        yield _QUOTED_ESCAPE.sub(r"\1", self._source[place:end].decode()), True

    def _expansion(self, node: SyntaxNode, *, is_quoted: bool) -> Active | Substitution:
        children = node.children
        match node.type:
            case "simple_expansion" if len(children) == 2:
                return _variable(self.text(children[1]), is_quoted=is_quoted)
            case "expansion" if len(children) == 3 and children[1].type in ("variable_name", "special_variable_name"):
                return _variable(self.text(children[1]), is_quoted=is_quoted)
            case "expansion":
                return Active("expansion", self.text(node).strip(), is_quoted)
            case "arithmetic_expansion":
                return Active("arithmetic", " ".join(self.text(leaf) for leaf in _leaves(node)))
            case "command_substitution":
                text = self.text(node).strip()
                # Backquotes change what a backslash inside them means.
                if text.startswith("`") and "\\" in text:
                    return Active("expansion", text, is_quoted)
                return Substitution("$(", self._read_script(node), is_quoted)
            case _:
                raise Unreadable


def unsplit(word: Word) -> Word:
    """A word where the shell neither splits nor globs (the value of an assignment): quotes around expansions and wildcards do not count."""
    if isinstance(word, str):
        return word
    parts: list[str | Active | Substitution] = []
    for part in word.parts:
        if isinstance(part, str):
            _add_text(parts, part)
        elif isinstance(part, Active) and part.kind == "glob":
            _add_text(parts, part.text)
        else:
            parts.append(dataclasses.replace(part, is_quoted=True))
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else Expanded(tuple(parts))


def _variable(name: str, *, is_quoted: bool) -> Active:
    return Active("variable", name, is_quoted and name not in _NUMERIC_VARIABLES)


def _leaves(node: SyntaxNode) -> Iterable[SyntaxNode]:
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.child_count:
            waiting += reversed(current.children)
        else:
            yield current


def _unquoted(text: str) -> Iterable[tuple[str, bool]]:
    """Runs of unquoted text, with the characters that backslashes protect apart."""
    start = 0
    while (place := text.find("\\", start)) != -1:
        if place > start:
            yield text[start:place], False
        if text[place + 1 : place + 2] != "\n":
            yield text[place + 1 : place + 2], True
        start = place + 2
    if start < len(text):
        yield text[start:], False


def _ansi_text(text: str) -> str:
    """The text of ``$'...'``.

    Raises:
        Unreadable: for escapes whose meaning depends on the locale.
    """

    def character(match: re.Match[str]) -> str:
        hexadecimal, unicode, octal, plain = match.groups()
        code = int(hexadecimal or unicode or "0", 16) or int(octal or "0", 8)
        if plain is None:
            if not 0 < code < 128:
                raise Unreadable
            return chr(code)
        if plain not in _ANSI_CHARACTERS:
            raise Unreadable
        return _ANSI_CHARACTERS[plain]

    return _ANSI_ESCAPE.sub(character, text)


def _joined(pieces: list[tuple[str | Active | Substitution, bool]]) -> Word:
    if len(pieces) > _MAX_PIECES:
        raise Unreadable
    bare = "".join(piece for piece, is_protected in pieces if isinstance(piece, str) and not is_protected)
    is_option = bare.startswith("-") and pieces[0][0] != "" and isinstance(pieces[0][0], str) and pieces[0][0].startswith("-")
    # Quoting any character of a bracket or brace expression changes it, so all bare text of such a word stays apart.
    keeps_all = _BRACKET.search(bare) is not None or _BRACE_EXPANSION.search(bare) is not None
    parts: list[str | Active | Substitution] = []
    for index, (piece, is_protected) in enumerate(pieces):
        if not isinstance(piece, str):
            parts.append(piece)
        elif is_protected:
            _add_text(parts, piece)
        elif keeps_all:
            parts.append(Active("pattern", piece))
        else:
            _add_bare(parts, piece, is_first=index == 0, is_option=is_option)
    if not parts:
        return ""
    if isinstance(parts[0], Active) and _is_home(parts[0]) and (len(parts) == 1 or (isinstance(parts[1], str) and parts[1].startswith("/"))):
        # POSIX.1-2024, 2.6.1: a tilde is the value of HOME. That holds neither blanks nor wildcards, so it is one word without quotes too.
        parts[0] = Active("tilde", "~")
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else Expanded(tuple(parts))


def _is_home(part: Active) -> bool:
    return part.kind == "variable" and part.text == "HOME"


def _add_bare(parts: list[str | Active | Substitution], text: str, *, is_first: bool, is_option: bool) -> None:
    if is_first and text.startswith("~"):
        user = text.partition("/")[0]
        parts.append(Active("tilde", user))
        text = text[len(user) :]
    if is_option:
        # `--include=*.py` is a pattern for file names that begin with `--include=`: nobody has them, so quoting it changes nothing.
        _add_text(parts, text)
        return
    place = 0
    for match in _WILDCARDS.finditer(text):
        _add_text(parts, text[place : match.start()])
        parts.append(Active("glob", match.group()))
        place = match.end()
    _add_text(parts, text[place:])


def _add_text(parts: list[str | Active | Substitution], text: str) -> None:
    if parts and isinstance(parts[-1], str):
        parts[-1] += text
    elif text:
        parts.append(text)
