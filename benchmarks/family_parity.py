"""Largest logit difference from transformers for a tiny model of every family, and how many tensors return bit for bit.

    PYTHONPATH=.:tests python benchmarks/family_parity.py

Also prints the CPU seconds of importing megatron-core with its platform, and Megatron-Bridge on top.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from fakes.trainer_batches import VOCAB, hf_model, save_model
from safetensors.torch import load_file

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "nemotron_h", "nemotron_3")


def main() -> None:
    before = time.process_time()
    from pivotrl.config.schema import ParallelConfig
    from pivotrl.megatron.hf_checkpoint import read_config
    from pivotrl.megatron.hf_weights import export_hf, load_hf
    from pivotrl.megatron.model import build_model
    from pivotrl.megatron.parallel import initialize_parallel

    core_s = time.process_time() - before
    from pivotrl.megatron import bridge

    before = time.process_time()
    bridge.import_bridge()
    print(f"import, CPU seconds: megatron-core {core_s:.1f}, Megatron-Bridge {time.process_time() - before:.1f}")
    initialize_parallel(ParallelConfig(), seed=0)
    tokens = torch.randint(0, VOCAB, (4, 100), generator=torch.Generator().manual_seed(1))
    print(f"{'family':12} {'max |d logit|':>14} {'std of logits':>14} {'tensors equal':>14}")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            source = save_model(Path(directory), family)
            (model,) = build_model(read_config(source), ParallelConfig())
            load_hf([model], source)
            expected = hf_model(family)(tokens).logits
            difference = (model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None) - expected).abs().max()
            stored = load_file(source / "model.safetensors")
            equal = sum(torch.equal(tensor, stored[name]) for name, tensor in export_hf([model]))
            print(f"{family:12} {difference:14.1e} {expected.std():14.2f} {equal:>9}/{len(stored)}")


if __name__ == "__main__":
    main()
