"""The transformers engine on models with recurrent layers, against the same model's plain forward passes: no cache, no padding, no batch.

Prompts of one call have differing lengths, some shorter than the convolution; a state that padding, a neighbour or an old row entered
would show in the log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_llama import forward_logits, forward_logprobs
from fakes.trainer_batches import VOCAB, hf_model, save_model
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import export_hf, load_hf
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.rollouts import transformers_engine
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.types import Completion
from pivotrl.weights.digest import tensor_digest
from pivotrl.weights.push import push

STOP, PAD, TEMPERATURE = 1, 0, 0.9
LENGTHS = (9, 2, 30, 14, 1, 9)
FAMILIES = ("nemotron_h", "nemotron_3", "qwen3_next")


def model_of(family: str) -> PreTrainedModel:
    return _linear_attention_model() if family == "qwen3_next" else hf_model(family)


def _linear_attention_model() -> PreTrainedModel:
    """Gated delta rule, attention and experts: another kind of state in the same kind of cache."""
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3NextForCausalLM(config).eval()


def build(model: PreTrainedModel, *, batch_size: int = 32) -> TransformersEngine:
    return TransformersEngine(model, batch_size=batch_size, stop_token_ids=(STOP,), pad_token_id=PAD, policy_version=0)


def requests_of(lengths: Sequence[int], *, num_samples: int = 3, max_new_tokens: int = 24) -> list[GenerationRequest]:
    requests = []
    for number, length in enumerate(lengths):
        prompt = np.random.Generator(np.random.Philox(key=number)).integers(2, VOCAB, length)
        seeds = tuple(derive_seed(5, number, index) for index in range(num_samples))
        requests.append(GenerationRequest(tuple(map(int, prompt)), seeds, TEMPERATURE, max_new_tokens))
    return requests


def token_ids(results: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in samples] for samples in results]


def stepwise_logprobs(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """One forward pass over the whole text for every token."""
    texts = [[*prompt, *completion[:index]] for index in range(len(completion))]
    rows = [torch.log_softmax(forward_logits(model, text)[-1] / TEMPERATURE, dim=-1) for text in texts]
    return [float(row[token]) for row, token in zip(rows, completion, strict=True)]


def assert_logprobs(results: Sequence[Sequence[Completion]], requests: Sequence[GenerationRequest], model: PreTrainedModel) -> None:
    for request, samples in zip(requests, results, strict=True):
        for sample in samples:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=TEMPERATURE)
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_forward_pass_per_token(family: str) -> None:
    requests = requests_of(LENGTHS)
    oracle = model_of(family)
    for request, samples in zip(requests, build(model_of(family)).generate(requests), strict=True):
        for sample in samples:
            assert sample.logprobs == pytest.approx(stepwise_logprobs(oracle, request.prompt_token_ids, sample.token_ids), abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_order_batch_size_and_compaction_cannot_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(LENGTHS)
    reference = token_ids(build(model_of(family)).generate(requests))
    assert len({len(tokens) for samples in reference for tokens in samples}) > 1, "rows must leave at different times"
    assert token_ids(build(model_of(family)).generate(requests[::-1])) == reference[::-1]
    assert token_ids([build(model_of(family), batch_size=1).generate([request])[0] for request in requests]) == reference
    assert token_ids(build(model_of(family), batch_size=4).generate(requests)) == reference
    monkeypatch.setattr(transformers_engine, "_COMPACTION_FRAC", 1e-6)
    assert token_ids(build(model_of(family)).generate(requests)) == reference


def test_samples_of_a_prompt_share_its_prefill_and_no_prompt_is_padded() -> None:
    model = hf_model("nemotron_3")
    prefills: list[tuple[int, int, bool]] = []

    def record(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            prompts, tokens = kwargs["input_ids"].shape
            prefills.append((prompts, tokens, bool(kwargs["attention_mask"].all())))

    model.register_forward_pre_hook(record, with_kwargs=True)
    build(model).generate(requests_of([9, 14, 9, 30]))
    assert prefills == [(2, 9, True), (1, 14, True), (1, 30, True)]


def test_a_left_padded_state_would_differ() -> None:
    """What keeping the prompts apart avoids where a convolution's input has a bias."""
    padded = hf_model("nemotron_h", use_bias=True)
    prompt = [5, 6, 7]
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        last = padded(input_ids=torch.tensor([[PAD, PAD, *prompt]]), attention_mask=mask).logits[0, -1]
    assert (last - forward_logits(padded, prompt)[-1]).abs().max() > 1e-3
    requests = requests_of([3, 7, 5])
    assert_logprobs(build(hf_model("nemotron_h", use_bias=True)).generate(requests), requests, padded)


