"""Hugging Face weights in and out: the same function, the same bits, and nothing left over or missing unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes.trainer_batches import VOCAB, hf_model, save_model
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import export_hf, load_hf, save_hf
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.upstream import GPTModel

_TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _load(checkpoint_dir: Path) -> GPTModel:
    initialize_parallel(ParallelConfig(), seed=0)
    (model,) = build_model(read_config(checkpoint_dir), ParallelConfig())
    load_hf([model], checkpoint_dir)
    return cast(GPTModel, model)


def _logits(model: GPTModel) -> torch.Tensor:
    positions = torch.arange(_TOKENS.shape[1]).expand_as(_TOKENS)
    with torch.no_grad():
        return model(_TOKENS, positions, None)


_TIED = [(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (True, False)]
_UNTIED = [(family, False) for family in ("qwen3_moe", "nemotron_h", "nemotron_3")]


@pytest.mark.parametrize(("family", "tied"), [*_TIED, *_UNTIED])
def test_logits_equal_transformers_and_weights_return_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    checkpoint_dir = save_model(tmp_path / "hf", family, tie_word_embeddings=tied)
    model = _load(checkpoint_dir)
    with torch.no_grad():
        expected = hf_model(family, tie_word_embeddings=tied)(_TOKENS).logits
    assert expected.std() > 0.3, "logits of a model that ignores its input would agree too"
    torch.testing.assert_close(_logits(model), expected, atol=1e-5, rtol=0)
    stored = load_file(checkpoint_dir / "model.safetensors")
    exported = dict(export_hf([model]))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("name", "replacement", "words"),
    [
        ("backbone.layers.1.mixer.experts.3.up_proj.weight", None, "lacks backbone.layers.1.mixer.experts.3.up_proj.weight"),
        ("backbone.layers.9.norm.weight", torch.zeros(32), "beside what the model uses, backbone.layers.9.norm.weight"),
        ("backbone.layers.0.mixer.in_proj.weight", torch.zeros(201, 32), "backbone.layers.0.mixer.in_proj.weight has 201 rows, not 200"),
        ("backbone.layers.0.mixer.out_proj.weight", torch.zeros(32, 63), "backbone.layers.0.mixer.out_proj.weight do not fit"),
    ],
)
def test_a_hybrid_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, name: str, replacement: torch.Tensor | None, words: str) -> None:
    checkpoint_dir = save_model(tmp_path, "nemotron_3")
    _edit_tensors(checkpoint_dir, **{name: replacement})
    with pytest.raises(UserError) as error:
        _load(checkpoint_dir)
    assert words in str(error.value)


def test_tensors_of_further_token_heads_are_carried_to_a_saved_checkpoint(tmp_path: Path) -> None:
    checkpoint_dir = save_model(tmp_path / "hf", "nemotron_3")
    carried = torch.arange(6.0).view(2, 3)
    _edit_tensors(checkpoint_dir, **{"mtp.layers.0.eh_proj.weight": carried})
    model = _load(checkpoint_dir)
    assert "mtp.layers.0.eh_proj.weight" not in dict(export_hf([model]))
    save_hf([model], source_dir=checkpoint_dir, out_dir=tmp_path / "out")
    saved, stored = load_file(tmp_path / "out" / "model.safetensors"), load_file(checkpoint_dir / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)


def test_llama3_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rope_parameters": {"rope_theta": 10000.0, **_LLAMA3}, "max_position_embeddings": 16384, "head_dim": 32}
    model = _load(save_model(tmp_path / "scaled", **settings))
    with torch.no_grad():
        scaled = hf_model("llama", **settings)(_TOKENS).logits
        plain = hf_model("llama", max_position_embeddings=16384, head_dim=32)(_TOKENS).logits
    torch.testing.assert_close(_logits(model), scaled, atol=1e-5, rtol=0)
    assert (scaled - plain).abs().max() > 1e-4, "the scaling makes no difference here, so the test shows nothing"


def test_bfloat16_shards_load_exactly(tmp_path: Path) -> None:
    hf_model("llama").bfloat16().save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in export_hf([_load(tmp_path)]):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])


def test_saved_checkpoint_loads_in_transformers_with_its_companions(tmp_path: Path) -> None:
    checkpoint_dir = save_model(tmp_path / "hf", tie_word_embeddings=True)
    (checkpoint_dir / "tokenizer.json").write_text("{}")
    (checkpoint_dir / "chat_template.jinja").write_text("{{ messages }}")
    model = _load(checkpoint_dir)
    with torch.no_grad():
        model.embedding.word_embeddings.weight.mul_(1.5)
    save_hf([model], source_dir=checkpoint_dir, out_dir=tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reloaded.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(_logits(model), reloaded(_TOKENS).logits, atol=1e-5, rtol=0)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    assert (tmp_path / "out" / "_SUCCESS").exists()


def _edit_tensors(checkpoint_dir: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(checkpoint_dir / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, checkpoint_dir / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, "beside what the model uses, model.layers.9.mlp.up_proj.weight"),
        ({"model.norm.weight": torch.zeros(31)}, "model.norm.weight has shape (31,)"),
        ({"lm_head.weight": torch.zeros(VOCAB, 32)}, "lm_head.weight that differs from model.embed_tokens.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    checkpoint_dir = save_model(tmp_path, tie_word_embeddings=True)
    _edit_tensors(checkpoint_dir, **changes)
    with pytest.raises(UserError) as error:
        _load(checkpoint_dir)
    assert words in str(error.value)


def test_a_tied_head_that_is_stored_and_derived_frequencies_are_accepted(tmp_path: Path) -> None:
    checkpoint_dir = save_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(checkpoint_dir / "model.safetensors")["model.embed_tokens.weight"]
    _edit_tensors(checkpoint_dir, **{"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    _load(checkpoint_dir)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM"),
        ("llama", {"architectures": None}, "architecture None"),
        ("llama", {"hidden_act": "gelu"}, "sets hidden_act to 'gelu'"),
        ("llama", {"attention_bias": True}, "sets attention_bias to True"),
        ("llama", {"mlp_bias": True}, "sets mlp_bias to True"),
        ("qwen2", {"use_sliding_window": True}, "sets use_sliding_window to True"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "sets quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary embeddings"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, **_LLAMA3, "low_freq_factor": 2.0}}, "rotary embeddings"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    checkpoint_dir = save_model(tmp_path, family)
    config = json.loads((checkpoint_dir / "config.json").read_text()) | changes
    initialize_parallel(ParallelConfig(), seed=0)
    with pytest.raises(UserError) as error:
        build_model(config, ParallelConfig())
    assert words in str(error.value)


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_weights_is_refused(tmp_path: Path, absent: str) -> None:
    checkpoint_dir = save_model(tmp_path)
    (checkpoint_dir / absent).unlink()
    with pytest.raises(UserError, match=absent):
        _load(checkpoint_dir)
