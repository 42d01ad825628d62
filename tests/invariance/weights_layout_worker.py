"""Loads and exports tiny checkpoints of every family in many parallel layouts: ``python weights_layout_worker.py WORLD_SIZE DIRECTORY``.

Imports once, then forks the processes, which meet over gloo; prints one line per case. Any wrong tensor, on any process, is an error.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fakes.trainer_batches import VOCAB, hf_model, save_model
from safetensors.torch import load_file

from pivotrl.config.schema import ParallelConfig
from pivotrl.errors import UserError
from pivotrl.megatron import bridge
from pivotrl.megatron.hf_checkpoint import CheckpointTensors, read_config
from pivotrl.megatron.hf_weights import export_hf, load_hf, save_hf
from pivotrl.megatron.model import build_model
from pivotrl.megatron.parallel import initialize_parallel
from pivotrl.megatron.upstream import parallel_state

_TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
_LOGIT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    family: str
    layout: ParallelConfig
    settings: dict[str, Any] = field(default_factory=dict)


def _layout(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )


_TIED = {"tie_word_embeddings": True}
CASES = {
    2: {
        "llama tp2 tied": Case("llama", _layout(tp=2), _TIED),
        "qwen2 tp2": Case("qwen2", _layout(tp=2)),
        "qwen3 tp2, one key/value head": Case("qwen3", _layout(tp=2), {"num_key_value_heads": 1}),
        "llama pp2 tied": Case("llama", _layout(pp=2), _TIED),
        "llama pp2 vpp2 tied": Case("llama", _layout(pp=2, vpp=2), {"num_hidden_layers": 4, **_TIED}),
        "qwen3 dp2": Case("qwen3", _layout()),
        "qwen3_moe tp2 etp2": Case("qwen3_moe", _layout(tp=2)),
        "qwen3_moe ep2": Case("qwen3_moe", _layout(ep=2)),
        "nemotron_3 tp2 ep2 etp1": Case("nemotron_3", _layout(tp=2, ep=2, etp=1)),
        "nemotron_3 pp2": Case("nemotron_3", _layout(pp=2)),
        "nemotron_h pp2 vpp2": Case("nemotron_h", _layout(pp=2, vpp=2)),
    },
    4: {
        "llama tp2 pp2 tied": Case("llama", _layout(tp=2, pp=2), _TIED),
        "qwen3_moe tp2 pp2 ep2 etp1": Case("qwen3_moe", _layout(tp=2, pp=2, ep=2, etp=1)),
        "nemotron_3 tp2 pp2 ep2 etp1": Case("nemotron_3", _layout(tp=2, pp=2, ep=2, etp=1)),
        "nemotron_3 pp2 vpp2 ep2": Case("nemotron_3", _layout(pp=2, vpp=2, ep=2)),
    },
}


def _check_case(case: Case, directory: Path) -> list[Any]:
    """Loads, exports and compares; the chunks, for what the caller tries further."""
    initialize_parallel(case.layout, seed=0)
    chunks = build_model(read_config(directory), case.layout)
    load_hf(chunks, directory)
    with CheckpointTensors(directory) as stored:
        exported = dict(export_hf(chunks))
        assert exported.keys() == stored.files.keys(), exported.keys() ^ stored.files.keys()
        different = [name for name, tensor in exported.items() if not torch.equal(tensor, stored.read(name))]
        assert not different, different
    size = case.layout.tensor_model_parallel_size
    if case.family in ("llama", "qwen2", "qwen3") and case.layout.pipeline_model_parallel_size == 1:
        assert chunks[0].decoder.layers[0].mlp.linear_fc2.weight.shape[1] * size == 48
        _check_logits(case, chunks[0])
    return chunks


def _check_logits(case: Case, model: Any) -> None:
    with torch.no_grad():
        own = model(_TOKENS, torch.arange(_TOKENS.shape[1]).expand_as(_TOKENS), None)
        expected = hf_model(case.family, **case.settings)(_TOKENS).logits
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


def _run(rank: int, world_size: int, directories: dict[str, Path]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    tried = None
    for label, case in CASES[world_size].items():
        chunks = _check_case(case, directories[label])
        if tried is None:
            tried = True
            _check_saving(chunks, directories[label])
            _check_that_every_process_counts(chunks, directories[label])
        if rank == 0:
            sys.stdout.write(f"ok {label}\n")
            sys.stdout.flush()


def main() -> None:
    world_size, root = int(sys.argv[1]), Path(sys.argv[2])
    directories = {
        label: save_model(root / str(index), case.family, **case.settings) for index, (label, case) in enumerate(CASES[world_size].items())
    }
    bridge.import_bridge()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _run(rank, world_size, directories)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    main()
