"""What a shell command is once spelling is gone: frozen, hashable nodes; equal nodes are commands that do the same.

Built by `shell_tree.canonical_command`; compared with ``==`` and hashed, never executed. A `Word` without anything for the shell to
expand is a plain string, so ``'a'``, ``"a"`` and ``a`` are one value.
"""

from __future__ import annotations

from dataclasses import dataclass

type Word = str | Expanded
type Node = Command | Pipeline | AndOr | Compound | Script
type Operand = Word | Command | Script | Assignment


@dataclass(frozen=True, slots=True)
class Active:
    """A part of a word on which the shell acts, kept as it is written."""

    kind: str
    """``glob`` (wildcards), ``pattern`` (bracket or brace expression), ``tilde``, ``brace``, ``variable``, ``expansion``, ``arithmetic``;
    ``appended`` for what xargs adds."""
    text: str
    is_quoted: bool = False
    """Inside double quotes: the result is not split into words."""


@dataclass(frozen=True, slots=True)
class Substitution:
    """The output of a script used as part of a word: ``$(...)``, backquotes, ``<(...)`` or ``>(...)``."""

    kind: str
    """``$(``, ``<(`` or ``>(``."""
    script: Script
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Expanded:
    """A word that the shell expands: literal text and active parts in order."""

    parts: tuple[str | Active | Substitution, ...]


@dataclass(frozen=True, slots=True)
class Redirect:
    """One redirection.

    >>> Redirect(1, ">", "out.txt") == Redirect(1, ">>", "out.txt")
    False
    """

    descriptor: int | str
    """Number of the redirected file descriptor; a name for ``{name}>``."""
    operator: str
    """``<``, ``>``, ``>>``, ``>|``, ``<>``, ``dup`` (``2>&1``), ``heredoc`` (literal), ``heredoc$`` (expanded) or ``<<<``."""
    target: Word


@dataclass(frozen=True, slots=True)
class Assignment:
    """``name=value``; the operator is ``=`` or ``+=``, the value of an array is the text of its words."""

    name: str
    operator: str
    value: Word | tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command. Two spellings that differ in flag order, bundling or quoting have equal commands where that is provably safe."""

    program: Word
    """Empty for assignments or redirections alone."""
    options: tuple[tuple[str, Word | None], ...]
    """(canonical name, value or None); sorted unless their order matters. Empty where the program's options are not known."""
    operands: tuple[Operand, ...]
    """Arguments that are not options, in order unless their order cannot matter; all arguments in order where the options are not known."""
    is_parsed: bool
    """Whether the options were understood: apart from the rest, so that an unknown flag never equals an operand."""
    assignments: tuple[Assignment, ...] = ()
    redirects: tuple[Redirect, ...] = ()
    directory: str | None = None
    """Working directory, where it is known and matters to the program."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``a | b``, or ``! a``; a single stage without negation is no pipeline."""

    stages: tuple[Node, ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """``a && b || c``, left to right."""

    first: Node
    rest: tuple[tuple[str, Node], ...]
    """(``&&`` or ``||``, what runs then)."""


@dataclass(frozen=True, slots=True)
class Compound:
    """A group, subshell, loop, condition, test or function: its kind and its tokens in order."""

    kind: str
    children: tuple[Word | Node | Assignment, ...]
    redirects: tuple[Redirect, ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """Statements in order. ``;`` and a line break are the same separator; ``&`` is not."""

    statements: tuple[tuple[Node, bool], ...]
    """(statement, whether it runs in the background)."""
