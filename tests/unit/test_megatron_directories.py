"""Directories that appear whole: what readers see before, after, and after a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from pivotrl.megatron.directories import atomic_directory, is_complete


def test_a_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result"
    with atomic_directory(path) as temporary:
        (temporary / "data").write_text("new")
        assert not path.exists()
    assert is_complete(path)
    assert (path / "data").read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["result"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result"
    with atomic_directory(path) as temporary:
        (temporary / "data").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        _write_and_fail(path)
    assert (path / "data").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]


def _write_and_fail(path: Path) -> None:
    with atomic_directory(path) as temporary:
        (temporary / "data").write_text("new")
        raise OSError("disk full")


def test_leftovers_of_a_kill_do_not_count_and_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result"
    with atomic_directory(path) as temporary:
        (temporary / "data").write_text("1")
        assert not is_complete(temporary)
    (tmp_path / ".result.tmp").mkdir()
    (tmp_path / ".result.tmp" / "_SUCCESS").touch()
    assert not is_complete(tmp_path / ".result.tmp")
    with atomic_directory(path) as temporary:
        assert not list(temporary.iterdir())
    assert not (path / "data").exists()
