"""From a Hugging Face config.json to a megatron-core model: dense decoders of the Llama, Qwen2 and Qwen3 families.

The model is upstream's GPTModel with upstream's transformer-engine layer spec on both platforms. Weights are left uninitialised:
`hf_weights.load_hf` fills them and checks that none was missed. A feature that would change the function computed and is not built
here is refused by name before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pivotrl.errors import UserError
from pivotrl.megatron.upstream import PLATFORM, GPTModel, TransformerConfig, get_gpt_layer_with_transformer_engine_spec

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What upstream's rotary embedding hard-codes for Llama 3.1's frequency scaling.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

type _Refusal = tuple[str, Callable[[Any], bool]]
_REFUSALS: tuple[_Refusal, ...] = (
    ("hidden_act", lambda hf: hf.hidden_act != "silu"),
    ("attention_bias", lambda hf: hf.model_type != "qwen2" and hf.attention_bias),
    ("mlp_bias", lambda hf: hf.model_type == "llama" and hf.mlp_bias),
    ("use_sliding_window", lambda hf: hf.model_type != "llama" and hf.use_sliding_window),
    ("attention_dropout", lambda hf: hf.attention_dropout != 0),
    ("quantization_config", lambda hf: getattr(hf, "quantization_config", None) is not None),
)


def build_model(hf_config: Mapping[str, Any]) -> GPTModel:
    """The model a config.json describes, on the platform's device, with uninitialised weights.

    Args:
        hf_config: content of config.json; keys it leaves out take transformers' defaults for the family.

    Raises:
        UserError: for an architecture or a feature that is not supported, naming it.
    """
    hf = _family_config(hf_config)
    rope = _rope_arguments(hf)
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=hf.model_type == "qwen3")
    model = GPTModel(
        config=transformer_config(hf),
        transformer_layer_spec=spec,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        **rope,
    )
    return model.to(PLATFORM.device)


def transformer_config(hf: Any) -> TransformerConfig:
    """Upstream's configuration for a transformers configuration object of a supported family.

    `calculate_per_token_loss` tells upstream that losses of micro-batches and data parallel ranks add up; see `trainer` for why.
    """
    head_size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_size,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not PLATFORM.is_gpu,
        params_dtype=PLATFORM.parameter_dtype,
        pipeline_dtype=PLATFORM.parameter_dtype,
        bf16=PLATFORM.is_gpu,
        bias_activation_fusion=PLATFORM.is_gpu,
        bias_dropout_fusion=PLATFORM.is_gpu,
        apply_rope_fusion=PLATFORM.is_gpu,
        persist_layer_norm=PLATFORM.is_gpu,
        masked_softmax_fusion=PLATFORM.is_gpu,
        gradient_accumulation_fusion=False,
    )


def _family_config(hf_config: Mapping[str, Any]) -> Any:
    architectures = hf_config["architectures"] if hf_config.get("architectures") else [None]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"config.json names the architecture {architectures[0]}",
            rule=f"the trainer builds {', '.join(SUPPORTED_ARCHITECTURES)}",
            fix="choose a checkpoint of one of these",
        )
    hf = CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
    for name, is_refused in _REFUSALS:
        if is_refused(hf):
            raise UserError(
                f"config.json sets {name} to {getattr(hf, name)!r}",
                rule=f"the trainer's {architectures[0]} does not compute that",
                fix="choose a checkpoint without it",
            )
    return hf


def _rope_arguments(hf: Any) -> dict[str, Any]:
    rope = dict(hf.rope_parameters)
    kind, base = rope.pop("rope_type"), rope.pop("rope_theta")
    factor = rope.pop("factor", None)
    if kind == "default" and factor is None and not rope:
        return {"rotary_base": base}
    if kind == "llama3" and rope == _LLAMA3_ROPE:
        return {"rotary_base": base, "rope_scaling": True, "rope_scaling_factor": factor}
    raise UserError(
        f"config.json asks for rotary embeddings {hf.rope_parameters!r}",
        rule=f"the trainer builds rope_type default, and llama3 with {_LLAMA3_ROPE}",
        fix="choose a checkpoint with one of these",
    )
