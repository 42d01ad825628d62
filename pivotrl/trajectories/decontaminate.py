"""Keeps benchmark tasks out of the training data: trajectories that match a list of task ids or n-grams are dropped and counted.

The list is a JSON file {"task_ids": [...], "ngrams": [...]}; an n-gram is a phrase, matched by its words regardless of case and punctuation.
Called by `ingest.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pivotrl.errors import UserError
from pivotrl.trajectories.shingles import Hashes, ngram_hashes, word_hashes

_RULE = 'the file holds {"task_ids": [strings], "ngrams": [strings]}, either of which may be left out'


@dataclass(frozen=True, slots=True)
class DecontaminationList:
    """What must not be trained on. N-grams are held as hashes by their number of words, so that a list of any length costs one pass per length."""

    task_ids: frozenset[str]
    ngrams: dict[int, Hashes]

    @staticmethod
    def load(path: Path) -> DecontaminationList:
        """Reads the list.

        Raises:
            UserError: where the file is missing, of another shape, or holds an n-gram without a word.
        """
        try:
            value = orjson.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise UserError(f"decontamination list {path} does not exist", rule=_RULE, fix="correct ingest.decontamination") from error
        except (OSError, orjson.JSONDecodeError) as error:
            raise UserError(f"decontamination list {path} cannot be read: {error}", rule=_RULE, fix="correct the file") from error
        if not isinstance(value, dict) or not value.keys() <= {"task_ids", "ngrams"}:
            raise UserError(f"decontamination list {path} is not an object with these two keys", rule=_RULE, fix="correct the file")
        return DecontaminationList.of(_strings(value, "task_ids", path), _strings(value, "ngrams", path))

    @staticmethod
    def of(task_ids: Sequence[str], ngrams: Sequence[str]) -> DecontaminationList:
        """The list of these ids and phrases.

        Raises:
            UserError: for a phrase without a word, which every text would match.
        """
        by_length: dict[int, list[int]] = {}
        for phrase in ngrams:
            words_W = word_hashes(phrase.encode("utf-8", "replace"))
            if not len(words_W):
                raise UserError(f"decontamination n-gram {phrase!r} has no word", rule="an n-gram is a phrase of words", fix="remove it")
            by_length.setdefault(len(words_W), []).append(int(ngram_hashes(words_W, num_words=len(words_W))[0]))
        return DecontaminationList(frozenset(task_ids), {length: np.array(hashes, np.uint64) for length, hashes in sorted(by_length.items())})

    def match(self, task_id: str, text: bytes) -> str | None:
        """The countable reason why a trajectory is contaminated, or None."""
        if task_id in self.task_ids:
            return "decontamination: task id"
        if not self.ngrams:
            return None
        words_W = word_hashes(text)
        for length, hashes in self.ngrams.items():
            if np.isin(ngram_hashes(words_W, num_words=length), hashes).any():
                return "decontamination: n-gram"
        return None


def _strings(value: dict[str, Any], key: str, path: Path) -> list[str]:
    entries = value.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UserError(f"decontamination list {path}: {key} is not a list of strings", rule=_RULE, fix="correct the file")
    return entries
