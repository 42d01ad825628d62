"""Sketches against similarities counted by hand, and lists of forbidden text against plain Python."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.errors import UserError
from pivotrl.trajectories.decontaminate import DecontaminationList
from pivotrl.trajectories.dedupe import SAID_SKETCH_SIZE, Fingerprint, IdSet, NearDuplicates, fingerprints, similarity
from pivotrl.trajectories.shingles import Hashes, ngram_hashes, shingle_hashes, word_hashes

VOCABULARY = [f"w{number}" for number in range(5000)]


def text(rng: random.Random, num_words: int) -> list[str]:
    return rng.choices(VOCABULARY, k=num_words)


def changed(words: list[str], rng: random.Random, num_changes: int) -> list[str]:
    copy = list(words)
    for index in rng.sample(range(len(copy)), num_changes):
        copy[index] = f"new{rng.randrange(10**9)}"
    return copy


def mark(words: list[str], seen: str = "") -> Fingerprint:
    (one,) = fingerprints([(" ".join(words).encode(), seen.encode())])
    return one


def shingles(words: list[str]) -> set[str]:
    """The definition, written out: the 32 bytes from the start of each word."""
    whole = " ".join(words)
    return {whole[match.start() : match.start() + 32] for match in re.finditer(r"\w+", whole)}


def jaccard(a: list[str], b: list[str]) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


class TestHashes:
    @given(st.text(alphabet="abcXYZ_09 -.\n\u00e9\u4e2d", max_size=400))
    def test_words_are_those_of_the_definition(self, source: str) -> None:
        data = source.encode()
        words = re.findall(rb"[a-z0-9_\x80-\xff]+", data.lower())
        hashes = word_hashes(data)
        assert len(hashes) == len(words)
        for (word, one), (other, two) in pairwise(zip(words, hashes.tolist(), strict=True)):
            assert (word == other) == (one == two)
        assert len(shingle_hashes([data])[0]) == len(words)

    @pytest.mark.parametrize("hashes_of", [word_hashes, lambda data: shingle_hashes([data])[0]])
    def test_blocks_do_not_show(self, hashes_of: Callable[[bytes], Hashes]) -> None:
        words = " ".join(text(random.Random(1), 60_000)).encode()
        assert len(words) > 2 << 17
        first, second = words[: len(words) // 2], words[len(words) // 2 :]
        whole = set(hashes_of(words).tolist())
        # All but the pieces at the cut.
        assert len(whole - set(hashes_of(first).tolist()) - set(hashes_of(second).tolist())) <= 8

    def test_texts_hashed_together_are_hashed_alike(self) -> None:
        rng = random.Random(3)
        texts = [" ".join(text(rng, num_words)).encode() for num_words in (0, 1, 600, 3, 0, 513, 512, 30_000, 2, 1)]
        assert sum(map(len, texts)) > 1 << 17
        together = shingle_hashes(texts)
        assert [hashes.tolist() for hashes in together] == [shingle_hashes([one])[0].tolist() for one in texts]
        # A quarter of the longer texts' words, all of the shorter ones'.
        assert [len(hashes) for hashes in together if len(hashes) <= 512] == [0, 1, len(together[2]), 3, 0, len(together[5]), 512, 2, 1]
        assert 6500 < len(together[7]) < 8500

    def test_ngrams_ignore_case_and_punctuation(self) -> None:
        first, second = (word_hashes(data) for data in (b"The quick, brown fox!", b"the QUICK\n(brown) fox"))
        assert ngram_hashes(first, num_words=3).tolist() == ngram_hashes(second, num_words=3).tolist()
        assert len(ngram_hashes(first, num_words=5)) == 0

    def test_long_words_differ_by_their_middle(self) -> None:
        assert len(set(word_hashes(b"a" * 30 + b" " + b"a" * 14 + b"b" + b"a" * 15).tolist())) == 2


class TestSimilarity:
    @pytest.mark.parametrize(("num_words", "num_changes"), [(1, 0), (20, 1), (100, 1), (100, 30)])
    def test_exact_for_short_texts(self, num_words: int, num_changes: int) -> None:
        rng = random.Random(num_words)
        a = text(rng, num_words)
        b = changed(a, rng, num_changes)
        assert similarity(mark(a).said, mark(b).said, size=SAID_SKETCH_SIZE) == jaccard(a, b)

    @pytest.mark.parametrize("num_changes", [15, 60, 300])
    def test_close_for_long_texts(self, num_changes: int) -> None:
        rng = random.Random(num_changes)
        errors = []
        for _ in range(30):
            a = text(rng, 3000)
            b = changed(a, rng, num_changes)
            errors.append(similarity(mark(a).said, mark(b).said, size=SAID_SKETCH_SIZE) - jaccard(a, b))
        # Standard error of one estimate is at most sqrt(0.25 / 128) = 0.044; of the mean of 30, 0.008.
        assert abs(float(np.mean(errors))) < 0.035
        assert float(np.std(errors)) < 0.06

    def test_form_on_disk(self) -> None:
        for words in (3, 2000):
            one = mark(text(random.Random(words), words), "seen by the tool")
            again = Fingerprint.from_bytes(one.to_bytes())
            assert again.to_bytes() == one.to_bytes()
            assert again.seen.num_shingles == 4


class TestNearDuplicates:
    @pytest.mark.parametrize("num_words", [60, 300, 5000])
    def test_finds_copies_with_one_word_changed_among_many(self, num_words: int) -> None:
        rng = random.Random(num_words)
        kept = NearDuplicates(0.8)
        texts = [text(rng, num_words) for _ in range(300)]
        assert all(kept.admit(mark(words), group=0) for words in texts)
        assert sum(kept.admit(mark(changed(words, rng, 1)), group=0) for words in texts) <= 3
        assert sum(kept.admit(mark(changed(words, rng, num_words // 3)), group=0) for words in texts[:50]) == 50

    def test_what_tools_answered_must_be_alike_too(self) -> None:
        rng = random.Random(0)
        said, seen = text(rng, 200), " ".join(text(rng, 500))
        kept = NearDuplicates(0.9)
        assert kept.admit(mark(said, seen), group=0)
        assert kept.admit(mark(said, " ".join(text(rng, 500))), group=0)
        assert not kept.admit(mark(said, seen + " more"), group=0)
        # And a long tool answer does not make two agents alike.
        assert kept.admit(mark(text(rng, 200), seen), group=0)

    def test_groups_are_apart(self) -> None:
        words = text(random.Random(0), 100)
        kept = NearDuplicates(0.9)
        assert kept.admit(mark(words), group=0)
        assert kept.admit(mark(words), group=1)
        assert not kept.admit(mark(words), group=1)

    def test_growth_keeps_everything(self) -> None:
        rng = random.Random(5)
        kept = NearDuplicates(0.95)
        marks = [mark(text(rng, 40)) for _ in range(2500)]
        for one in marks:
            kept.add(one, group=0)
        assert len(kept) == 2500
        assert not any(kept.admit(one, group=0) for one in marks)

    def test_memory_is_a_few_hundred_bytes_each(self) -> None:
        kept = NearDuplicates(0.95)
        arrays = [value for value in vars(kept).values() if isinstance(value, np.ndarray)] + [*kept._sketches, *kept._sizes]
        assert sum(array.nbytes for array in arrays) / 1024 < 1000

    def test_a_crowded_band_is_bounded_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hundreds of kept texts in the same bands (their sketches differ) cost at most 64 comparisons."""
        kept = NearDuplicates(0.95)
        one = mark(text(random.Random(1), 500))
        for number in range(300):
            other = mark(text(random.Random(number + 2), 500))
            kept.add(Fingerprint(other.said, other.seen, one.bins_M), group=0)
        compared: list[int] = []

        def count(_: Fingerprint, candidates: list[int]) -> list[int]:
            compared.extend(candidates)
            return []

        monkeypatch.setattr(kept, "_promising", count)
        assert kept.admit(one, group=0)
        assert len(compared) == 64

    @settings(max_examples=30)
    @given(st.integers(0, 2**32), st.sampled_from([8, 100, 129, 900]), st.floats(0.3, 0.95))
    def test_the_first_look_misses_nothing(self, seed: int, num_words: int, threshold: float) -> None:
        rng = random.Random(seed)
        words = text(rng, num_words)
        one, other = mark(words), mark(changed(words, rng, rng.randrange(1 + num_words // 8)))
        kept = NearDuplicates(threshold)
        kept.add(one, group=0)
        if similarity(one.said, other.said, size=SAID_SKETCH_SIZE) >= threshold:
            assert kept._promising(other, [0]) == [0]


class TestIdSet:
    def test_like_a_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pivotrl.trajectories.dedupe._RECENT_IDS", 50)
        rng = random.Random(0)
        ids, known = IdSet(), set[str]()
        for _ in range(200):
            batch = [f"{rng.randrange(3000):032x}"[::-1] for _ in range(rng.randrange(12))]
            expected = []
            for entry in batch:
                expected.append(entry not in known)
                known.add(entry)
            if rng.random() < 0.5:
                assert ids.add(batch) == expected
            else:
                assert ids.add_keys(np.array([int(entry[:16], 16) for entry in batch], np.uint64)).tolist() == expected


class TestDecontamination:
    def test_matches_ids_and_phrases(self, tmp_path: Path) -> None:
        path = tmp_path / "list.json"
        path.write_bytes(orjson.dumps({"task_ids": ["t1"], "ngrams": ["Return the parcel, please", "red shoes"]}))
        forbidden = DecontaminationList.load(path)
        assert forbidden.match("t1", b"") == "decontamination: task id"
        assert forbidden.match("t2", b'{"say": "return THE parcel -- please"}') == "decontamination: n-gram"
        assert forbidden.match("t2", b"red\nshoes") == "decontamination: n-gram"
        assert forbidden.match("t2", b"return the parcel now please, red leather shoes") is None
        assert forbidden.match("t2", b"") is None

    @pytest.mark.parametrize("content", [b"{", b"[]", b'{"tasks": []}', b'{"task_ids": [1]}', b'{"ngrams": ["?!"]}', None])
    def test_a_list_of_another_shape_is_the_users_error(self, tmp_path: Path, content: bytes | None) -> None:
        path = tmp_path / "list.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError):
            DecontaminationList.load(path)
