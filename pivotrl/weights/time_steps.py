"""Where transformers computes something else than a Nemotron checkpoint says: the size of a Mamba layer's steps.

Called wherever transformers' model is run or compared with: the rollout engine, `pivotrl convert --verify`, the parity check's search by layer.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def apply_time_step_limit(model: PreTrainedModel) -> None:
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
