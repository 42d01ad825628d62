"""Padded, packed and shared-prefix batches are the same computation: log-probs, entropies and gradients, and no sample sees another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes.train_samples import VOCAB, draw_episode, draw_samples
from fakes.trainer_batches import save_model

from pivotrl.config.schema import ParallelConfig
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import load_hf
from pivotrl.megatron.logprobs import token_scores
from pivotrl.megatron.measures import work_of
from pivotrl.megatron.model import LanguageModel, build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.streams import StreamLayout, stream_tokens
from pivotrl.training.batching import train_batch, train_micro_batches
from pivotrl.types import TrainSample

# Relative to the largest value of a tensor; float32 rounding alone moves log-probs by some 1e-7.
_TOLERANCE = 1e-5


_SHAPES = {
    "one group, equal lengths": {"a": (23, [5, 5, 5])},
    "ragged actions": {"a": (18, [1, 7, 4])},
    "several groups, one of one action": {"a": (9, [3, 6]), "b": (30, [4]), "c": (1, [2, 2, 8])},
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_moe", "nemotron_h", "nemotron_3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    initialize_parallel(ParallelConfig(), seed=0)
    checkpoint_dir = save_model(tmp_path_factory.mktemp("hf"), request.param)
    (chunk,) = build_model(read_config(checkpoint_dir), ParallelConfig())
    load_hf([chunk], checkpoint_dir)
    return chunk


type Scores = dict[tuple[int, ...], torch.Tensor]


def run(model: LanguageModel, rows: list[TrainSample], batching: str, *, budget: int = 10_000) -> tuple[Scores, list[torch.Tensor]]:
    """Scores of every sample's action by its tokens, and the gradients of a weighted sum of log-probs."""
    model.zero_grad()
    scores_by_tokens = {}
    batches = train_micro_batches(train_batch(rows), batching=batching, micro_batch_tokens=budget, skip_zero_variance=True)  # type: ignore[arg-type]
    for batch in batches:
        scores_2_B_T = token_scores(model, batch, temperature=0.8)
        (scores_2_B_T[0] * batch.advantages_B[:, None]).sum().backward()
        for row in range(len(batch.lengths_B)):
            mask = batch.action_mask_B_T[row] != 0
            scores_by_tokens[tuple(batch.token_ids_B_T[row, : batch.lengths_B[row]].tolist())] = scores_2_B_T[:, row, mask].detach()
    return scores_by_tokens, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, atol=_TOLERANCE * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("batching", ["packed", "shared_prefix"])
@pytest.mark.parametrize("shape", list(_SHAPES))
def test_scores_and_gradients_equal_those_of_padded_rows(model: LanguageModel, shape: str, batching: str) -> None:
    rows = draw_samples(_SHAPES[shape])
    expected_scores, expected_gradients = run(model, rows, "padded")
    scores, gradients = run(model, rows, batching)
    assert scores.keys() == expected_scores.keys()
    for tokens, expected in expected_scores.items():
        assert_same(scores[tokens], expected)
    assert len(gradients) == len(expected_gradients) > 10
    for ours, expected in zip(gradients, expected_gradients, strict=True):
        assert_same(ours, expected)


def test_the_turns_of_episodes_are_laid_out_once(model: LanguageModel) -> None:
    """Two episodes, one of which left its own history after the first turn, beside a sample that came out twice."""
    first, second = draw_episode([(9, 3), (4, 5), (2, 1)]), draw_episode([(7, 2), (3, 3)], seed=2)
    strayed = replace(second[1], prompt_token_ids=(VOCAB - 1, *second[1].prompt_token_ids[1:]))
    twice = draw_samples({"a": (6, [4])})
    rows = [*first, second[0], strayed, *twice, *twice]
    (batch,) = train_micro_batches(train_batch(rows), batching="packed", micro_batch_tokens=10_000, skip_zero_variance=True)
    assert stream_tokens(batch, StreamLayout()) == (1, 24 + 9 + 15 + 10)
    assert work_of(batch).num_tokens == 24 + 9 + 15 + 10
    expected_scores, expected_gradients = run(model, rows, "padded")
    scores, gradients = run(model, rows, "packed")
    for tokens, expected in expected_scores.items():
        assert_same(scores[tokens], expected)
    for ours, expected in zip(gradients, expected_gradients, strict=True):
        assert_same(ours, expected)
    # The budget is of what goes through the model: both chains of the first episode fit where their rows would not.
    parts = train_micro_batches(train_batch(first), batching="packed", micro_batch_tokens=24, skip_zero_variance=True)
    assert len(parts) == 1


@pytest.mark.parametrize("batching", ["packed", "shared_prefix"])
def test_the_budget_of_tokens_reaches_no_gradient(model: LanguageModel, batching: str) -> None:
    """A budget below one group splits it, its prompt in both parts."""
    rows = draw_samples({"a": (20, [5, 3, 6, 2]), "b": (7, [4, 4])})
    _, expected = run(model, rows, batching)
    _, gradients = run(model, rows, batching, budget=30)
    for ours, whole in zip(gradients, expected, strict=True):
        assert_same(ours, whole)


@pytest.mark.parametrize("batching", ["padded", "packed", "shared_prefix"])
def test_changing_one_sample_moves_no_other(model: LanguageModel, batching: str) -> None:
    rows = draw_samples(_SHAPES["several groups, one of one action"])
    changed = [*rows]
    changed[1] = replace(rows[1], completion_token_ids=tuple((token + 1) % VOCAB for token in rows[1].completion_token_ids))
    before, _ = run(model, rows, batching)
    after, _ = run(model, changed, batching)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    assert len(gone) == len(new) == 1
    for tokens in before.keys() & after.keys():
        assert torch.equal(before[tokens], after[tokens]), "another sample's scores moved"
    assert not torch.equal(before[gone.pop()], after[new.pop()])


@pytest.mark.parametrize("batching", ["padded", "packed", "shared_prefix"])
def test_experts_are_counted_by_rows_whatever_the_stream(model: LanguageModel, batching: str) -> None:
    """What moves the balancing bias: rows one by one, without padding, are the count meant."""
    counters: list[torch.Tensor] = [tensor for name, tensor in model.named_buffers() if name.endswith("local_tokens_per_expert")]
    if not counters:
        pytest.skip("a family without a balancing bias")
    rows = draw_samples(_SHAPES["several groups, one of one action"])
    counts = []
    for mode, budget in (("padded", 1), (batching, 10_000)):
        for counter in counters:
            counter.zero_()
        run(model, rows, mode, budget=budget)
        counts.append([counter.tolist() for counter in counters])
    assert counts[0] == counts[1]
    assert sum(counts[0][0]) > 0
