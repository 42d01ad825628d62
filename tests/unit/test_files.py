"""Reading whatever lies on disk: every broken byte becomes a reason with file and line, and what can be read is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from pivotrl.trajectories import files, streams
from pivotrl.trajectories.files import array_rows, discover, document_rows, head_value, json_document, jsonl_rows, probe, record_rows
from pivotrl.trajectories.parsing import REPAIR_NOT_A_NUMBER, REPAIR_NUMBER_RANGE, REPAIR_SURROGATE, parse_json
from pivotrl.trajectories.source import RawRow, RowQuarantined, SourceUnit


def unit(path: Path) -> SourceUnit:
    return SourceUnit((path,), path.name)


def write(path: Path, data: bytes) -> SourceUnit:
    path.write_bytes(data)
    return unit(path)


def values(rows: Any) -> list[Any]:
    return [row.value if isinstance(row, RawRow) else (row.line, row.reason) for row in rows]


class TestDiscovery:
    def test_sorts_skips_hidden_and_other_files_and_counts_them(self, tmp_path: Path) -> None:
        for name in ("b.jsonl", "a/z.json", "a/b.traj", "a/c.jsonl.gz", "notes.md", ".hidden.json", ".git/x.json"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")
        found = discover([tmp_path])
        assert [file.name for file in found.files] == ["a/b.traj", "a/c.jsonl.gz", "a/z.json", "b.jsonl"]
        assert found.skipped == {"hidden": 2, "not a data file (.md)": 1}

    def test_a_named_file_is_taken_whatever_its_suffix(self, tmp_path: Path) -> None:
        (tmp_path / "rows.txt").write_text("{}")
        assert [file.name for file in discover([tmp_path / "rows.txt"]).files] == ["rows.txt"]

    def test_two_directories_keep_their_names_apart(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "rows.jsonl").write_text("{}")
        assert [file.name for file in discover([tmp_path / "one", tmp_path / "two"]).files] == ["one/rows.jsonl", "two/rows.jsonl"]

    def test_a_file_named_twice_is_read_once(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text("{}")
        found = discover([tmp_path, tmp_path / "rows.jsonl"])
        assert len(found.files) == 1
        assert found.skipped == {"file reached twice": 1}

    def test_link_loops_end(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "rows.jsonl").write_text("{}")
        (tmp_path / "data" / "up").symlink_to(tmp_path / "data")
        (tmp_path / "data" / "self.json").symlink_to("self.json")
        (tmp_path / "data" / "gone.json").symlink_to("nowhere.json")
        found = discover([tmp_path / "data"])
        assert [file.name for file in found.files] == ["rows.jsonl"]
        assert found.skipped == {"directory reached twice through a link": 1, "broken link": 2}

    def test_a_directory_named_like_a_file_is_walked_and_a_pipe_is_never_opened(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").mkdir()
        (tmp_path / "x.json" / "rows.jsonl").write_text("{}")
        os.mkfifo(tmp_path / "pipe.json")
        found = discover([tmp_path])
        assert [file.name for file in found.files] == ["x.json/rows.jsonl"]
        assert found.skipped == {"not a regular file": 1}


class TestProbe:
    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "empty file"),
            (b" \n\t\n", "empty file"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-LFS pointer, not the data: run `git lfs pull`"),
            (b"\x7fELF\x02\x01\x01\x00\x00\x00", "binary file"),
            (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "binary file"),
            (b"<html>", "not JSON: the first character is neither { nor ["),
            ("{}".encode("utf-16"), "UTF-16 text: convert it to UTF-8"),
            (b"\x1f\x8b\x08\x00\x00", "truncated compressed file"),
        ],
    )
    def test_a_file_without_json_says_what_it_is(self, tmp_path: Path, data: bytes, reason: str) -> None:
        write(tmp_path / "x.json", data)
        with pytest.raises(RowQuarantined) as caught:
            probe(tmp_path / "x.json", tmp_path)
        assert caught.value.reason == reason
        assert caught.value.file == "x.json"

    def test_an_unreadable_file_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Permissions are simulated because tests may run as root."""

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        (tmp_path / "x.json").write_text("{}")
        monkeypatch.setattr(streams, "_MeteredFile", refuse)
        with pytest.raises(RowQuarantined, match="unreadable: permission denied"):
            probe(tmp_path / "x.json", tmp_path)

    def test_first_row_of_lines_documents_and_truncated_heads(self, tmp_path: Path) -> None:
        write(tmp_path / "lines.jsonl", b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
        assert probe(tmp_path / "lines.jsonl", tmp_path).first_row == {"a": 1}
        write(tmp_path / "doc.json", json.dumps({"a": [{"b": 1}]}, indent=2).encode())
        assert probe(tmp_path / "doc.json", tmp_path).first_row == {"a": [{"b": 1}]}
        write(tmp_path / "long.json", json.dumps({"a": 1, "rows": [{"b": "x" * 100}] * 1000}, indent=1).encode())
        long = probe(tmp_path / "long.json", tmp_path)
        assert long.first_row is None
        assert len(long.head) == files.HEAD_BYTES
        shown = head_value(long)
        assert shown["a"] == 1
        assert shown["rows"][0] == {"b": "x" * 100}

    def test_a_broken_first_line_does_not_hide_the_others(self, tmp_path: Path) -> None:
        write(tmp_path / "x.jsonl", b'{"a": \n{"a": 2}\n')
        assert probe(tmp_path / "x.jsonl", tmp_path).first_row == {"a": 2}

    def test_suffix_is_that_of_the_data(self, tmp_path: Path) -> None:
        (tmp_path / "x.JSONL.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
        seen = probe(tmp_path / "x.JSONL.gz", tmp_path)
        assert (seen.suffix, seen.first_row) == (".jsonl", {"a": 1})


class TestLines:
    def test_good_lines_survive_broken_ones_with_their_numbers(self, tmp_path: Path) -> None:
        data = b'{"a": 1}\r\n\n{"a": \n{"a": "\xff"}\n{"a": "x\x00"}\n' + b'{"a":' * 100_000 + b'\n{"a": 2}'
        rows = list(jsonl_rows(write(tmp_path / "x.jsonl", data)))
        assert [(row.index, row.line, row.value) for row in rows if isinstance(row, RawRow)] == [(0, 1, {"a": 1}), (5, 7, {"a": 2})]
        broken = {row.line: row.reason for row in rows if isinstance(row, RowQuarantined)}
        assert broken[3].startswith("invalid JSON: ")
        assert broken[4] == "not UTF-8: byte 7"
        assert broken[5] == "NUL byte at byte 8"
        assert broken[6] == "nested deeper than 1,024 levels"
        assert str(next(row for row in rows if isinstance(row, RowQuarantined))).startswith("x.jsonl:3: invalid JSON")

    def test_line_separators_of_unicode_are_text(self, tmp_path: Path) -> None:
        rows = values(jsonl_rows(write(tmp_path / "x.jsonl", '{"a": "b\u2028c\u2029d\u0085e"}\n'.encode())))
        assert rows == [{"a": "b\u2028c\u2029d\u0085e"}]

    def test_a_line_of_50_mb_is_legal(self, tmp_path: Path) -> None:
        text = "x" * 50_000_000
        rows = values(jsonl_rows(write(tmp_path / "x.jsonl", b'{"a": "' + text.encode() + b'"}\n{"a": 2}\n')))
        assert rows == [{"a": text}, {"a": 2}]

    def test_a_line_beyond_the_limit_is_skipped_without_being_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "MAX_ROW_BYTES", 1 << 20)
        data = b'{"a": 1}\n{"a": "' + b"x" * (3 << 20) + b'"}\n{"a": 2}\n'
        assert values(jsonl_rows(write(tmp_path / "x.jsonl", data))) == [{"a": 1}, (2, "a line of more than 1 MiB"), {"a": 2}]

    @pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
    def test_compression_is_known_by_its_bytes(self, tmp_path: Path, compress: Any) -> None:
        data = b'{"a": 1}\n' + orjson.dumps({"a": "x" * 3_000_000}) + b'\n{"a": 2}\n'
        assert [row["a"] for row in values(jsonl_rows(write(tmp_path / "x.jsonl", compress(data))))] == [1, "x" * 3_000_000, 2]

    def test_truncated_gzip_gives_what_came_before(self, tmp_path: Path) -> None:
        lines = b"".join(orjson.dumps({"a": os.urandom(64).hex()}) + b"\n" for _ in range(200))
        rows = values(jsonl_rows(write(tmp_path / "x.jsonl.gz", gzip.compress(lines)[:-300])))
        assert rows[-1] == (None, "truncated compressed file")
        assert rows[0] == orjson.loads(lines.split(b"\n")[0])

    def test_corrupt_gzip_is_quarantined(self, tmp_path: Path) -> None:
        data = bytearray(gzip.compress(os.urandom(5000)))
        data[1000:1100] = bytes(100)
        (row,) = values(jsonl_rows(write(tmp_path / "x.jsonl.gz", bytes(data))))[-1:]
        assert isinstance(row, tuple)
        assert not any(part in row[1] for part in (str(tmp_path), "/"))

    def test_a_decompression_bomb_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streams, "HARMLESS_BYTES", 1 << 20)
        bomb = gzip.compress(b" " * (64 << 20))
        assert values(jsonl_rows(write(tmp_path / "x.jsonl.gz", bomb))) == [(None, "decompression bomb: grows more than 200 times")]


