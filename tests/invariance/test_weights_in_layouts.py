"""Weights in and out of every parallel layout: each process exports the source checkpoint bit for bit, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.ranks import measure_on_ranks
from fakes.trainer_batches import save_model

_WORKER = Path(__file__).with_name("weights_layout_worker.py")
_TIED = {"tie_word_embeddings": True}


def _layout(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": tp > 1,
    }


# By number of ranks: family, layout, the model's settings. The first of each also tries saving.
_CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [
        ("llama", _layout(tp=2), _TIED),
        ("qwen2", _layout(tp=2), {}),
        ("qwen3", _layout(tp=2), {"num_key_value_heads": 1}),
        ("llama", _layout(pp=2), _TIED),
        ("llama", _layout(pp=2, vpp=2), {"num_hidden_layers": 4, **_TIED}),
        ("qwen3", _layout(), {}),
        ("qwen3_moe", _layout(tp=2), {}),
        ("qwen3_moe", _layout(ep=2), {}),
        ("nemotron_3", _layout(tp=2, ep=2, etp=1), {}),
        ("nemotron_3", _layout(pp=2), {}),
        ("nemotron_h", _layout(pp=2, vpp=2), {}),
    ],
    4: [
        ("llama", _layout(tp=2, pp=2), _TIED),
        ("qwen3_moe", _layout(tp=2, pp=2, ep=2, etp=1), {}),
        ("nemotron_3", _layout(tp=2, pp=2, ep=2, etp=1), {}),
        ("nemotron_3", _layout(pp=2, vpp=2, ep=2), {}),
    ],
}


@pytest.mark.slow
def test_every_process_exports_the_source_checkpoint(tmp_path: Path) -> None:
    jobs = {
        size: [
            {
                "family": family,
                "directory": str(save_model(tmp_path / f"{size}_{index}", family, **settings)),
                "parallel": parallel,
                "settings": settings,
                "is_first": index == 0,
            }
            for index, (family, parallel, settings) in enumerate(cases)
        ]
        for size, cases in _CASES.items()
    }
    for answers in measure_on_ranks(_WORKER, jobs, tmp_path).values():
        assert min(answers) > 10, "a checkpoint of fewer tensors than a model has"
