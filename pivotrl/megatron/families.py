"""Which Hugging Face architectures the trainer builds, and what in a config.json it refuses by name.

Reads configurations only: nothing is allocated and megatron-core is not imported. A key is never ignored silently: a feature that
would change the function computed and is not built is refused here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pivotrl.errors import UserError

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BRIDGED_ARCHITECTURES = ("Qwen3MoeForCausalLM", "NemotronHForCausalLM")
SUPPORTED_ARCHITECTURES = DENSE_ARCHITECTURES + BRIDGED_ARCHITECTURES
# What upstream's rotary embedding hard-codes for Llama 3.1's frequency scaling.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

type _Refusal = tuple[str, Callable[[Any], bool]]

_EVERY_FAMILY: tuple[_Refusal, ...] = (
    ("attention_dropout", lambda hf: hf.attention_dropout != 0),
    ("quantization_config", lambda hf: getattr(hf, "quantization_config", None) is not None),
)
_ROTARY_FAMILY: tuple[_Refusal, ...] = (
    ("hidden_act", lambda hf: hf.hidden_act != "silu"),
    ("attention_bias", lambda hf: hf.model_type != "qwen2" and hf.attention_bias),
    ("use_sliding_window", lambda hf: hf.model_type != "llama" and hf.use_sliding_window),
)
_REFUSALS: Mapping[str, tuple[_Refusal, ...]] = {
    "llama": (*_ROTARY_FAMILY, ("mlp_bias", lambda hf: hf.mlp_bias)),
    "qwen2": _ROTARY_FAMILY,
    "qwen3": _ROTARY_FAMILY,
    "qwen3_moe": (
        *_ROTARY_FAMILY,
        ("mlp_only_layers", lambda hf: bool(hf.mlp_only_layers)),
        ("decoder_sparse_step", lambda hf: hf.decoder_sparse_step != 1),
    ),
    "nemotron_h": (
        ("mlp_hidden_act", lambda hf: hf.mlp_hidden_act != "relu2"),
        ("mamba_hidden_act", lambda hf: hf.mamba_hidden_act != "silu"),
        ("tie_word_embeddings", lambda hf: hf.tie_word_embeddings),
        *((name, lambda hf, name=name: getattr(hf, name)) for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
        ("use_conv_bias", lambda hf: not hf.use_conv_bias),
        ("hidden_dropout", lambda hf: hf.hidden_dropout != 0),
        ("sliding_window", lambda hf: hf.sliding_window is not None),
        ("residual_in_fp32", lambda hf: hf.residual_in_fp32),
        # Upstream's Mamba layer has these as constants.
        ("conv_kernel", lambda hf: hf.conv_kernel != 4),
        ("layer_norm_epsilon", lambda hf: hf.layer_norm_epsilon != 1e-5),
        ("time_step_limit", lambda hf: tuple(hf.time_step_limit) != (0.0, float("inf"))),
        # Upstream's sigmoid router always divides the chosen scores by their sum, and builds one shared expert.
        ("norm_topk_prob", lambda hf: "moe" in hf.layers_block_type and not hf.norm_topk_prob),
        ("n_shared_experts", lambda hf: "moe" in hf.layers_block_type and hf.n_shared_experts != 1),
    ),
}


def read_family(hf_config: Mapping[str, Any]) -> Any:
    """The transformers configuration object of a supported architecture.

    Args:
        hf_config: content of config.json; keys it leaves out take transformers' defaults for the family.

    Raises:
        UserError: for an architecture or a feature that is not supported, naming it.
    """
    architectures = hf_config["architectures"] if hf_config.get("architectures") else [None]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"config.json names the architecture {architectures[0]}",
            rule=f"the trainer builds {', '.join(SUPPORTED_ARCHITECTURES)}",
            fix="choose a checkpoint of one of these",
        )
    try:
        hf = CONFIG_MAPPING[hf_config["model_type"]].from_dict(_decode_floats(hf_config))
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers refuses config.json: {' '.join(str(error).split())}",
            rule=f"it describes a {architectures[0]}",
            fix="copy it again from where the weights come from",
        ) from error
    for name, is_refused in (*_EVERY_FAMILY, *_REFUSALS[hf.model_type]):
        if is_refused(hf):
            raise UserError(
                f"config.json sets {name} to {getattr(hf, name)!r}",
                rule=f"the trainer's {architectures[0]} does not compute that",
                fix="choose a checkpoint without it",
            )
    if hf.model_type != "nemotron_h":
        rope_arguments(hf)
    return hf


def rope_arguments(hf: Any) -> dict[str, Any]:
    """The rotary arguments of upstream's GPTModel.

    Raises:
        UserError: for a scaling that is not built.
    """
    rope = dict(hf.rope_parameters)
    kind, base = rope.pop("rope_type"), rope.pop("rope_theta")
    factor = rope.pop("factor", None)
    if kind == "default" and factor is None and not rope:
        return {"rotary_base": base}
    if kind == "llama3" and rope == _LLAMA3_ROPE and hf.architectures[0] in DENSE_ARCHITECTURES:
        return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": factor}
    raise UserError(
        f"config.json asks for rotary embeddings {hf.rope_parameters!r}",
        rule=f"the trainer builds rope_type default, and for dense models llama3 with {_LLAMA3_ROPE}",
        fix="choose a checkpoint with one of these",
    )


def _decode_floats(value: Any) -> Any:
    """The configuration with infinities as numbers; JSON has none, so files hold {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, list) else value
