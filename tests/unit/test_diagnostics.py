"""The theory's diagnostics against policies whose numbers are known: a bigram table, hand-worked orders, an enumerated KL."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from fakes.bandit import BanditTrainer

from pivotrl.evaluation.diagnostics import ScoredAction, expected_signal, kl_to_reference, order_preservation, score_actions
from pivotrl.training.protocols import PolicyTrainer


def action(prompt: str, token: int, *, accepted: bool = False, cluster: str | None = None) -> ScoredAction:
    return ScoredAction(prompt, cluster or prompt, (2, 3), (token,), accepted)


def test_expected_signal_is_the_mean_of_the_stds() -> None:
    """mu = 0, 1/2, 1, 1/5: 0, 0.5, 0, 0.4. A turn that always fails or always succeeds carries none."""
    found = expected_signal([(0.0, "a"), (0.5, "a"), (1.0, "b"), (0.2, "b")], seed=1)
    assert (found.value, found.n) == (pytest.approx(0.9 / 4), 4)
    assert found.low <= found.value <= found.high
    assert math.isnan(expected_signal([], seed=1).value)


@pytest.mark.parametrize("micro_batch_tokens", [1, 7, 100])
def test_actions_are_scored_in_their_order(micro_batch_tokens: int) -> None:
    """Each token given the one before it, at temperature 0.7, whatever the micro-batches and the lengths."""
    trainer = BanditTrainer()
    actions = [
        ScoredAction("a", "a", (2, 4), (5, 1), False),
        ScoredAction("b", "b", (2, 3, 6), (7,), False),
        ScoredAction("c", "c", (2,), (8, 9, 10, 1), True),
        ScoredAction("d", "d", (2, 5), (5, 1), False),
    ]
    found = score_actions(cast(PolicyTrainer, trainer), actions, temperature=0.7, micro_batch_tokens=micro_batch_tokens)
    table = torch.log_softmax(trainer.table.detach() / 0.7, dim=-1)
    for one, logprobs_T in zip(actions, found, strict=True):
        tokens = (*one.prompt_token_ids, *one.token_ids)
        start = len(one.prompt_token_ids)
        expected = [table[tokens[i - 1], tokens[i]].item() for i in range(start, len(tokens))]
        assert logprobs_T == pytest.approx(expected, abs=1e-6)


def test_order_is_compared_outside_m_and_inside_it_apart() -> None:
    """Outside, one neighbouring pair of four is swapped (rho = 0.8); inside, the order is reversed. Across the two sides it may change at will."""
    tokens_before = {10: -1.0, 11: -2.0, 12: -3.0, 13: -4.0, 20: -5.0, 21: -6.0, 22: -7.0}
    tokens_after = {10: -2.0, 11: -3.0, 12: -9.0, 13: -5.0, 20: -0.7, 21: -0.6, 22: -0.5}
    actions = [action("s", token, accepted=token >= 20) for token in tokens_before]
    scores = [[(table[one.token_ids[0]],) for one in actions] for table in (tokens_before, tokens_after)]
    found = order_preservation(actions, *scores, seed=1)
    assert (found["outside"]["value"], found["outside"]["n"]) == (pytest.approx(0.8), 1)
    assert found["inside"]["value"] == pytest.approx(-1.0)
    assert found["num_actions"] == 4


def test_states_with_few_distinct_actions_say_nothing() -> None:
    """The same action sampled three times is one; two distinct ones have a correlation of 1 or -1 by chance."""
    actions = [*[action("same", 5)] * 3, action("two", 5), action("two", 6), *[action("three", token) for token in (5, 6, 7)]]
    before = [(-float(one.token_ids[0]),) for one in actions]
    found = order_preservation(actions, before, before, seed=1)
    assert (found["outside"]["value"], found["outside"]["n"]) == (1.0, 1)
    assert found["inside"] == {"value": None, "low": None, "high": None, "n": 0}


def test_kl_of_an_enumerated_policy_is_exact() -> None:
    """Answers in the proportions of pi give the KL itself, in both estimators."""
    policy, reference = {1: 0.5, 2: 0.25, 3: 0.25}, {1: 0.25, 2: 0.25, 3: 0.5}
    tokens = [1, 1, 2, 3]
    answers = [action(f"p{i % 2}", token) for i, token in enumerate(tokens)]
    scores = [[(math.log(table[token]),) for token in tokens] for table in (policy, reference)]
    found = kl_to_reference(answers, *scores, seed=1)
    exact = sum(p * math.log(p / reference[token]) for token, p in policy.items())
    assert found["k1"]["value"] == pytest.approx(exact)
    assert found["k3"]["value"] == pytest.approx(exact)
    assert (found["k1"]["n"], found["num_prompts"], found["num_tokens"]) == (4, 2, 4)


def test_an_unchanged_policy_has_no_kl() -> None:
    scores = [(-1.0, -2.0), (-3.0,)]
    found = kl_to_reference([action("a", 1), action("b", 2)], scores, scores, seed=1)
    assert found["k1"] == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 2}
    assert found["k3"]["value"] == 0.0
    assert kl_to_reference([], [], [], seed=1)["k1"]["n"] == 0
