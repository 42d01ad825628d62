"""Megatron-Bridge behind its one file: it agrees with the dense mapping bit for bit, and leaves no trace of transformer-engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from fakes.trainer_batches import save_model

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import bridge
from pivotrl.megatron.families import read_family
from pivotrl.megatron.hf_checkpoint import CheckpointTensors, read_config
from pivotrl.megatron.hf_weights import export_hf, load_hf
from pivotrl.megatron.model import build_model, layout_arguments, shared_arguments
from pivotrl.megatron.parallel import initialize_parallel


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_it_maps_dense_families_as_the_own_rules_do(tmp_path: Path, family: str, tied: bool) -> None:
    """Two independent mappings: every parameter of the model and every exported tensor is the same."""
    checkpoint_dir = save_model(tmp_path, family, tie_word_embeddings=tied)
    initialize_parallel(ParallelConfig(), seed=0)
    own = build_model(read_config(checkpoint_dir), ParallelConfig())
    load_hf(own, checkpoint_dir)
    arguments = {**shared_arguments(), **layout_arguments(ParallelConfig())}
    bridged = bridge.build_chunks(read_family(read_config(checkpoint_dir)), arguments, MoeConfig())
    with CheckpointTensors(checkpoint_dir) as tensors:
        bridge.load(bridged, tensors)
    ours, theirs = dict(own[0].named_parameters()), dict(bridged[0].named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    exported, expected = dict(bridge.export(bridged)), dict(export_hf(own))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_transformer_engine_stays_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer-engine is installed")
    bridge.import_bridge()
    assert importlib.util.find_spec("transformer_engine") is None
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    with bridge._stand_in_for_transformer_engine():
        assert isinstance(sys.modules["transformer_engine.pytorch"].Linear, type)
    assert "transformer_engine" not in sys.modules


def test_its_absence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Megatron-Bridge is not installed.*extra `bridge`"):
        bridge.import_bridge.__wrapped__()


@pytest.mark.parametrize(("router", "learns"), [("trained", True), ("frozen", False)])
def test_a_frozen_router_does_not_learn(tmp_path: Path, router: str, learns: bool) -> None:
    checkpoint_dir = save_model(tmp_path, "qwen3_moe")
    initialize_parallel(ParallelConfig(), seed=0)
    moe = MoeConfig.model_validate({"router": router})
    (model,) = build_model(read_config(checkpoint_dir), ParallelConfig(), moe=moe)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name for name, flag in flags.items() if not flag} == (set() if learns else {name for name in flags if ".router." in name})
    assert any(".router." in name for name in flags)
