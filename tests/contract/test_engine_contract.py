"""What every rollout engine promises (rollouts/engine.py), and what those that hold a model promise beside it.

vLLM's rows are slow because starting it takes longer than ten seconds; a missing vLLM is a failure, not a skip: requirements pin it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_llama import CONTEXT, PAD, STOP, VOCAB, forward_logits, forward_logprobs, named_weights, save_tiny_llama, tiny_llama

from pivotrl.config.engines import ProcessesPlacement, TransformersEngineConfig, VllmEngineConfig
from pivotrl.errors import UserError
from pivotrl.identity import derive_seed
from pivotrl.rollouts.engine import Engine, GenerationRequest
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.types import FinishReason

# Single-precision sums in another order; the engines' kernels differ from transformers' plain forward by no more.
TOLERANCE = 1e-4


def scripted(_checkpoint: Path) -> Engine:
    def script(prompt_token_ids: tuple[int, ...], seed: int, _index: int) -> Sequence[int]:
        stream = random.Random(derive_seed(seed, *prompt_token_ids))
        return [*(stream.randrange(2, VOCAB) for _ in range(stream.randrange(1, 40))), STOP]

    return ScriptedEngine.from_function(script)


def transformers(checkpoint: Path) -> Engine:
    config = TransformersEngineConfig(type="transformers", batch_size=8)
    return TransformersEngine.load(checkpoint, config, stop_token_ids=(STOP,), pad_token_id=PAD)


def vllm(checkpoint: Path) -> Engine:
    from pivotrl.rollouts.vllm import VllmEngine

    config = VllmEngineConfig(type="vllm", kv_cache_bytes=32 << 20, max_num_seqs=8)
    return VllmEngine.load(checkpoint, config, stop_token_ids=(STOP,), pad_token_id=PAD)


def processes(checkpoint: Path) -> Engine:
    """The transformers engine in two processes of their own."""
    from pivotrl.rollouts.launchers import LocalLauncher
    from pivotrl.rollouts.pool import EnginePool
    from pivotrl.weights.shared_memory import SharedMemoryStore

    engine = TransformersEngineConfig(type="transformers", batch_size=8).model_dump(mode="json")
    start = {"engine": engine, "checkpoint": str(checkpoint), "stop_token_ids": [STOP], "pad_token_id": PAD, "num_threads": 1}
    placement = ProcessesPlacement(type="processes", num_replicas=2)
    return EnginePool(LocalLauncher(placement, checkpoint / "engines", num_threads=1), SharedMemoryStore(), placement, start)


MODEL_ENGINES = [transformers, processes, pytest.param(vllm, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Callable[[Path], Engine]], Engine]]:
    """Every engine is started once; each use begins with the checkpoint's weights as version 0."""
    checkpoint = save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
    started: dict[str, Engine] = {}

    def get(start: Callable[[Path], Engine]) -> Engine:
        if start.__name__ not in started:
            started[start.__name__] = start(checkpoint)
        else:
            started[start.__name__].load_weights(named_weights(tiny_llama()), 0)
        return started[start.__name__]

    yield get
    for engine in started.values():
        engine.close()


@pytest.fixture(params=[scripted, *MODEL_ENGINES])
def engine(request: pytest.FixtureRequest, engine_of: Callable[[Callable[[Path], Engine]], Engine]) -> Engine:
    return engine_of(request.param)


@pytest.fixture(params=MODEL_ENGINES)
def model_engine(request: pytest.FixtureRequest, engine_of: Callable[[Callable[[Path], Engine]], Engine]) -> Engine:
    return engine_of(request.param)


def prompt_of(number: int, *, num_tokens: int) -> tuple[int, ...]:
    stream = random.Random(number)
    return tuple(stream.randrange(2, VOCAB) for _ in range(num_tokens))


def request_of(number: int, *, num_samples: int = 3, num_tokens: int = 9, temperature: float = 0.8, max_new_tokens: int = 24) -> GenerationRequest:
    seeds = tuple(derive_seed(5, number, index) for index in range(num_samples))
    return GenerationRequest(prompt_of(number, num_tokens=num_tokens), seeds, temperature, max_new_tokens)


# Prompts of unlike lengths, long before short, so that an engine that sorts must put results back. The first fills two blocks of vLLM's prefix
# cache, which holds whole blocks of 32 tokens alone.
CACHED_TOKENS = 64
REQUESTS = [request_of(0, num_tokens=71), request_of(1, num_tokens=4, num_samples=1), request_of(2, num_tokens=17, num_samples=6), request_of(3)]


def test_results_come_by_request_and_then_by_seed(engine: Engine) -> None:
    results = engine.generate(REQUESTS)
    assert [len(samples) for samples in results] == [3, 1, 6, 3]
    alone = [engine.generate([GenerationRequest(r.prompt_token_ids, (seed,), r.temperature, r.max_new_tokens)]) for r in REQUESTS for seed in r.seeds]
    assert [sample.token_ids for samples in results for sample in samples] == [sample.token_ids for ((sample,),) in alone]


