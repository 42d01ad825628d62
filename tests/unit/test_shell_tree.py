"""Properties of canonical shell commands: quoting against its construction, layout against bash's own printer, hostile text."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.verifiers.shell_nodes import Command
from pivotrl.verifiers.shell_tree import canonical_command
from tests.unit.test_shell_pairs import DIFFERENT, EQUAL

_CHARACTERS = "ab1 -\"'$\\*?[]{},~#;&|<>()!`=\n\t"
_WORDS = st.lists(st.text(_CHARACTERS, min_size=1, max_size=8), min_size=1, max_size=5)


def _quoted(text: str, styles: list[int]) -> str:
    """`text` with each character quoted in one of three styles (`shlex` does not know that a backslash protects ``$`` in double quotes)."""
    pieces: list[str] = []
    for character, style in zip(text, styles, strict=False):
        if style == 0 and character != "'":
            pieces.append(f"'{character}'")
        elif (style == 1 and character not in "$`") or character in "'\n":
            pieces.append('"' + ("\\" if character in '"\\' else "") + character + '"')
        else:
            pieces.append("\\" + character)
    return "".join(pieces)


@settings(max_examples=80)
@given(words=_WORDS, data=st.data())
def test_quotes_are_removed_as_they_were_put(words: list[str], data: st.DataObject) -> None:
    styles = [data.draw(st.lists(st.integers(0, 2), min_size=len(word), max_size=len(word))) for word in words]
    text = "prog " + " ".join(_quoted(word, style) for word, style in zip(words, styles, strict=True))
    assert shlex.split(text)[1:] == words, "the standard library agrees with the construction"
    script = canonical_command(text)
    # Where the grammar fails on a word there is no form; a wrong form is what must not be.
    if script is not None:
        ((command, _),) = script.statements
        assert isinstance(command, Command)
        assert command.operands == tuple(words)


@settings(max_examples=100)
@given(words=_WORDS)
def test_the_usual_quoting_is_always_read(words: list[str]) -> None:
    script = canonical_command("prog " + shlex.join(words))
    assert script is not None
    ((command, _),) = script.statements
    assert isinstance(command, Command)
    assert command.operands == tuple(words)


def test_bash_prints_every_command_of_the_table_to_an_equal_one() -> None:
    """bash lays out a function's body by its own rules (`declare -f`); nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    texts = sorted(
        {text for pair in (*EQUAL, *DIFFERENT) for text in pair if text.strip() and not text.strip().startswith("#") and "<()" not in text}
    )
    definitions = "".join(f"f{index}() {{\n{text}\n}}\n" for index, text in enumerate(texts))
    script = definitions + f"for i in $(seq 0 {len(texts) - 1}); do declare -f f$i; printf '\\0'; done"
    printed = subprocess.run([bash, "--norc", "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    assert len(printed) == len(texts) + 1
    num_compared = 0
    for text, body in zip(texts, printed, strict=False):
        own, theirs = canonical_command(text), canonical_command(body.partition("{")[2].rpartition("}")[0])
        if theirs is not None:
            num_compared += 1
            assert own == theirs, text
    assert num_compared > 0.9 * len(texts)


_COMMANDS = st.sampled_from(["ls -la src", "cat 'a b' \"$x\"", "grep -rn foo . > out", "python a.py 2>&1", "echo $(pwd) {a,b}", "git diff --cached"])
_SEPARATORS = st.sampled_from([" && ", " || ", " | ", "; ", " & "])
_LAYOUTS = {
    "blanks": lambda text: text.replace(" && ", "  &&\t").replace("; ", "  ;  "),
    "line breaks": lambda text: text.replace("; ", "\n\n"),
    "continued": lambda text: text.replace(" && ", " && \\\n  ").replace(" || ", " \\\n || "),
    "comment": lambda text: text + "  # a comment",
    "comment in front": lambda text: "# first\n" + text,
    "trailing": lambda text: text + " \n\n",
    "no blanks": lambda text: text.replace(" && ", "&&").replace(" | ", "|").replace("; ", ";").replace(" & ", "&"),
}


@settings(max_examples=60)
@given(commands=st.lists(_COMMANDS, min_size=1, max_size=4), data=st.data(), layout=st.sampled_from(sorted(_LAYOUTS)))
def test_layout_does_not_count(commands: list[str], data: st.DataObject, layout: str) -> None:
    text = commands[0] + "".join(data.draw(_SEPARATORS) + command for command in commands[1:])
    form = canonical_command(text)
    assert form is not None
    assert canonical_command(_LAYOUTS[layout](text)) == form


@settings(max_examples=300)
@given(st.text(_CHARACTERS + "\u2028\ud800\0\r", max_size=40) | st.text(max_size=20))
def test_any_text_has_a_hashable_form_or_none(text: str) -> None:
    form = canonical_command(text)
    assert form is None or hash(form) == hash(canonical_command(text))
    other = canonical_command(text, "/app")
    assert other is None or form is not None


# Code points beyond Latin-1 behind a brace: the grammar's scanner alone would crash on them.
_FAR_CHARACTERS = "{\U000b0488", "!\u00d8:{\U00108712h", "{\U0007c436\U00080ace'\U0010c72d", "\u00ee5{\U0008c284^"


@pytest.mark.parametrize("text", _FAR_CHARACTERS)
def test_far_code_points_are_letters(text: str) -> None:
    assert canonical_command(text) == canonical_command(text)
    form = canonical_command(f"echo '{chr(0x108712)}'")
    assert form is not None
    assert form == canonical_command(f"echo {chr(0x108712)}")
    assert form != canonical_command(f"echo {chr(0x108713)}")
    for far in range(0x10000, 0x110000, 0x3333):
        canonical_command(f"{{{chr(far)}")


HOSTILE = {
    "10 MB": "x" * 10_000_000,
    "10 MB of words": "x " * 5_000_000,
    "10 MB of quotes": "'" * 10_000_000,
    "nested substitutions": "$(" * 20_000,
    "closed substitutions": "$(" * 39 + "a" + ")" * 39,
    "nested groups": "{ " * 20_000 + "a",
    "parentheses": "(" * 60_000,
    "backquotes": "`" * 60_000,
    "braces": "${" * 30_000,
    "redirections": ">" * 60_000,
    "inputs": "<" * 60_000,
    "pipes": "a|" * 30_000,
    "regular expressions": "[[ a =~ ( " * 6_000,
    "here-documents": "cat <<E\n" * 8_000,
    "unterminated quotes": 'echo "' + "a $x " * 10_000,
    "escapes": "\\ " * 30_000,
    "options": "ls -" + "l" * 60_000,
    "globs": "ls " + "*?[" * 20_000,
    "wrappers": "sudo " * 10_000 + "ls",
    "shells in shells": "bash -c " * 5_000 + "ls",
    "assignments": "a=1 " * 15_000 + "x",
    "chain": "a && " * 10_000 + "b",
    "statements": "a;" * 30_000,
    "blank lines": "\n" * 60_000 + "ls",
    "line separators": "ls\u2028" * 10_000,
    "nul": "ls\0" * 10_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_given_up(name: str) -> None:
    text = HOSTILE[name]
    form = canonical_command(text)
    assert form is None or hash(form) is not None
    assert canonical_command(text + " ") == form


def test_commands_of_a_hundred_lines_are_read() -> None:
    body = "\n".join(f"    print({index}, 'it''s', \"$x\")" for index in range(1500))
    text = f"cd /app && cat > a.py <<'EOF'\n{body}\nEOF\npython a.py"
    assert len(text) > 40_000
    form = canonical_command(text)
    assert form is not None
    assert form == canonical_command(text.replace("cat > a.py <<'EOF'", "cat <<'END' >a.py").replace("\nEOF\n", "\nEND\n"))
    assert form != canonical_command(text.replace("print(700,", "print(701,"))
