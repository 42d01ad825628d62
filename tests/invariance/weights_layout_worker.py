"""Loads and exports a tiny checkpoint in a layout: the worker of test_weights_in_layouts (fakes/ranks.py runs it).

Any wrong tensor, on any process, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fakes.trainer_batches import VOCAB, hf_model
from safetensors.torch import load_file

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron.hf_checkpoint import CheckpointTensors, read_config
from pivotrl.megatron.hf_weights import export_hf, load_hf, save_hf
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.upstream import parallel_state

_TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
_LOGIT_TOLERANCE = 1e-5


def measure(job: Mapping[str, Any]) -> int:
    """Checks one checkpoint in one layout; the number of its tensors.

    Args:
        job: the checkpoint's `directory`, `family` and `settings`, keys of `parallel`, and whether to try saving and a changed value (`is_first`).
    """
    directory, layout = Path(job["directory"]), ParallelConfig(**job["parallel"])
    initialize_parallel(layout, seed=0)
    chunks: list[Any] = [*build_model(read_config(directory), layout)]
    load_hf(chunks, directory)
    with CheckpointTensors(directory) as stored:
        exported = dict(export_hf(chunks))
        assert exported.keys() == stored.files.keys(), exported.keys() ^ stored.files.keys()
        different = [name for name, tensor in exported.items() if not torch.equal(tensor, stored.read(name))]
        assert not different, different
    if job["family"] in ("llama", "qwen2", "qwen3") and layout.pipeline_model_parallel_size == 1:
        assert chunks[0].decoder.layers[0].mlp.linear_fc2.weight.shape[1] * layout.tensor_model_parallel_size == 48
        _check_logits(job, chunks[0])
    if job["is_first"]:
        _check_saving(chunks, directory)
        _check_that_every_process_counts(chunks, directory)
    return len(exported)


def _check_logits(job: Mapping[str, Any], model: Any) -> None:
    with torch.no_grad():
        own = model(_TOKENS, torch.arange(_TOKENS.shape[1]).expand_as(_TOKENS), None)
        expected = hf_model(job["family"], **job["settings"])(_TOKENS).logits
    first = parallel_state.get_tensor_model_parallel_rank() * own.shape[-1]
    difference = (own - expected[..., first : first + own.shape[-1]]).abs().max()
    assert difference < _LOGIT_TOLERANCE, f"logits differ by {difference}"


def _check_that_every_process_counts(chunks: list[Any], directory: Path) -> None:
    """A value changed on the last process alone appears in every process's export."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            chunks[-1].decoder.layers[-1].mlp.linear_fc2.weight[0, -1] += 1
    with CheckpointTensors(directory) as stored:
        different = {name for name, tensor in export_hf(chunks) if not torch.equal(tensor, stored.read(name))}
    assert different == {"model.layers.1.mlp.down_proj.weight"}, different


def _check_saving(chunks: list[Any], directory: Path) -> None:
    """Files appear complete, and every process learns where they could not be written."""
    out = directory.parent / f"saved_{torch.distributed.get_world_size()}"
    save_hf(chunks, source_dir=directory, out_dir=out, max_shard_bytes=20_000)
    shards = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    saved = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in export_hf(chunks))
    try:
        save_hf(chunks, source_dir=directory, out_dir=directory / "config.json" / "below_a_file")
    except (UserError, OSError):
        return
    raise AssertionError("saving below a file succeeded")