def test_the_same_seeds_give_the_same_samples_in_any_company_and_other_seeds_others(engine: Engine) -> None:
    first = engine.generate(REQUESTS)
    again = engine.generate(list(reversed(REQUESTS)))
    assert [[s.token_ids for s in samples] for samples in first] == [[s.token_ids for s in samples] for samples in reversed(again)]
    for samples, repeated in zip(first, reversed(again), strict=True):
        for sample, same in zip(samples, repeated, strict=True):
            assert sample.logprobs == pytest.approx(same.logprobs, abs=TOLERANCE)
    assert len({sample.token_ids for sample in first[2]}) > 1


def test_adjacent_seeds_are_independent(engine: Engine) -> None:
    """vLLM gives sample i of a request the seed s + i; a protocol built on that would share random numbers between neighbours."""
    prompt = prompt_of(4, num_tokens=9)
    low, high = (engine.generate([GenerationRequest(prompt, (seed, seed + 1), 0.8, 24)])[0] for seed in (100, 101))
    assert low[1].token_ids == high[0].token_ids
    assert len({low[0].token_ids, low[1].token_ids, high[1].token_ids}) == 3


def test_a_sample_stops_with_its_stop_token_or_at_its_cap(engine: Engine) -> None:
    completions = [sample for samples in engine.generate([request_of(n, num_samples=8) for n in range(8)]) for sample in samples]
    reasons = {FinishReason.STOP: 0, FinishReason.LENGTH: 0}
    for completion in completions:
        reasons[completion.finish_reason] += 1
        assert len(completion.logprobs) == len(completion.token_ids)
        if completion.finish_reason is FinishReason.STOP:
            assert completion.token_ids[-1] == STOP
            assert STOP not in completion.token_ids[:-1]
        else:
            assert len(completion.token_ids) == 24
            assert STOP not in completion.token_ids
    assert min(reasons.values()) > 0, reasons


def test_a_cap_cuts_the_same_sample(engine: Engine) -> None:
    """The random numbers of a sample do not depend on max_new_tokens: a replay under a lower cap is a prefix."""
    long = engine.generate([request_of(5, max_new_tokens=24)])[0]
    short = engine.generate([request_of(5, max_new_tokens=3)])[0]
    assert [sample.token_ids for sample in short] == [sample.token_ids[:3] for sample in long]


def test_completions_carry_the_version_that_made_them(engine: Engine) -> None:
    assert engine.policy_version == 0
    engine.load_weights(named_weights(tiny_llama(seed=1)), 7)
    assert engine.policy_version == 7
    assert {sample.policy_version for samples in engine.generate(REQUESTS) for sample in samples} == {7}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_tempered_distribution(model_engine: Engine, temperature: float) -> None:
    model = tiny_llama()
    requests = [request_of(n, num_tokens=length, temperature=temperature) for n, length in enumerate((3, 40, 11))]
    for request, samples in zip(requests, model_engine.generate(requests), strict=True):
        for sample in samples:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=temperature)
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
            if temperature != 1.0:
                untempered = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=1.0)
                assert (untempered - expected).abs().max() > 100 * TOLERANCE


def test_greedy_takes_the_likeliest_token_of_a_plain_forward(model_engine: Engine) -> None:
    model = tiny_llama()
    requests = [request_of(n, num_tokens=length, num_samples=1, temperature=0.0) for n, length in enumerate((3, 40, 11))]
    for request, (sample,) in zip(requests, model_engine.generate(requests), strict=True):
        logits = forward_logits(model, [*request.prompt_token_ids, *sample.token_ids])[len(request.prompt_token_ids) - 1 : -1]
        assert list(sample.token_ids) == logits.argmax(dim=-1).tolist()
        expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=1.0)
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_samples_follow_the_models_distribution(model_engine: Engine) -> None:
    """400 first tokens against the exact probabilities: Pearson's statistic over the likely tokens, limit at p = 1e-6 for 10 degrees."""
    prompt, num_samples = prompt_of(6, num_tokens=7), 400
    seeds = tuple(derive_seed(9, index) for index in range(num_samples))
    samples = model_engine.generate([GenerationRequest(prompt, seeds, 1.0, 1)])[0]
    probabilities = torch.softmax(forward_logits(tiny_llama(), prompt)[-1], dim=-1)
    likely = probabilities.topk(10).indices.tolist()
    counts = [sum(sample.token_ids[0] == token for sample in samples) for token in likely]
    expected = [num_samples * probabilities[token].item() for token in likely]
    rest = num_samples - sum(expected)
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True)) + (num_samples - sum(counts) - rest) ** 2 / rest
    assert statistic < 46.9


def test_the_context_ends_a_sample(model_engine: Engine) -> None:
    """Prompt and completion together never exceed the model's context: LENGTH, with the tokens there was room for."""
    room = 5
    requests = [request_of(n, num_tokens=CONTEXT - room, max_new_tokens=50, num_samples=8) for n in range(3)]
    completions = [sample for samples in model_engine.generate(requests) for sample in samples]
    cut = [sample for sample in completions if sample.finish_reason is FinishReason.LENGTH]
    assert cut
    assert {len(sample.token_ids) for sample in cut} == {room}


