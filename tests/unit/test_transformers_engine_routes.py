"""The experts that the transformers engine returns are those of a plain forward pass over the whole sequence: no cache, no padding, no batch.

The oracle reads router logits and chooses by itself, in numpy, as the families' papers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from fakes.tiny_llama import save_tiny_llama
from fakes.trainer_batches import VOCAB, hf_model, save_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts import transformers_engine
from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.rollouts.routes import ExpertLayers, expert_indices, num_routed_tokens, routed_experts, routes_of_all_layers
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rollouts.wire import completion_rows, completions_of
from pivotrl.types import Completion

STOP, PAD, TEMPERATURE = 1, 0, 0.9
# So many that rows end at different times.
STOPS = tuple(range(1, VOCAB, 12))
LENGTHS = (9, 2, 30, 14, 1, 9)
MODELS = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "nemotron_3": ("nemotron_3", {"n_routed_experts": 8}),
    "nemotron_3, groups": ("nemotron_3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
}


def engine_of(model: PreTrainedModel, *, batch_size: int = 32, returns_routes: bool = True) -> TransformersEngine:
    return TransformersEngine(model, batch_size=batch_size, stop_token_ids=STOPS, pad_token_id=PAD, policy_version=0, returns_routes=returns_routes)


def requests_of(lengths: Sequence[int], *, max_new_tokens: int = 12) -> list[GenerationRequest]:
    requests = []
    for number, length in enumerate(lengths):
        prompt = np.random.Generator(np.random.Philox(key=number)).integers(2, VOCAB, length)
        seeds = tuple(derive_seed(5, number, index) for index in range(3))
        requests.append(GenerationRequest(tuple(map(int, prompt)), seeds, TEMPERATURE, max_new_tokens))
    return requests


def expected_experts(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    """[tokens, layers with experts, experts per token], the experts of a token in ascending order."""
    seen: list[np.ndarray] = []
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    handles = [gate.register_forward_hook(lambda _gate, _inputs, output: seen.append(output[0].double().numpy())) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for handle in handles:
        handle.remove()
    return np.stack([_choose(model, gate, logits) for gate, logits in zip(gates, seen, strict=True)], axis=1)


def _choose(model: PreTrainedModel, gate: torch.nn.Module, logits: np.ndarray) -> np.ndarray:
    scores, config = logits.copy(), model.config
    if config.model_type == "nemotron_h":
        scores = 1 / (1 + np.exp(-logits)) + gate.e_score_correction_bias.double().numpy()  # type: ignore[union-attr]
        groups = scores.reshape(len(scores), config.n_group, -1)
        best_two = np.sort(groups, axis=-1)[..., -2:].sum(-1)
        worst = best_two.argsort(axis=-1)[:, : config.n_group - config.topk_group]
        for token, indices in enumerate(worst):
            groups[token, indices] = -np.inf
        scores = groups.reshape(len(scores), -1)
    return np.sort(np.argsort(scores, axis=-1)[:, -config.num_experts_per_tok :], axis=-1)


def assert_routes(model: PreTrainedModel, requests: Sequence[GenerationRequest], results: Sequence[Sequence[Completion]]) -> None:
    for request, samples in zip(requests, results, strict=True):
        for sample in samples:
            assert sample.routed_experts is not None
            assert num_routed_tokens(sample.routed_experts) == (len(request.prompt_token_ids), len(sample.token_ids) - 1)
            expected = expected_experts(model, [*request.prompt_token_ids, *sample.token_ids])[:-1]
            assert np.array_equal(np.sort(expert_indices(sample.routed_experts), axis=-1), expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [4, 32])
def test_routes_are_those_of_a_forward_pass_over_the_whole_sequence(name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several lengths, padded and in several prefills; rows that end early leave the batch."""
    monkeypatch.setattr(transformers_engine, "_PREFILL_TOKENS", 40)
    family, settings = MODELS[name]
    model, requests = hf_model(family, **settings), requests_of(LENGTHS)
    results = engine_of(model, batch_size=batch_size).generate(requests)
    lengths = {len(sample.token_ids) for samples in results for sample in samples}
    assert len(lengths) > 2, "rows end at different times"
    assert_routes(model, requests, results)


