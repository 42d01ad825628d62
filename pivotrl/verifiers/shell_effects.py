"""What canonical commands do to the machine, what they are aimed at, and which chains are only steps in a row. Pure; nothing is executed.

The table of destructive commands is `shell_commands` (every rule with `Effect.DESTROYS` or with `dangerous` options) plus what this file
adds: ``find -delete``, and redirections that truncate a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pivotrl.verifiers.shell_commands import BATCH_WITH_OPERANDS, COMMANDS, INTERACTIVE, QUESTIONS, SHARED_SUBCOMMANDS, CommandRule, Effect
from pivotrl.verifiers.shell_nodes import AndOr, Assignment, Command, Compound, Expanded, Node, Operand, Pipeline, Redirect, Script, Substitution

# Files whose truncation destroys nothing.
_SINKS = frozenset(("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty"))
_HARMLESS = frozenset(("echo", "find", "test", "true", "false", "env", "export", "printf", "date"))
_STEPS = frozenset(("cd", "export", "source", "echo", "", "set"))
_INTERPRETERS = frozenset(("python -c", "python3 -c"))

type Statement = tuple[Node, bool]


def effect(node: Node | Operand) -> Effect:
    """The worst that any command in `node` does, those inside substitutions and nested command lines included."""
    return max((_own_effect(command) for command in commands(node)), default=Effect.READS)


def commands(node: Node | Operand) -> Iterator[Command]:
    """Every command in `node`, in order, nested ones included."""
    match node:
        case Command():
            yield node
            for operand in (node.program, *node.operands, *(value for _, value in node.options)):
                # Most are plain words, which hold no command.
                if not isinstance(operand, str | None):
                    yield from commands(operand)
            for assignment in node.assignments:
                yield from commands(assignment)
            for redirect in node.redirects:
                if not isinstance(redirect.target, str):
                    yield from commands(redirect.target)
        case Script():
            for statement, _ in node.statements:
                yield from commands(statement)
        case Pipeline():
            for stage in node.stages:
                yield from commands(stage)
        case AndOr():
            yield from commands(node.first)
            for _, part in node.rest:
                yield from commands(part)
        case Compound():
            for child in node.children:
                yield from commands(child)
            if any(map(_truncates, node.redirects)):
                yield Command("", (), (), is_parsed=True, redirects=node.redirects)
        case Expanded():
            for part in node.parts:
                if isinstance(part, Substitution):
                    yield from commands(part.script)
        case Assignment(value=value):
            for word in value if isinstance(value, tuple) else (value,):
                yield from commands(word)
        case _:
            pass


def rule_of(command: Command) -> CommandRule | None:
    """The rule of a command, or None where it is not listed."""
    if not isinstance(command.program, str):
        return None
    program, _, subcommand = command.program.partition(" ")
    return COMMANDS.get(f"{SHARED_SUBCOMMANDS.get(program, program)} {subcommand}".strip())


def _own_effect(command: Command) -> Effect:
    if any(map(_truncates, command.redirects)):
        return Effect.DESTROYS
    own = _program_effect(command)
    return max(own, Effect.WRITES) if any(redirect.operator == ">>" for redirect in command.redirects) else own


def _program_effect(command: Command) -> Effect:
    if command.program == "find" and not {"-delete", "-exec", "-execdir", "-ok", "-fprint"}.isdisjoint(command.operands):
        return Effect.DESTROYS if "-delete" in command.operands or "rm" in command.operands else Effect.UNKNOWN
    if command.program in _HARMLESS or not command.program:
        return Effect.READS
    rule = rule_of(command)
    if rule is None:
        return Effect.UNKNOWN
    if not command.is_parsed:
        # Options that were not understood may do anything that the command can do.
        return max(rule.effect, Effect.DESTROYS if rule.dangerous else Effect.UNKNOWN)
    given = {name for name, _ in command.options}
    if given.intersection(rule.dangerous.split()):
        return Effect.DESTROYS
    return max(rule.effect, Effect.WRITES) if given.intersection(rule.writing.split()) else rule.effect


def _truncates(redirect: Redirect) -> bool:
    return redirect.operator in (">", ">|") and redirect.target not in _SINKS


def is_interactive(node: Node) -> bool:
    """Whether a statement leaves a program running that reads what is typed next."""
    last = node.stages[-1] if isinstance(node, Pipeline) else node.rest[-1][1] if isinstance(node, AndOr) and node.rest else node
    if not isinstance(last, Command):
        return False
    nested = [operand for operand in last.operands if isinstance(operand, Command)]
    if nested:
        return is_interactive(nested[-1])
    if last.program not in INTERACTIVE or any(redirect.descriptor == 0 for redirect in last.redirects):
        return False
    return not (last.program in BATCH_WITH_OPERANDS and last.operands)


def in_steps(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """``a && b`` as ``a; b`` where that is only how steps are written in a row.

    `a` must be a step (a change of directory, a listed command that writes, or one that looks without answering a question, as grep and
    test do), and `b` must not be destructive: ``cd x && rm -rf y`` and ``cd x; rm -rf y`` differ where x is missing.
    """
    split: list[Statement] = []
    for node, is_background in statements:
        while isinstance(node, AndOr) and not is_background and node.rest[0][0] == "&&" and _is_step(node.first):
            following = node.rest[0][1]
            if effect(following) is Effect.DESTROYS:
                break
            split.append((node.first, False))
            node = AndOr(following, node.rest[1:]) if len(node.rest) > 1 else following
        split.append((node, is_background))
    return tuple(split)


def _is_step(node: Node) -> bool:
    if not isinstance(node, Command) or not isinstance(node.program, str):
        return False
    if node.program in _STEPS:
        return True
    rule = rule_of(node)
    return rule is not None and node.program not in QUESTIONS and _own_effect(node) in (Effect.READS, Effect.WRITES)


def in_any_read_order(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Neighbouring statements that only look, in one fixed order."""
    ordered: list[Statement] = []
    run: list[Statement] = []
    for statement in statements:
        is_move = isinstance(statement[0], Command) and statement[0].program == "cd"
        if effect(statement[0]) is Effect.READS and not is_move:
            run.append(statement)
        else:
            ordered += [*sorted(run, key=repr), statement]
            run = []
    return (*ordered, *sorted(run, key=repr))


