"""A checkpoint with random weights is an ordinary Hugging Face checkpoint, the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.tiny_tokenizer import tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pivotrl.config.schema import ScratchModel
from pivotrl.errors import UserError
from pivotrl.megatron.hf_checkpoint import init_hf_checkpoint


def _model(**changes: int) -> ScratchModel:
    sizes = {
        "hidden_size": 64,
        "num_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 96,
        "max_position_embeddings": 128,
        "vocab_size": 400,
    }
    return ScratchModel.model_validate({"type": "scratch", **sizes, **changes})


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(directory)
    return directory


def test_it_loads_in_transformers_with_tied_embeddings(tmp_path: Path, tokenizer_dir: Path) -> None:
    init_hf_checkpoint(_model(), tokenizer_dir=tokenizer_dir, out_dir=tmp_path / "hf", seed=3)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    model, notes = loaded
    assert not any(notes.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == len(tiny_tokenizer())


def test_the_seed_decides_the_bytes(tmp_path: Path, tokenizer_dir: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        init_hf_checkpoint(_model(), tokenizer_dir=tokenizer_dir, out_dir=tmp_path / name, seed=seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1]
    assert files[0] != files[2]
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_weights_have_the_stated_spread(tmp_path: Path, tokenizer_dir: Path) -> None:
    init_hf_checkpoint(_model(), tokenizer_dir=tokenizer_dir, out_dir=tmp_path / "hf", seed=3)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert tensors["model.layers.7.self_attn.o_proj.weight"].std().item() == pytest.approx(0.005, rel=0.05)
    assert tensors["model.layers.7.mlp.down_proj.weight"].std().item() == pytest.approx(0.005, rel=0.05)
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 100"):
        init_hf_checkpoint(_model(vocab_size=100), tokenizer_dir=tokenizer_dir, out_dir=tmp_path / "hf", seed=3)
    assert not (tmp_path / "hf").exists()
