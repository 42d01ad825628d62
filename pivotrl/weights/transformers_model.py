"""transformers' model of a checkpoint, computing what the checkpoint says: the only way the package loads one to run it.

Where transformers computes something else than a checkpoint's config.json states, it is repaired here, so no caller can forget it.
Called by the rollout engine, `pivotrl convert --verify` and the parity check's search by layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_transformers(checkpoint_dir: Path, *, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """The model of a Hugging Face checkpoint directory, in evaluation mode; nothing is downloaded.

    Args:
        dtype: number format of the weights; "auto": the one they are stored in.

    Raises:
        OSError, ValueError: where transformers cannot read the directory.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint_dir, dtype=dtype, local_files_only=True)
    _apply_time_step_limit(model)
    return model.eval()


def _apply_time_step_limit(model: PreTrainedModel) -> None:
    """Gives Nemotron-H's Mamba layers the limits of their steps that config.json states; other models stay as they are.

    transformers' pass over several tokens raises steps to `time_step_min`, a range of initialization, where its own decoding of one token,
    megatron-core and vLLM leave them. Source: models/nemotron_h/modeling_nemotron_h.py of transformers 5.19.
    """
    if model.config.model_type != "nemotron_h":
        return
    base: Any = model.base_model
    for layer in base.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = tuple(model.config.time_step_limit)
