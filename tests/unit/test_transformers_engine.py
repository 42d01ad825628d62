"""The decoding loop's parts by value, and what only this engine promises: one prefill per prompt, batching that cannot be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.tiny_llama import PAD, STOP, VOCAB, forward_logprobs, named_weights, save_tiny_llama, tiny_llama, tiny_mixture
from safetensors.torch import load_file
from transformers import FalconH1Config, FalconH1ForCausalLM, LlamaForCausalLM

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts import transformers_engine
from pivotrl.rollouts.decoding import plan_batches, sample_tokens, uniforms
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.types import Completion
from pivotrl.weights.digest import tensor_digest


def build(model: LlamaForCausalLM, *, batch_size: int = 16, stop_token_ids: Sequence[int] = (STOP,)) -> TransformersEngine:
    return TransformersEngine(model, batch_size=batch_size, stop_token_ids=stop_token_ids, pad_token_id=PAD, policy_version=0)


def requests_of(lengths: Sequence[int], *, num_samples: int = 4, max_new_tokens: int = 20, temperature: float = 0.9) -> list[GenerationRequest]:
    requests = []
    for number, length in enumerate(lengths):
        prompt = np.random.Generator(np.random.Philox(key=number)).integers(2, VOCAB, length)
        seeds = tuple(derive_seed(3, number, index) for index in range(num_samples))
        requests.append(GenerationRequest(tuple(map(int, prompt)), seeds, temperature, max_new_tokens))
    return requests


def token_ids(results: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in samples] for samples in results]


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    """The values are pinned: a change of generator would change every run's samples without a word."""
    assert uniforms(0, 2).tolist() == [0.011546754286331562, 0.24154919656271812]
    assert uniforms(5, 2).tolist() == uniforms(5, 9)[:2].tolist()
    assert uniforms(5, 2).tolist() != uniforms(6, 2).tolist()


def test_sampling_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.25])
    draws = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    logits = probabilities.log().expand(len(draws), 4)
    tokens, logprobs = sample_tokens(logits, temperatures_R=torch.ones(len(draws)), uniforms_R=draws)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    assert logprobs.tolist() == pytest.approx(np.log([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]).tolist(), abs=1e-6)


def test_temperature_is_each_rows_own_and_zero_is_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]]).expand(3, 3)
    temperatures, draws = torch.tensor([0.0, 1.0, 4.0]), torch.full((3,), 0.3, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, temperatures_R=temperatures, uniforms_R=draws)
    flat = np.exp(np.array([0.0, 0.25, 0.75]))
    assert tokens.tolist() == [2, 2, 1]
    sharp = np.exp(np.array([0.0, 1.0, 3.0]))
    expected = [np.log(sharp[2] / sharp.sum())] * 2 + [np.log(flat[1] / flat.sum())]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_batches_keep_a_prompts_samples_together_within_the_bound() -> None:
    requests = requests_of([30, 5, 12, 5], num_samples=3)
    requests[3] = GenerationRequest(requests[1].prompt_token_ids, (71, 72), 1.0, 4)
    batches = plan_batches(requests, max_rows=6, max_total_tokens=64)
    contents = [[(len(p.prompt_token_ids), [(row.request_index, row.sample_index) for row in p.rows]) for p in batch] for batch in batches]
    assert contents == [
        [(5, [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1)])],
        [(12, [(2, 0), (2, 1), (2, 2)]), (30, [(0, 0), (0, 1), (0, 2)])],
    ]


def test_only_a_prompt_with_more_samples_than_a_batch_holds_is_split() -> None:
    batches = plan_batches(requests_of([6], num_samples=7), max_rows=3, max_total_tokens=64)
    assert [len(prompt.rows) for batch in batches for prompt in batch] == [3, 3, 1]


def test_every_distinct_prompt_is_prefilled_once() -> None:
    model = tiny_llama()
    prefilled: list[int] = []

    def record(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            prefilled.append(kwargs["input_ids"].shape[0])

    model.register_forward_pre_hook(record, with_kwargs=True)
    requests = requests_of([9, 21, 14], num_samples=5)
    build(model).generate([*requests, GenerationRequest(requests[0].prompt_token_ids, (8,), 1.0, 5)])
    assert sum(prefilled) == 3


def test_batch_size_prefill_chunks_and_compaction_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of([9, 50, 14, 31, 9])
    reference = token_ids(build(tiny_llama()).generate(requests))
    assert token_ids(build(tiny_llama(), batch_size=1).generate(requests)) == reference
    assert token_ids(build(tiny_llama(), batch_size=7).generate(requests)) == reference
    monkeypatch.setattr(transformers_engine, "_PREFILL_TOKENS", 40)
    monkeypatch.setattr(transformers_engine, "_COMPACTION_FRAC", 1e-6)
    assert token_ids(build(tiny_llama(), batch_size=64).generate(requests)) == reference


def test_log_probs_hold_past_the_growth_of_the_buffer() -> None:
    """200 tokens without a stop token: the buffer is allocated four times, rows are padded by up to 45 columns."""
    model = tiny_llama(context=256)
    requests = requests_of([50, 5], num_samples=2, max_new_tokens=200)
    for request, samples in zip(requests, build(model, stop_token_ids=()).generate(requests), strict=True):
        for sample in samples:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=0.9)
            assert len(sample.token_ids) == 200
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_requests_of_one_call_keep_their_own_caps_and_temperatures() -> None:
    sampled, greedy = requests_of([12, 8], num_samples=2)
    greedy = GenerationRequest(greedy.prompt_token_ids, greedy.seeds, 0.0, 4)
    together = build(tiny_llama()).generate([sampled, greedy])
    assert token_ids(together) == token_ids([build(tiny_llama()).generate([one])[0] for one in (sampled, greedy)])
    assert together[1][0] == together[1][1]
    assert len(together[1][0].token_ids) <= 4


