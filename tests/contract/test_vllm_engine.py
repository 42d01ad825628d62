"""What vLLM alone must be held to: experts after a weight update, and a process that it shares with a trainer.

Runs after the engine contract in a full run, so it also shows that a second engine starts where a first one was closed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.tiny_llama import PAD, STOP, VOCAB, forward_logprobs, save_tiny_llama, tiny_llama, tiny_mixture
from fakes.trainer_batches import save_model
from safetensors.torch import load_file

from pivotrl.config.engines import VllmEngineConfig
from pivotrl.errors import UserError
from pivotrl.megatron.conversion import Request, convert
from pivotrl.rollouts import vllm as vllm_module
from pivotrl.rollouts.checkpoint_census import checkpoint_census, with_types
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.vllm import VllmEngine
from pivotrl.rollouts.vllm_model import drop_packed_embedding, held_wider, repack
from pivotrl.weights.digest import tensor_digest
from pivotrl.weights.manifest import VerifiedStream, tensor_record
from pivotrl.weights.push import push

CONFIG = VllmEngineConfig(type="vllm", kv_cache_bytes=32 << 20, max_num_seqs=8)
REQUESTS = [GenerationRequest(tuple(range(5, 5 + length)), (11, 12, 13), 0.8, 20) for length in (4, 40, 17)]


def largest_error(engine: VllmEngine, seed: int) -> float:
    """Against a plain forward of the mixture with these weights."""
    model = tiny_mixture(seed=seed)
    errors = [0.0]
    for request, samples in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        for sample in samples:
            expected = forward_logprobs(model, request.prompt_token_ids, sample.token_ids, temperature=0.8)
            errors.append((torch.tensor(sample.logprobs) - expected).abs().max().item())
    return max(errors)


def file_weights(directory: Path, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Weights under the names of a checkpoint file, where every expert is a tensor of its own."""
    tiny_mixture(seed=seed).save_pretrained(directory)
    return list(load_file(directory / "model.safetensors").items())


def test_a_tied_head_takes_the_packed_copy_of_this_reload_and_no_older_one() -> None:
    """Two layers of vLLM's form; a version that stopped packing the embedding must be noticed before it samples from an old head."""
    embedding, head = SimpleNamespace(weight=torch.ones(3, 2), cpu_linear=lambda: "old"), SimpleNamespace(cpu_linear=lambda: "older")
    config = SimpleNamespace(tie_word_embeddings=True)
    model = SimpleNamespace(config=config, model=SimpleNamespace(embed_tokens=embedding), lm_head=head, modules=list)
    drop_packed_embedding(model)
    with pytest.raises(RuntimeError, match="no longer packs the embedding"):
        repack(model)
    embedding.cpu_linear = lambda: "new"
    repack(model)
    assert head.cpu_linear() == "new"
    assert head.weight is embedding.weight


@pytest.mark.slow
def test_experts_arerepacked_and_the_process_stays_the_trainers(tmp_path: Path) -> None:
    tiny_mixture(seed=0).save_pretrained(tmp_path / "start")
    updates = {seed: file_weights(tmp_path / str(seed), seed) for seed in (1, 2)}
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    engine = VllmEngine.load(tmp_path / "start", CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD)
    assert largest_error(engine, 0) < 1e-4
    for seed, weights in updates.items():
        digests = {name: tensor_digest(tensor) for name, tensor in weights}
        engine.load_weights(weights, seed)
        assert largest_error(engine, seed) < 1e-4
        # The sender's tensors are its own: an optimizer step in place must not reach the engine.
        for _, tensor in weights:
            tensor.zero_()
        assert largest_error(engine, seed) < 1e-4
    assert engine.weight_digests() == digests
    # What a replica's process has hashed on arrival is not hashed again.
    arrived = file_weights(tmp_path / "3", 3)
    records = [replace(tensor_record(name, tensor), digest=f"seen {name}") for name, tensor in arrived]
    engine.load_weights(VerifiedStream(zip(records, (tensor for _, tensor in arrived), strict=True)), 3)
    assert largest_error(engine, 3) < 1e-4
    assert engine.weight_digests() == {name: f"seen {name}" for name in digests}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == num_threads
    engine._llm.llm_engine.step = lambda: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    for message in ("ZeroDivisionError", "vLLM failed before: ZeroDivisionError"):
        with pytest.raises(EngineError, match=message):
            engine.generate(REQUESTS)
    engine.close()
    assert dist.is_initialized()
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_vllm_loads_what_convert_wrote(tmp_path: Path) -> None:
    """Through megatron-core and back into several shards with an index: vLLM's greedy tokens and log-probs are those of the model that was saved."""
    source = save_tiny_llama(tmp_path / "source", tied=False)
    convert(Request(source, tmp_path / "megatron", "megatron", verify=False, config_dir=None, max_shard_bytes=10**9))
    convert(Request(tmp_path / "megatron", tmp_path / "back", "hf", verify=False, config_dir=None, max_shard_bytes=60_000))
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    engine = VllmEngine.load(tmp_path / "back", CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD)
    model = tiny_llama(tied=False)
    for request in (replace(request, seeds=(11,), temperature=0.0) for request in REQUESTS):
        ((sample,),) = engine.generate([request])
        tokens = [*request.prompt_token_ids, *sample.token_ids]
        with torch.no_grad():
            logits_T_V = model(torch.tensor([tokens])).logits[0, len(request.prompt_token_ids) - 1 : -1]
        assert logits_T_V.argmax(dim=1).tolist() == list(sample.token_ids)
        expected = logits_T_V.log_softmax(dim=1).amax(dim=1)
        assert (torch.tensor(sample.logprobs) - expected).abs().max() < 1e-4
    engine.close()


