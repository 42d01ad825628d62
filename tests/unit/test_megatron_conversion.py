"""Conversion there and back: every bit, every tensor, transformers' logits; and what is refused leaves nothing behind."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.trainer_batches import hf_model, save_model
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import conversion, safetensors_shards
from pivotrl.megatron.conversion import Conversion, Request, convert
from pivotrl.megatron.hf_checkpoint import read_config
from pivotrl.megatron.hf_weights import load_hf
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.upstream import dist_checkpointing, parallel_state
from pivotrl.rundir import read_json, write_json

_FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h", "nemotron_3"]


def _to_megatron(source: Path, out: Path, **changes: Any) -> Conversion:
    return convert(replace(Request(source, out, "megatron", verify=True, config_dir=None, max_shard_bytes=10**9), **changes))


def _to_hf(source: Path, out: Path, **changes: Any) -> Conversion:
    return convert(replace(Request(source, out, "hf", verify=True, config_dir=None, max_shard_bytes=10**9), **changes))


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_steps_below_the_range_of_initialization_are_compared_as_they_are(tmp_path: Path) -> None:
    """transformers alone would raise them to time_step_min; logits would differ by 0.9."""
    model = hf_model("nemotron_3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-9.0)
    model.save_pretrained(tmp_path / "source")
    difference = _to_megatron(tmp_path / "source", tmp_path / "megatron").max_logit_difference
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.parametrize("family", _FAMILIES)
def test_there_and_back_keeps_every_bit(tmp_path: Path, family: str) -> None:
    source = save_model(tmp_path / "source", family)
    (source / "tokenizer.json").write_text("{}")
    there = _to_megatron(source, tmp_path / "megatron")
    back = _to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=30_000)
    stored, returned = _tensors(source), _tensors(tmp_path / "back")
    assert stored.keys() == returned.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in stored.items())
    for done in (there, back):
        assert (done.num_tensors, done.num_verified) == (len(stored), len(stored))
        assert done.max_logit_difference is not None
        assert done.max_logit_difference < 1e-4
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    assert read_json(tmp_path / "back" / "model.safetensors.index.json")["weight_map"].keys() == stored.keys()
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits, hf_model(family)(tokens).logits)


def test_formats_a_stored_tied_head_and_carried_tensors_return_as_they_were(tmp_path: Path) -> None:
    hf_model("nemotron_3").bfloat16().save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    stored = {**load_file(file), "mtp.layers.0.eh_proj.weight": torch.arange(6.0).view(2, 3).bfloat16()}
    save_file(stored, file, metadata={"format": "pt"})
    _to_megatron(tmp_path / "source", tmp_path / "megatron", verify=False)
    assert _to_hf(tmp_path / "megatron", tmp_path / "back").num_verified == len(stored)
    returned = _tensors(tmp_path / "back")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in returned.items()} == {name: (t.dtype, t.shape) for name, t in stored.items()}
    assert all(torch.equal(returned[name], tensor) for name, tensor in stored.items())
    assert read_json(tmp_path / "back" / "config.json")["dtype"] == "bfloat16"


def test_weights_of_elsewhere_are_read_with_a_config(tmp_path: Path) -> None:
    """Another program's layout of the same tensors: another name above them, and more beside them."""
    source = save_model(tmp_path / "source", tie_word_embeddings=True)
    initialize_parallel(ParallelConfig(), seed=0)
    (model,) = build_model(read_config(source), ParallelConfig())
    load_hf([model], source)
    (tmp_path / "weights").mkdir()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    dist_checkpointing.save({"model0": model.sharded_state_dict(metadata=metadata), "step": 3}, str(tmp_path / "weights"))
    with pytest.raises(UserError, match="--config"):
        _to_hf(tmp_path / "weights", tmp_path / "back")
    done = _to_hf(tmp_path / "weights", tmp_path / "back", config_dir=source)
    assert done.num_verified == len(_tensors(source))
    assert all(torch.equal(_tensors(tmp_path / "back")[name], tensor) for name, tensor in _tensors(source).items())


def test_a_changed_tensor_and_other_logits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "source")
    _to_megatron(source, tmp_path / "megatron", verify=False)
    records = read_json(tmp_path / "megatron" / "tensors.json")
    records["model.norm.weight"]["sha256"] = records["lm_head.weight"]["sha256"]
    write_json(tmp_path / "megatron" / "tensors.json", records)
    with pytest.raises(UserError, match=r"model\.norm\.weight changed"):
        _to_hf(tmp_path / "megatron", tmp_path / "back")
    monkeypatch.setattr(conversion, "_TOLERANCE", {torch.float32: 0.0})
    with pytest.raises(UserError, match="logits differ"):
        _to_megatron(source, tmp_path / "strict")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "source"]


def _no_index(source: Path) -> None:
    hf_model("llama").save_pretrained(source, max_shard_size="10KB")
    (source / "model.safetensors").unlink()
    next(source.glob("model-00002-of-*")).unlink()


def _other_architecture(source: Path) -> None:
    write_json(source / "config.json", {**read_json(source / "config.json"), "architectures": ["MambaForCausalLM"]})


def _cut_short(source: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [(_no_index, "model-00002-of-"), (_other_architecture, "architecture MambaForCausalLM"), (_cut_short, "model.safetensors")],
)
def test_a_damaged_source_is_refused_by_name(tmp_path: Path, damage: Any, words: str) -> None:
    damage(save_model(tmp_path / "source"))
    with pytest.raises(UserError) as error:
        _to_megatron(tmp_path / "source", tmp_path / "megatron")
    assert words in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_megatron_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _to_megatron(save_model(tmp_path / "source"), tmp_path / "megatron", verify=False)
    wider = save_model(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(UserError, match="cannot be read"):
        _to_hf(tmp_path / "megatron", tmp_path / "back", config_dir=wider)
    with pytest.raises(UserError, match=r"metadata\.json"):
        _to_hf(tmp_path / "source", tmp_path / "back", config_dir=wider)
    assert not (tmp_path / "back").exists()


def test_an_existing_output_is_never_replaced(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    with pytest.raises(UserError, match="exists"):
        _to_megatron(source, source)
    assert len(_tensors(source)) > 0


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _to_megatron(save_model(tmp_path / "source"), tmp_path / "megatron", verify=False)

    def full(*_arguments: Any, **_keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors_shards, "save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*bytes are free"):
        _to_hf(tmp_path / "megatron", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "source"]
