"""Canonical forms by kind: what is equal, what is not, how kinds are decided, and that hostile text costs a bounded time."""

from __future__ import annotations

from typing import get_args

import pytest
from fakes.processor_time import processor_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config.verifiers import ArgumentKind
from pivotrl.verifiers.argument_forms import canonical_form
from pivotrl.verifiers.argument_kinds import Kind, kind_by_name, kind_by_schema

EQUAL = {
    Kind.PATH: [("./src//main.py", "src/main.py"), ("/a/b/../c/", "/a/c"), ("C:\\Data\\x", "c:/data/x")],
    Kind.URL: [
        ("HTTP://Example.com:80", "http://example.com/"),
        ("www.example.com/a", "http://www.example.com/a"),
        ("http://a.com/%7Ex", "http://a.com/~x"),
        ("http://a.com/?b=1&a=2", "http://a.com/?a=2&b=1"),
        ("http://a.com/x/./y/../z", "http://a.com/x/z"),
    ],
    Kind.PAGE: [("https://www.a.com/b/#top", "http://a.com/b")],
    Kind.DATE: [
        ("2024-05-01", "20240501"),
        ("2024-05-01T10:00", "2024-05-01 10:00:00.000"),
        ("10:00", "10:00:00"),
        ("2024-05-01T10:00:00Z", "2024-05-01T12:00:00+02:00"),
    ],
    Kind.SQL: [
        ("select a,b from T where x=1 and y>2", "SELECT a, b\nFROM t WHERE 2 < y AND (x = 1);"),
        ("select count(*) from t -- all", "SELECT COUNT(*) FROM t"),
        ("select * from a inner join b on a.id=b.id", "SELECT * FROM a JOIN b ON b.id = a.id"),
        ("select a from t order by a asc", "select a from t order by a"),
        ("select a from t where w=3 and (y=2 and x in (1, 2))", "select a from t where x in (2,1) and y=2 and w=3"),
        ("select a as b from t as u where x <> 1", "select a b from t u where x != 1"),
    ],
    Kind.SHELL: [("ls -la 'src'", "ls -a -l src  # look"), ('grep -n "a" x', "grep -n a x")],
    Kind.REGEX: [("[a]b{1,}", "ab+"), ("(?:a)b", "ab"), ("[.]", r"\.")],
    Kind.EXPRESSION: [("158+141", "141 + 158"), ("(350 - 122) * 2.0 + 3", "3 + 2*(350-122)")],
    Kind.EMAIL: [("Ann@Example.COM", "ann@example.com")],
    Kind.UUID: [("{00000000-0000-0000-0000-00000000ABCD}", "0000000000000000000000000000abcd")],
}
DIFFERENT = {
    Kind.PATH: [("src/main.py", "/src/main.py"), ("a/B", "a/b"), ("../a", "a"), ("~/a", "a")],
    Kind.URL: [
        ("http://a.com/a", "http://a.com/A"),
        ("http://a.com/a%2Fb", "http://a.com/a/b"),
        ("https://a.com", "http://a.com"),
        ("http://a.com", "http://a.com.evil.org"),
        ("http://a.com@evil.org", "http://a.com"),
        ("http://a.com/?a=1", "http://a.com/?a=2"),
        ("http://a.com/#x", "http://a.com/#y"),
    ],
    Kind.PAGE: [("http://a.com/b", "http://a.com/c"), ("http://a.com/b?x=1", "http://a.com/b")],
    Kind.DATE: [("2024-05-01", "2024-05-02"), ("2024-05-01T10:00:00Z", "2024-05-01T10:00:00"), ("2024-05-01", "2024-05-01T00:01")],
    Kind.SQL: [
        ("select a from t where x=1 or y=2 and z=3", "select a from t where (x=1 or y=2) and z=3"),
        ("select a from t where x='A'", "select a from t where x='a'"),
        ("select a,b from t", "select b,a from t"),
        ("select a from t order by a desc", "select a from t order by a"),
        ("select a from t limit 1", "select a from t limit 2"),
        ("select a from t where x > 1", "select a from t where x < 1"),
        ("select a from t left join b on t.x=b.x", "select a from t join b on t.x=b.x"),
        ("select a-(b-c) from t", "select a-b-c from t"),
        ("select distinct a from t", "select a from t"),
        ("select a from t where not (x=1 and y=2)", "select a from t where not x=1 and y=2"),
        ("select a from t where x in (1)", "select a from t where x not in (1)"),
        ("drop table a", "drop table b"),
        ("delete from t where id=1", "select * from t where id=1"),
        ("select 1; drop table a", "select 1"),
    ],
    Kind.SHELL: [("rm -rf /tmp x", "ls -la /tmp"), ("ls a b", "ls b"), ("a && b", "a || b"), ("cat a > b", "cat a >> b")],
    Kind.REGEX: [("a|b", "a"), ("(?i)a", "a"), ("a+", "a+?"), ("(a)", "a"), ("(?P<x>a)", "(?P<y>a)")],
    Kind.EXPRESSION: [("1-2", "2-1"), ("175 + 200", "375"), ("2*3+4", "2*(3+4)")],
    Kind.EMAIL: [("a@b.c", "a@b.d")],
}