class TestArrays:
    def test_elements_and_shared_values(self, tmp_path: Path) -> None:
        at = write(tmp_path / "x.json", orjson.dumps({"info": {"k": 1}, "rows": [{"a": 1}, {"a": 2.5}], "late": "z"}))
        rows = [row for row in array_rows(at, key="rows", shared_keys=("info", "late", "absent")) if isinstance(row, RawRow)]
        assert [(row.index, row.value, row.shared) for row in rows] == [
            (i, {"a": a}, {"info": {"k": 1}, "late": "z"}) for i, a in enumerate((1, 2.5))
        ]
        assert values(array_rows(write(tmp_path / "y.json", b"[1, 2]"))) == [1, 2]

    def test_streaming_gives_the_same_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at = write(
            tmp_path / "x.json", orjson.dumps({"info": {"k": 1}, "rows": [{"a": i, "b": [i / 7, None, "\u2028"]} for i in range(500)], "late": "z"})
        )
        whole = list(array_rows(at, key="rows", shared_keys=("info", "late")))
        monkeypatch.setattr(files, "WHOLE_DOCUMENT_BYTES", 100)
        assert list(array_rows(at, key="rows", shared_keys=("info", "late"))) == whole

    def test_a_break_half_way_keeps_the_leading_elements(self, tmp_path: Path) -> None:
        rows = values(array_rows(write(tmp_path / "x.json", b'[{"a": 1}, {"a": 2}, {"a": ')))
        assert rows[:2] == [{"a": 1}, {"a": 2}]
        assert rows[2][1].startswith("invalid JSON: ")

    @pytest.mark.parametrize(("data", "key"), [(b'{"rows": 3}', "rows"), (b"[]", "rows"), (b'{"a": []}', None), (b'"x"', None)])
    def test_no_array_is_a_wrong_schema(self, tmp_path: Path, data: bytes, key: str | None) -> None:
        (row,) = values(array_rows(write(tmp_path / "x.json", data), key=key))
        assert row[1].startswith("wrong schema: ")


