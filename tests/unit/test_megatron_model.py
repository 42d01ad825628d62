"""A recipe that starts from Megatron weights: the `model` stage makes the Hugging Face directory, and a second run finds it made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes.trainer_batches import save_model
from safetensors.torch import load_file

from pivotrl import build, pipeline
from pivotrl.errors import UserError
from pivotrl.megatron.conversion import Request
from pivotrl.megatron.conversion import convert as write_form
from pivotrl.weights.megatron_form import convert, inputs

ROOT = Path(__file__).resolve().parents[2]
_EVAL = "eval.suites=[{type: held_out, num_candidates: 1, num_samples: 1}]"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("forms")
    hf = save_model(directory / "hf", "llama")
    (hf / "tokenizer.json").write_text("{}")
    write_form(Request(hf, directory / "megatron", "megatron", verify=False, config_dir=None, max_shard_bytes=10**9))
    return directory


def test_the_model_stage_converts_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher too, whose variables must not reach the conversion; weights alone need a description."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = f"{{type: megatron, path: {source}/megatron/weights, hf_path: {source}/hf}}"
    loaded = pipeline.load(ROOT / "recipes" / "quickstart", [f"model={model}", "world=null", "sft=null", _EVAL, "ingest.paths=[a.jsonl]"])
    pipeline.prepare("profile", loaded, tmp_path)
    made = build.start_checkpoint(loaded, tmp_path)
    expected, found = load_file(source / "hf" / "model.safetensors"), load_file(made / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (made / "tokenizer.json").exists()
    written = (made / "model.safetensors").stat()
    pipeline.prepare("profile", loaded, tmp_path)
    assert (made / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns


def test_what_cannot_be_converted_is_the_users_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be converted"):
        convert(source / "megatron" / "weights", None, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UserError, match="is not a directory"):
        inputs(tmp_path / "nowhere", None)
    assert inputs(source / "hf", None) != inputs(source / "megatron", None)