def test_small_steps_stay_as_they_are(tmp_path: Path) -> None:
    """config.json's time_step_limit holds, not the range that steps were initialized in; a model whose range starts at 1e-30 is the oracle."""
    models = [hf_model("nemotron_3"), hf_model("nemotron_3"), hf_model("nemotron_3", time_step_min=1e-30)]
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                if name.endswith("dt_bias"):
                    parameter.fill_(-9.0)
    loaded, raised, oracle = models
    loaded.save_pretrained(tmp_path)
    config = TransformersEngineConfig(type="transformers", batch_size=32)
    requests = requests_of([40, 64])
    results = TransformersEngine.load(tmp_path, config, stop_token_ids=(STOP,), pad_token_id=PAD).generate(requests)
    assert_logprobs(results, requests, oracle)
    first = requests[0].prompt_token_ids
    assert (forward_logits(raised, first) - forward_logits(oracle, first)).abs().max() > 1e-3, "raised steps would show"


@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_3"])
def test_weights_go_by_the_checkpoints_names_and_a_new_set_changes_the_samples(family: str, tmp_path: Path) -> None:
    """The trainer's own stream, expert biases included."""
    config = TransformersEngineConfig(type="transformers", batch_size=8)
    engine = TransformersEngine.load(save_model(tmp_path / "start", family), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    new = load_file(save_model(tmp_path / "new", family, seed=1) / "model.safetensors")
    assert engine.weight_census().tensors.keys() == new.keys()
    assert "backbone.embeddings.weight" in new
    initialize_parallel(ParallelConfig(), seed=0)
    chunks = build_model(read_config(tmp_path / "new"), ParallelConfig())
    load_hf(chunks, tmp_path / "new")
    engine.load_weights(export_hf(chunks), 1)
    assert engine.weight_digests() == {name: tensor_digest(tensor) for name, tensor in new.items()}
    requests = requests_of([5, 12])
    assert_logprobs(engine.generate(requests), requests, hf_model(family, seed=1))


def test_a_bfloat16_engine_holds_the_biases_of_expert_choice_as_they_were_sent(tmp_path: Path) -> None:
    """transformers keeps them in float32; a trainer in bfloat16 may send narrower ones, and digests agree all the same."""
    config = TransformersEngineConfig(type="transformers", batch_size=8, dtype="bfloat16")
    engine = TransformersEngine.load(save_model(tmp_path / "start", "nemotron_3"), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    sent = load_file(save_model(tmp_path / "new", "nemotron_3", seed=1) / "model.safetensors")
    biases = {name: tensor for name, tensor in sent.items() if name.endswith("e_score_correction_bias")}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in biases.values()), "rounding would show"
    assert push(sent.items(), engine, 1).num_rounded == len(sent) - len(biases)
    for name, tensor in biases.items():
        assert torch.equal(engine._held()[name], tensor)
    assert push(((name, tensor.bfloat16()) for name, tensor in sent.items()), engine, 2).num_rounded == 0
    for name, tensor in biases.items():
        assert torch.equal(engine._held()[name], tensor.bfloat16().float())


def test_a_model_without_keys_and_values_is_refused() -> None:
    with pytest.raises(UserError, match=r"keeps LinearAttentionLayer state.*set engine\.type to vllm"):
        build(hf_model("nemotron_3", hybrid_override_pattern="ME"))