@pytest.mark.parametrize(
    ("request_", "error", "named"),
    [
        (GenerationRequest((3,) * CONTEXT, (1,), 1.0, 4), UserError, f"{CONTEXT} tokens"),
        (GenerationRequest((3, VOCAB), (1,), 1.0, 4), ValueError, f"token id {VOCAB}"),
        (GenerationRequest((), (1,), 1.0, 4), ValueError, "needs a prompt"),
        (GenerationRequest((3,), (), 1.0, 4), ValueError, "seeds"),
    ],
)
def test_requests_no_model_can_serve_are_refused(model_engine: Engine, request_: GenerationRequest, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        model_engine.generate([REQUESTS[0], request_])


def cached_tokens(engine: Engine, request: GenerationRequest) -> list[int] | None:
    """Of the prompt of every sample, those that were not computed again; None for an engine that caches nothing between calls."""
    llm = getattr(engine, "_llm", None)
    if llm is None:
        return None
    outputs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        generate = llm.generate
        patch.setattr(llm, "generate", lambda *arguments, **keywords: outputs.extend(made := generate(*arguments, **keywords)) or made)
        engine.generate([request])
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.slow
def test_vllms_samples_of_a_prompt_share_one_prefill(engine_of: Callable[[Callable[[Path], Engine]], Engine]) -> None:
    """Every sample is a request of its own there; of the transformers engine tests/unit/test_transformers_engine.py sees it."""
    engine, request = engine_of(vllm), request_of(7, num_tokens=71, num_samples=5)
    engine.load_weights(named_weights(tiny_llama()), 1)
    assert cached_tokens(engine, request) == [0, *[CACHED_TOKENS] * 4]
    assert cached_tokens(engine, request) == [CACHED_TOKENS] * 5
    engine.load_weights(named_weights(tiny_llama(seed=1)), 2)
    assert cached_tokens(engine, request) == [0, *[CACHED_TOKENS] * 4]


def test_new_weights_are_the_ones_that_sample(model_engine: Engine) -> None:
    """Twice, on the same prompts: a stale cache or a head that kept the old embedding shows in the log-probs."""
    before = model_engine.generate(REQUESTS)
    assert cached_tokens(model_engine, REQUESTS[0]) in (None, [CACHED_TOKENS] * 3)
    for version in (1, 2):
        model = tiny_llama(seed=version)
        model_engine.load_weights(named_weights(model), version)
        after = model_engine.generate(REQUESTS)
        assert [[s.token_ids for s in samples] for samples in before] != [[s.token_ids for s in samples] for samples in after]
        for request, samples in zip(REQUESTS, after, strict=True):
            for sample in samples:
                expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=request.temperature)
                assert sample.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_one_changed_tensor_is_seen(model_engine: Engine) -> None:
    """Every weight in turn: an engine that packs a layer and forgets to repack it keeps the old outputs, one with a stale cache the old prompt."""
    request = REQUESTS[0]
    for name, _ in named_weights(tiny_llama()):
        assert cached_tokens(model_engine, request) in (None, [0, *[CACHED_TOKENS] * 2], [CACHED_TOKENS] * 3)
        model = tiny_llama()
        parameter = model.get_parameter(name)
        parameter.copy_(parameter * 1.5 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        model_engine.load_weights(named_weights(model), 1)
        for sample in model_engine.generate([request])[0]:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=request.temperature)
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE), name


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "unknown": (lambda w: {**w, "model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, "unknown tensor 'model.layers.9.mlp.up_proj.weight'"),
    "missing": (lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}, "missing .*model.norm.weight"),
    "misshapen": (lambda w: {**w, "model.norm.weight": torch.ones(3)}, r"'model.norm.weight' has shape \(3,\)"),
    "lossy": (lambda w: {**w, "model.norm.weight": w["model.norm.weight"].double()}, "'model.norm.weight' is torch.float64"),
    "untied": (lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] + 1}, "'lm_head.weight' and 'model.embed_tokens.weight' differ"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused_by_name(model_engine: Engine, case: str) -> None:
    spoil, message = BAD_WEIGHTS[case]
    with pytest.raises(ValueError, match=message):
        model_engine.load_weights(spoil(dict(named_weights(tiny_llama(seed=3)))).items(), 4)
    with pytest.raises(RuntimeError, match="partial weights"):
        model_engine.generate(REQUESTS)
    model_engine.load_weights(named_weights(tiny_llama()), 5)
    assert model_engine.generate(REQUESTS)[0][0].policy_version == 5


def test_log_probabilities_are_never_positive(engine: Engine) -> None:
    assert all(logprob <= 0 and math.isfinite(logprob) for samples in engine.generate(REQUESTS) for s in samples for logprob in s.logprobs)