class TestRecords:
    @pytest.mark.parametrize(
        ("name", "data", "expected"),
        [
            ("x.json", b'[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
            ("x.jsonl", b'[{"a": 1}]', [{"a": 1}]),
            ("x.json", b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
            ("x.jsonl", b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
            ("x.json", b'{"a": 1}', [{"a": 1}]),
            ("x.jsonl", b'{\n  "a": 1\n}\n', [{"a": 1}]),
            ("x.json", b'\xef\xbb\xbf\n {"a": 1}', [{"a": 1}]),
        ],
    )
    def test_the_form_is_read_from_the_content(self, tmp_path: Path, name: str, data: bytes, expected: list[Any]) -> None:
        assert values(record_rows(write(tmp_path / name, data))) == expected

    def test_document_rows_name_the_file(self, tmp_path: Path) -> None:
        (row,) = document_rows(write(tmp_path / "x.json", b'{"a": '))
        assert isinstance(row, RowQuarantined)
        assert row.file == "x.json"
        with pytest.raises(RowQuarantined, match=r"^x\.json: invalid JSON"):
            json_document(unit(tmp_path / "x.json"))


class TestParsing:
    @pytest.mark.parametrize(
        ("data", "value", "repairs"),
        [
            (b'{"a": 1, "a": 2}', {"a": 2}, ()),
            (
                rb'{"a": "x\ud800y", "b\udc00": ["\ud83d\ude00", "\ud800"]}',
                {"a": "x\ufffdy", "b\ufffd": ["\U0001f600", "\ufffd"]},
                (REPAIR_SURROGATE,),
            ),
            (b'{"a": NaN, "b": -Infinity, "c": 1e999}', {"a": None, "b": None, "c": None}, (REPAIR_NOT_A_NUMBER,)),
            (
                b"[NaN, 123456789012345678901234567890, 18446744073709551615]",
                [None, 1.2345678901234568e29, 18446744073709551615],
                (REPAIR_NOT_A_NUMBER, REPAIR_NUMBER_RANGE),
            ),
        ],
    )
    def test_what_orjson_refuses_is_repaired_and_named(self, data: bytes, value: Any, repairs: tuple[str, ...]) -> None:
        parsed = parse_json(data)
        assert parsed.value == value
        assert parsed.repairs == repairs

    def test_integers_of_more_digits_than_python_reads_are_not_a_crash(self) -> None:
        assert parse_json(b"[NaN, " + b"1" * 5000 + b"]").value == [None, None]