@dataclass(frozen=True, slots=True)
class Target:
    """What one command is aimed at, whatever its options."""

    program: str
    is_destructive: bool
    operands: tuple[str, ...]
    """Paths, patterns, names; text of inline code. Content that is written to a file is none of them."""


def targets(script: Script) -> tuple[Target, ...]:
    """What a script is aimed at, in order: programs with their files and patterns. Changes of directory and filters in a pipe are left out."""
    return tuple(target for node, _ in script.statements for target in _targets(node, is_piped=False))


def same_targets(first: tuple[Target, ...], second: tuple[Target, ...]) -> bool:
    """Whether two scripts are aimed at the same; a relative path is that of an absolute one that ends with it."""
    return len(first) == len(second) and all(_same_target(a, b) for a, b in zip(first, second, strict=True))


def _same_target(first: Target, second: Target) -> bool:
    if first.program != second.program or first.is_destructive != second.is_destructive or len(first.operands) != len(second.operands):
        return False
    return all(same_path(a, b) for a, b in zip(first.operands, second.operands, strict=True))


def same_path(first: str, second: str) -> bool:
    """Whether two texts are equal, or one is a relative path with which the other, an absolute one, ends.

    >>> same_path("src/a.py", "/app/src/a.py"), same_path("a.py", "/app/src/ba.py"), same_path("/a.py", "/app/a.py")
    (True, False, False)
    """
    if first == second:
        return True
    shorter, longer = sorted((first, second), key=len)
    return longer.startswith("/") and not shorter.startswith("/") and bool(shorter) and longer.endswith("/" + shorter)


def _targets(node: Node, *, is_piped: bool) -> Iterator[Target]:
    match node:
        case Pipeline():
            for place, stage in enumerate(node.stages):
                yield from _targets(stage, is_piped=place > 0)
        case AndOr():
            for part in (node.first, *(part for _, part in node.rest)):
                yield from _targets(part, is_piped=False)
        case Compound():
            for command in commands(node):
                yield from _command_targets(command)
        case Command():
            nested = [operand for operand in node.operands if isinstance(operand, Command | Script)]
            rule = rule_of(node)
            if nested:
                for inner in nested:
                    yield from targets(inner) if isinstance(inner, Script) else _targets(inner, is_piped=is_piped)
            elif not (is_piped and rule is not None and rule.is_filter and effect(node) is Effect.READS):
                yield from _command_targets(node)
        case _:
            pass


def _command_targets(command: Command) -> Iterator[Target]:
    writes = [redirect for redirect in command.redirects if redirect.operator in (">", ">>", ">|") and redirect.target not in _SINKS]
    bodies = [redirect for redirect in command.redirects if redirect.operator.startswith(("heredoc", "<<<"))]
    is_writer = bool(writes) and command.program in ("cat", "echo", "printf", "tee")
    if command.program not in ("cd", "") and not is_writer:
        values = [value for name, value in command.options if name == "e" and command.program != "sed" and value is not None]
        operands = [*values, *command.operands, *(redirect.target for redirect in bodies)]
        is_destructive = _program_effect(command) is Effect.DESTROYS
        program = command.program if isinstance(command.program, str) else repr(command.program)
        if program == "sed" and any(name == "i" for name, _ in command.options):
            program = "sed -i"
        yield Target(program, is_destructive, tuple(operand if isinstance(operand, str) else repr(operand) for operand in operands))
    for redirect in writes:
        target = redirect.target
        yield Target(redirect.operator.replace("|", ""), True, (target if isinstance(target, str) else repr(target),))