@pytest.mark.parametrize(("kind", "first", "second"), [(kind, *pair) for kind, pairs in EQUAL.items() for pair in pairs])
def test_equal(kind: Kind, first: str, second: str) -> None:
    assert canonical_form(kind, first) == canonical_form(kind, second) is not None


@pytest.mark.parametrize(("kind", "first", "second"), [(kind, *pair) for kind, pairs in DIFFERENT.items() for pair in pairs])
def test_different(kind: Kind, first: str, second: str) -> None:
    forms = canonical_form(kind, first), canonical_form(kind, second)
    assert None not in forms
    assert forms[0] != forms[1]


HOSTILE_PIECES = [
    "(",
    ")",
    "[",
    "a",
    "1",
    ".",
    "/",
    "%",
    "*",
    "+",
    "\\",
    "select ",
    "from ",
    "case ",
    "not ",
    "-",
    "'",
    '"',
    " ",
    "{",
    ":",
    "@",
    "\u0130",
]


@pytest.mark.parametrize("kind", list(Kind))
@settings(max_examples=150)
@given(pieces=st.lists(st.sampled_from(HOSTILE_PIECES), max_size=40), text=st.text(max_size=30))
def test_any_text_gets_an_answer(kind: Kind, pieces: list[str], text: str) -> None:
    for hostile in ("".join(pieces), text):
        form = canonical_form(kind, hostile)
        assert form is None or form == canonical_form(kind, hostile)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    "piece", ["(", "((1", "1+", "a.", "not ", "case when 1 then ", "- ", "[a", "select ", "(?:a", "a{1,2}", "../", "%41", "a=1&", "1-a-"]
)
def test_repeated_pieces_stay_within_the_time_bound(kind: Kind, piece: str) -> None:
    """A second of CPU is far above the stated bound of a tenth, so that a busy machine is no failure, and far below quadratic trouble."""
    for length in (100, 1_990, 100_000):
        text = (piece * length)[:length]
        hostile = f"select {text}" if kind is Kind.SQL else text
        assert processor_seconds(lambda hostile=hostile: canonical_form(kind, hostile))[0] < 1


@pytest.mark.parametrize(
    ("name", "tool", "kind"),
    [
        ("sourceUrl", "fetch", Kind.URL),
        ("order_id", "cancel", Kind.EXACT),
        ("item_ids", "exchange", Kind.EXACT),
        ("file_path", "read_file", Kind.PATH),
        ("file_text", "create", Kind.CODE),
        ("content", "write_file", Kind.CODE),
        ("content", "send_mail", Kind.TEXT),
        ("start_time", "book", Kind.DATE),
        ("userEmail", "invite", Kind.EMAIL),
        ("sql_query", "run", Kind.SQL),
        ("query", "search", Kind.QUERY),
        ("command", "bash", Kind.SHELL),
        ("colour", "paint", Kind.PLAIN),
        ("", "paint", Kind.PLAIN),
        ("\u2028" * 5, "paint", Kind.PLAIN),
    ],
)
def test_a_name_hints_at_a_kind(name: str, tool: str, kind: Kind) -> None:
    assert kind_by_name(name, tool) is kind


def test_a_schema_states_a_kind() -> None:
    assert kind_by_schema({"format": "date-time"}) is Kind.DATE
    assert kind_by_schema({"format": "some-new-format"}) is Kind.EXACT
    assert kind_by_schema({"contentMediaType": "application/json"}) is Kind.JSON
    assert kind_by_schema({"type": "string"}) is None


def test_a_recipe_can_name_every_kind() -> None:
    def literals(annotation: object) -> set[str]:
        parts = get_args(getattr(annotation, "__value__", annotation))
        return {part for part in parts if isinstance(part, str)} | {name for part in parts if not isinstance(part, str) for name in literals(part)}

    assert literals(ArgumentKind) == set(Kind)