def held_types(parameters: Mapping[str, torch.dtype], mapper: Any, names: Iterable[str]) -> dict[str, torch.dtype]:
    """Of a model of vLLM's form in bfloat16."""
    held = {name: torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for name, dtype in parameters.items()}
    model = SimpleNamespace(named_parameters=held.items, hf_to_vllm_mapper=mapper)
    return held_wider(model, names=tuple(names), dtype=torch.bfloat16)


@pytest.mark.slow
def test_a_bfloat16_engine_is_sent_in_float32_what_it_holds_in_float32(tmp_path: Path) -> None:
    """Nemotron-3 has the two parameters that vLLM makes in float32 whatever engine.dtype says (its experts run on GPUs alone)."""
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    census = checkpoint_census(save_model(tmp_path, "nemotron_3"), torch.bfloat16)
    parameters = {"model.layers.0.mixer.A": torch.float32, "model.layers.1.mixer.gate.e_score_correction_bias": torch.float32}
    parameters |= {"model.layers.0.mixer.D": torch.bfloat16, "model.layers.3.mixer.gate.e_score_correction_bias": torch.float32}
    census = with_types(census, held_types(parameters, NemotronHForCausalLM.hf_to_vllm_mapper, census.tensors))
    wide = sorted(name for name, spec in census.tensors.items() if spec.dtype == torch.float32)
    assert wide == [
        f"backbone.layers.{place}" for place in ("0.mixer.A_log", "1.mixer.gate.e_score_correction_bias", "3.mixer.gate.e_score_correction_bias")
    ]
    assert {spec.dtype for spec in census.tensors.values()} == {torch.float32, torch.bfloat16}


def test_what_may_be_part_of_an_unknown_float32_parameter_is_sent_in_float32() -> None:
    parameters = {"norm": torch.bfloat16, "gates": torch.float32, "stacked": torch.float16}
    assert held_types(parameters, None, ("norm", "gate.0", "gate.1")) == {"gate.0": torch.float32, "gate.1": torch.float32}
    assert held_types({"norm": torch.bfloat16}, None, ("norm", "gate.0")) == {}


@pytest.mark.slow
def test_a_push_to_a_bfloat16_hybrid_rounds_what_it_holds_in_bfloat16_alone(tmp_path: Path) -> None:
    """Mamba's decay by vLLM's own tensor: -exp of what was sent, to the last bit, and of no rounding of it."""
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    engine = VllmEngine.load(save_model(tmp_path / "0", "nemotron_h", **sizes), config, stop_token_ids=(STOP,), pad_token_id=PAD)
    sent = load_file(save_model(tmp_path / "1", "nemotron_h", seed=1, **sizes) / "model.safetensors")
    decays = {name for name in sent if name.endswith("A_log")}
    assert len(decays) == 2
    for version, weights in enumerate((sent, {name: tensor.bfloat16() for name, tensor in sent.items()}), start=1):
        report = push(weights.items(), engine, version)
        assert report.num_rounded == (len(sent) - len(decays) if version == 1 else 0)
        (held,) = engine._llm.apply_model(lambda model: {name: parameter.clone() for name, parameter in model.named_parameters()})
        for name in decays:
            layer = name.replace("backbone", "model").removesuffix("A_log")
            assert torch.equal(held[layer + "A"], -torch.exp(weights[name].float()))
            assert torch.equal(held[layer + "D"], weights[name.replace("A_log", "D")].bfloat16())
    engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_the_census_is_read_from_the_files(tmp_path: Path, *, tied: bool) -> None:
    census = checkpoint_census(save_tiny_llama(tmp_path, tied=tied), torch.bfloat16)
    assert census.tensors["model.embed_tokens.weight"].shape == (VOCAB, 64)
    assert {spec.dtype for spec in census.tensors.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in census.tensors) is not tied
    assert census.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_a_directory_without_a_checkpoint_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        VllmEngine.load(tmp_path, CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.85, 67.2 GiB).", EngineError),
        ("WorkerProc initialization failed due to an exception in a background process.", EngineError),
        ("Model architectures ['Abacus'] are not supported", UserError),
    ],
)
def test_a_start_that_lacks_memory_is_no_fault_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, kind: type[Exception]
) -> None:
    def refuse(**arguments: object) -> None:
        raise ValueError(message)

    monkeypatch.setattr("vllm.LLM", refuse)
    with pytest.raises(kind, match=message[:20].replace("[", r"\[")):
        VllmEngine.load(save_tiny_llama(tmp_path), CONFIG, stop_token_ids=(STOP,), pad_token_id=PAD)


_KILLED_IN_MID_LOAD = """
import os, sys
from pathlib import Path
from pivotrl.weights.owned_directory import owned_directory
with owned_directory(Path(sys.argv[1])) as directory:
    (directory / "model-00000.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)
"""


def test_weights_for_several_workers_do_not_outlive_an_engine_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with two workers is its collective call alone here: where the files lie, what they hold, and what is gone before and after."""
    monkeypatch.setattr(vllm_module, "_IN_MEMORY", tmp_path)
    subprocess.run([sys.executable, "-c", _KILLED_IN_MID_LOAD, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    found: list[dict[str, torch.Tensor]] = []

    def reload(method: str, kwargs: Mapping[str, str]) -> None:
        assert method == "reload_weights"
        assert not left.exists()
        (file,) = Path(kwargs["weights_path"]).glob("*.safetensors")
        found.append(load_file(file))

    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    engine = object.__new__(VllmEngine)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=reload, apply_model=lambda repair: None)  # type: ignore[assignment]
    engine._reload(iter([("w", torch.arange(3.0))]))
    assert torch.equal(found[0]["w"], torch.arange(3.0))
    assert list(tmp_path.iterdir()) == []
