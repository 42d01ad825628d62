"""Scores of chosen tokens against log_softmax over everything: values, gradients, temperature, chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from fakes.trainer_batches import hf_model, joined, micro_batches, reference_logprobs, save_model

from pivotrl.config.schema import ParallelConfig
from pivotrl.megatron import logprobs
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import load_hf
from pivotrl.megatron.logprobs import token_scores, vocab_parallel_scores
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.upstream import GPTModel

_BATCH = joined(micro_batches(rows=3, tokens=20, action_tokens=5), extra_padding=2)


@pytest.fixture
def model(tmp_path: Path) -> GPTModel:
    initialize_parallel(ParallelConfig(), seed=0)
    checkpoint_dir = save_model(tmp_path)
    (built,) = build_model(read_config(checkpoint_dir), ParallelConfig())
    load_hf([built], checkpoint_dir)
    return cast(GPTModel, built)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_log_softmax_over_all_positions(model: GPTModel, temperature: float) -> None:
    scores = token_scores(model, _BATCH, temperature=temperature).detach()
    with torch.no_grad():
        (expected,) = reference_logprobs(hf_model("llama"), [_BATCH], temperature=temperature)
        (other,) = reference_logprobs(hf_model("llama"), [_BATCH], temperature=1.2)
    torch.testing.assert_close(scores[0], expected, atol=1e-5, rtol=0)
    assert (scores[0] - other).abs().max() > 1e-2


def test_entropies_are_those_of_the_tempered_distribution_at_masked_positions_only(model: GPTModel) -> None:
    entropies = token_scores(model, _BATCH, temperature=0.7)[1].detach()
    with torch.no_grad():
        logits = hf_model("llama")(_BATCH.token_ids_B_T).logits / 0.7
    expected = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    torch.testing.assert_close(entropies[:, 1:], expected * _BATCH.action_mask_B_T[:, 1:], atol=1e-5, rtol=0)
    assert bool((entropies[_BATCH.action_mask_B_T == 0] == 0).all())


def test_gradient_equals_that_of_transformers(model: GPTModel) -> None:
    reference = hf_model("llama")
    (expected,) = reference_logprobs(reference, [_BATCH], temperature=0.7)
    (expected * _BATCH.advantages_B[:, None]).sum().backward()
    (token_scores(model, _BATCH, temperature=0.7)[0] * _BATCH.advantages_B[:, None]).sum().backward()
    pairs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": "model.layers.1.input_layernorm.weight",
    }
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    for name, hf_name in pairs.items():
        expected_gradient = theirs[hf_name].grad
        assert expected_gradient is not None
        torch.testing.assert_close(ours[name].grad, expected_gradient, atol=1e-5 * expected_gradient.abs().max().item(), rtol=1e-4)


def test_chunks_change_neither_scores_nor_gradients(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for values in (logprobs._CHUNK_VALUES, 4 * 96):
        monkeypatch.setattr(logprobs, "_CHUNK_VALUES", values)
        model.zero_grad()
        scores = token_scores(model, _BATCH, temperature=1.0)
        (scores[0] * _BATCH.advantages_B[:, None]).sum().backward()
        results.append((scores.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]))
    (whole, whole_gradients), (chunked, chunked_gradients) = results
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)
    for ours, theirs in zip(chunked_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_entropy_carries_no_gradient() -> None:
    initialize_parallel(ParallelConfig(), seed=0)
    _, entropies = vocab_parallel_scores(torch.randn(3, 7, requires_grad=True).clone(), torch.tensor([0, 3, 6]))
    assert not entropies.requires_grad


def test_extreme_logits_stay_finite() -> None:
    initialize_parallel(ParallelConfig(), seed=0)
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 0.0]], requires_grad=True)
    scores, entropies = vocab_parallel_scores(logits.clone(), torch.tensor([0, 2]))
    scores.sum().backward()
    assert scores.tolist() == pytest.approx([0.0, -0.6931472])
    assert entropies.tolist() == pytest.approx([0.0, 0.6931472])
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_an_empty_mask_scores_nothing(model: GPTModel) -> None:
    scores = token_scores(model, replace(_BATCH, action_mask_B_T=torch.zeros_like(_BATCH.action_mask_B_T)), temperature=1.0)
    assert not scores.detach().any()


def test_a_mask_on_the_first_token_is_refused(model: GPTModel) -> None:
    with pytest.raises(ValueError, match="column 0"):
        token_scores(model, replace(_BATCH, action_mask_B_T=torch.ones_like(_BATCH.action_mask_B_T)), temperature=1.0)
