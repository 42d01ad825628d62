"""Judge answers on disk, by content hash: one small file per answer, written whole or not at all, shared by any number of processes.

A resumed stage asks for what it has asked before and gets the same answers, so it ends with the same bytes. Entries never expire: the key
holds everything an answer depends on.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

_SHARD_DIGITS = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint returned for one question."""

    text: str
    prompt_tokens: int
    """As the endpoint counts them; 0 where it does not say."""
    completion_tokens: int


class AnswerCache:
    """A directory of answers.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = AnswerCache(Path(folder))
    ...     cache.put("ab12", Answer("VERDICT: SAME", 90, 4))
    ...     cache.get("ab12"), cache.get("ab13")
    (Answer(text='VERDICT: SAME', prompt_tokens=90, completion_tokens=4), None)
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> Answer | None:
        """The stored answer. An entry that cannot be read (a disk that lost it) counts as absent and is asked for again."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Answer(**orjson.loads(self._path(key).read_bytes()))
        return None

    def put(self, key: str, answer: Answer) -> None:
        """Stores an answer; of two writers of one key the last wins, and readers see one of the two, whole.

        Raises:
            OSError: where the directory cannot be written.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own per writer, where `rundir.atomic_write` has one per file: several processes may share the directory.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(orjson.dumps(asdict(answer)))
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        return self._directory / key[:_SHARD_DIGITS] / f"{key}.json"