def test_returning_them_changes_nothing_else_and_samples_share_the_prompts() -> None:
    requests = requests_of(LENGTHS)
    plain = engine_of(hf_model("qwen3_moe"), returns_routes=False).generate(requests)
    results = engine_of(hf_model("qwen3_moe")).generate(requests)
    for without, samples in zip(plain, results, strict=True):
        assert [(one.token_ids, one.logprobs, one.routed_experts) for one in without] == [(one.token_ids, one.logprobs, None) for one in samples]
        assert len({id(one.routed_experts.prompt) for one in samples if one.routed_experts is not None}) == 1


def test_a_sample_of_one_token_has_routes_of_its_prompt_alone() -> None:
    model, requests = hf_model("nemotron_3"), requests_of((5, 7), max_new_tokens=1)
    results = engine_of(model).generate(requests)
    assert_routes(model, requests, results)
    assert {sample.routed_experts.completion for samples in results for sample in samples if sample.routed_experts is not None} == {b""}


def test_new_weights_route_anew(tmp_path: Path) -> None:
    model, requests = hf_model("qwen3_moe"), requests_of(LENGTHS)
    engine = engine_of(model)
    before = engine.generate(requests)
    engine.load_weights(load_file(save_model(tmp_path, "qwen3_moe", seed=1) / "model.safetensors").items(), 1)
    after = engine.generate(requests)
    assert_routes(hf_model("qwen3_moe", seed=1), requests, after)
    assert all(one[0].routed_experts != other[0].routed_experts for one, other in zip(before, after, strict=True))


def test_the_wire_carries_them_and_a_prompts_once() -> None:
    requests = requests_of((40, 50))
    results = engine_of(hf_model("qwen3_moe")).generate(requests)
    message = orjson.dumps(completion_rows(results))
    assert completions_of(orjson.loads(message)) == results
    records = [sample.routed_experts for samples in results for sample in samples]
    apart = sum(len(one.prompt) + len(one.completion) for one in records if one is not None)
    once = apart - sum(2 * len(samples[0].routed_experts.prompt) for samples in results if samples[0].routed_experts is not None)
    bare = orjson.dumps(completion_rows([tuple(Completion(s.token_ids, s.logprobs, s.finish_reason, 0) for s in samples) for samples in results]))
    # base64 writes three bytes as four.
    assert len(message) - len(bare) < once * 4 / 3 + 24 * len(records) < apart


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    config = TransformersEngineConfig(type="transformers", batch_size=4, enable_return_routed_experts=True)
    with pytest.raises(UserError, match=r"engine.enable_return_routed_experts is true and LlamaForCausalLM has no layer with experts"):
        TransformersEngine.load(save_tiny_llama(tmp_path / "dense"), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    engine = TransformersEngine.load(save_model(tmp_path / "mixture", "qwen3_moe"), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    assert all(sample.routed_experts is not None for samples in engine.generate(requests_of((5,))) for sample in samples)


def test_vllms_array_loses_its_rows_of_layers_without_experts() -> None:
    """[prompt + completion - 1, all layers, experts per token]; up to 256 experts in bytes, more in two each."""
    layers = ExpertLayers((1, 3), num_experts=300)
    chosen = np.arange(6 * 4 * 2).reshape(6, 4, 2).astype(np.uint16) + 250
    routes = routes_of_all_layers(chosen, layers, (4, 3))
    assert (routes.num_layers, routes.experts_per_token, routes.bytes_per_index) == (2, 2, 2)
    assert np.array_equal(expert_indices(routes), chosen[:, [1, 3]])
    assert num_routed_tokens(routes) == (4, 2)
    again = routes_of_all_layers(chosen[:5], layers, (4, 2), like=routes)
    assert again.prompt is routes.prompt
    other = chosen.copy()
    other[0] += 1
    assert routes_of_all_layers(other, layers, (4, 3), like=routes).prompt != routes.prompt
    with pytest.raises(ValueError, match=r"the experts of 6 tokens came with 4 \+ 4 tokens"):
        routes_of_all_layers(chosen, layers, (4, 4))
    assert routed_experts(chosen[:1] - 250, chosen[:0], num_experts=256).bytes_per_index == 1