def test_logits_that_are_not_finite_are_an_engine_error() -> None:
    model = tiny_llama()
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite under policy version 0"):
        build(model).generate(requests_of([5]))


def test_running_out_of_memory_is_an_engine_error_and_a_bug_is_not() -> None:
    def failing(message: str) -> TransformersEngine:
        model = tiny_llama()

        def fail(*_: object) -> None:
            raise RuntimeError(message)

        model.register_forward_pre_hook(fail)
        return build(model)

    with pytest.raises(EngineError, match="out of memory"):
        failing("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory").generate(requests_of([5]))
    with pytest.raises(RuntimeError, match="shape mismatch") as caught:
        failing("shape mismatch").generate(requests_of([5]))
    assert not isinstance(caught.value, EngineError)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_read_with_its_head_tied_or_not(tmp_path: Path, *, tied: bool) -> None:
    config = TransformersEngineConfig(type="transformers", batch_size=4)
    engine = TransformersEngine.load(save_tiny_llama(tmp_path, tied=tied), config, stop_token_ids=(STOP,), pad_token_id=PAD, policy_version=3)
    census = engine.weight_census()
    assert ("lm_head.weight" in census.tensors) is not tied
    assert census.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert engine.generate(requests_of([5]))[0][0].policy_version == 3
    model = tiny_llama(tied=tied, seed=2)
    engine.load_weights(named_weights(model), 4)
    assert token_ids(engine.generate(requests_of([5]))) == token_ids(build(model).generate(requests_of([5])))


def test_bfloat16_weights_decode_and_float32_ones_are_refused(tmp_path: Path) -> None:
    config = TransformersEngineConfig(type="transformers", batch_size=4, dtype="bfloat16")
    engine = TransformersEngine.load(save_tiny_llama(tmp_path), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    assert all(logprob <= 0 for sample in engine.generate(requests_of([5]))[0] for logprob in sample.logprobs)
    with pytest.raises(ValueError, match=r"is torch.float32; the engine stores torch.bfloat16"):
        engine.load_weights(named_weights(tiny_llama()), 1)


def test_a_directory_without_a_checkpoint_and_layers_with_two_kinds_of_state_are_the_users_errors(tmp_path: Path) -> None:
    config = TransformersEngineConfig(type="transformers", batch_size=4)
    with pytest.raises(UserError, match="holds no checkpoint"):
        TransformersEngine.load(tmp_path, config, stop_token_ids=(STOP,), pad_token_id=PAD)
    parallel = FalconH1Config(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(UserError, match=r"LinearAttentionAndFullAttentionLayer state.*set engine\.type to vllm"):
        TransformersEngine(FalconH1ForCausalLM(parallel), batch_size=1, stop_token_ids=(STOP,), pad_token_id=PAD, policy_version=0)


def test_a_mixture_takes_experts_one_by_one(tmp_path: Path) -> None:
    """As checkpoint files and the trainer hold them; transformers stacks them."""
    tiny_mixture(seed=0).save_pretrained(tmp_path / "start")
    tiny_mixture(seed=1).save_pretrained(tmp_path / "new")
    config = TransformersEngineConfig(type="transformers", batch_size=8)
    engine = TransformersEngine.load(tmp_path / "start", config, stop_token_ids=(STOP,), pad_token_id=PAD)
    new = load_file(tmp_path / "new" / "model.safetensors")
    assert engine.weight_census().tensors.keys() == new.keys()
    engine.load_weights(new.items(), 1)
    assert engine.weight_digests() == {name: tensor_digest(tensor) for name, tensor in new.items()}
    for request, samples in zip(requests_of([5, 12]), engine.generate(requests_of([5, 12])), strict=True):
        for sample in samples:
            expected = forward_logprobs(tiny_mixture(seed=1), request.prompt_token_ids, sample.token_ids, temperature=0.9)
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
