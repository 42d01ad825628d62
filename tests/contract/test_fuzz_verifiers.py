"""A small fuzz in CI: every seed and a few hundred structural mutations of seeds through every parser and verifier, and the fuzzer's own parts.

`make fuzz` runs the same checks for ten minutes, guided by coverage.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import get_args

import fuzz.targets
import pytest
from fuzz.mutator import HOSTILE_VALUES, mutate
from fuzz.seeds import completion_seeds, pair_seeds
from fuzz.targets import VERIFIERS, Finding, check, encode_case, encode_text, targets
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.actions.registry import ACTION_FORMAT_NAMES
from pivotrl.config.load import section_models
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.types import Verdict

PAIRS = list(pair_seeds())
COMPLETIONS = list(completion_seeds())
SOME = [*COMPLETIONS, *random.Random(0).sample(PAIRS, 400)]
# Those that call an endpoint or start processes, and the cascade, inside which every other one runs.
NOT_FUZZED = {"judge", "shell_effect", "compose"}


def test_every_verifier_is_fuzzed_or_named_as_not() -> None:
    names = {name for model in section_models(VerifierConfig) for name in get_args(model.model_fields["type"].annotation)}
    assert names == set(VERIFIERS) | NOT_FUZZED


def test_every_seed_holds() -> None:
    reached = Counter(check(seed) for seed in (*COMPLETIONS, *PAIRS))
    assert set(reached) == set(targets())
    assert len(PAIRS) > 900 * len(VERIFIERS)


@settings(max_examples=400)
@given(
    seed=st.sampled_from([*COMPLETIONS, *random.Random(0).sample(PAIRS, 400)]), rounds=st.integers(1, 4), randoms=st.randoms(use_true_random=False)
)
def test_mutated_seeds_hold(seed: bytes, rounds: int, randoms: random.Random) -> None:
    for _ in range(rounds):
        seed = mutate(seed, randoms)
    check(seed)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("state", ["odd", "data", "terminus"])
def test_every_hostile_value_as_an_argument(name: str, state: str) -> None:
    """On either side, against a plain value, under schemas that are sane, odd and absent."""
    tool = {"odd": "odd", "data": "http_request", "terminus": "terminus2"}[state]
    for value in HOSTILE_VALUES:
        for key in ("path", "query", "body", "url", "commands", "set", "either", "pattern"):
            plain, hostile = [{"name": tool, "arguments": {key: "plain"}}], [{"name": tool, "arguments": {key: value}}]
            check(encode_case(name, state, plain, hostile))
            check(encode_case(name, state, hostile, plain))


@pytest.mark.parametrize("name", ACTION_FORMAT_NAMES)
def test_every_hostile_text_as_a_completion(name: str) -> None:
    for value in HOSTILE_VALUES:
        if isinstance(value, str):
            check(encode_text(name, value.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")))


def test_a_broken_property_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: a verifier that raises, one that rejects everything, one whose reward is out of range."""

    class Broken:
        def __init__(self, verdict: Verdict | None) -> None:
            self._verdict = verdict

        def verify(self, state: object, expert: object, action: object) -> Verdict:
            if self._verdict is None:
                raise KeyError("x")
            return self._verdict

    data = encode_case("exact", "data", "a", "b")
    for verdict, caught in (
        (None, KeyError),
        (Verdict.ok(0.0, "no"), Finding),
        (Verdict.ok(1.5, "yes"), Finding),
        (Verdict.ok(1.0, "x" * 61), Finding),
        (Verdict.infra("down"), Finding),
    ):
        monkeypatch.setattr(fuzz.targets, "build_verifier", lambda config, expand, verdict=verdict: Broken(verdict))
        fuzz.targets.targets.cache_clear()
        with pytest.raises(caught):
            check(data)
    fuzz.targets.targets.cache_clear()


def test_mutations_are_reproducible_and_of_many_kinds() -> None:
    seed = PAIRS[0]
    first = [mutate(seed, random.Random(index)) for index in range(200)]
    assert first == [mutate(seed, random.Random(index)) for index in range(200)]
    assert len(set(first)) > 100
