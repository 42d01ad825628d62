"""The judge's answers on disk, shared by processes that write at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from pivotrl.verifiers.judge.cache import Answer, AnswerCache


def _write_many(directory: Path, text: str) -> None:
    cache = AnswerCache(directory)
    for index in range(60):
        cache.put(f"{index % 5:04d}", Answer(text, index, 0))


def test_processes_share_a_cache_without_torn_answers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    texts = ["a" * 50_000, "b" * 70_000]
    writers = [context.Process(target=_write_many, args=(tmp_path, text)) for text in texts]
    for writer in writers:
        writer.start()
    cache, seen = AnswerCache(tmp_path), 0
    while any(writer.is_alive() for writer in writers):
        for index in range(5):
            answer = cache.get(f"{index:04d}")
            seen += answer is not None
            assert answer is None or answer.text in texts
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen > 0
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [f"{index:04d}.json" for index in range(5)]
