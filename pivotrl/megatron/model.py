"""From a Hugging Face config.json to a megatron-core model: this process's chunks of it, in any parallel layout.

Dense decoders (Llama, Qwen2, Qwen3) are configured here as upstream's GPTModel; mixture-of-experts and hybrid models take the provider
that Megatron-Bridge has for them (`bridge`). Both use upstream's transformer-engine layer specs on either platform. Weights are left
uninitialised: `hf_weights.load_hf` fills them and checks that none was missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from pivotrl.config.schema import MoeConfig, ParallelConfig
from pivotrl.megatron.families import DENSE_ARCHITECTURES, read_family, rope_arguments
from pivotrl.megatron.prefix_layers import share_prefixes
from pivotrl.megatron.upstream import (
    PLATFORM,
    GPTModel,
    HybridModel,
    TransformerConfig,
    get_gpt_layer_with_transformer_engine_spec,
    parallel_state,
)

type LanguageModel = GPTModel | HybridModel


def build_model(hf_config: Mapping[str, Any], parallel: ParallelConfig, *, moe: MoeConfig | None = None) -> list[LanguageModel]:
    """This process's chunks of the model that a config.json describes, on the platform's device, with uninitialised weights.

    One chunk per virtual pipeline stage; one where there is none. `initialize_parallel` must have laid out the process groups.

    Args:
        hf_config: content of config.json; keys it leaves out take transformers' defaults for the family.
        parallel: the layout the process groups were made for.
        moe: what happens to experts in training, without effect on dense models; None: what a recipe that does not say gets.

    Raises:
        UserError: for an architecture or a feature that is not supported, naming it.
    """
    hf = read_family(hf_config)
    if hf.architectures[0] not in DENSE_ARCHITECTURES:
        from pivotrl.megatron import bridge

        chunks = bridge.build_chunks(hf, {**shared_arguments(), **layout_arguments(parallel)}, moe or MoeConfig())
    else:
        config = dense_config(hf, parallel)
        chunks = [_dense_chunk(hf, config, stage) for stage in virtual_stages(parallel.virtual_pipeline_model_parallel_size)]
    for chunk in chunks:
        share_prefixes(chunk)
    return [chunk.to(PLATFORM.device) for chunk in chunks]


def virtual_stages(count: int | None) -> list[int | None]:
    """Upstream's number of every chunk of this process; None for the only one."""
    return [None] if count is None else list(range(count))


def stage_ends(stage: int | None) -> dict[str, Any]:
    """Whether the chunk holds the embedding and the output layer, as upstream's model arguments."""
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
    }


def shared_arguments() -> dict[str, Any]:
    """Fields of TransformerConfig that are the same for every family: number formats, initialisation and fusions of the platform.

    `calculate_per_token_loss` tells upstream that losses of micro-batches and data parallel ranks add up; see `trainer` for why.
    """
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": not PLATFORM.is_gpu,
        "params_dtype": PLATFORM.parameter_dtype,
        "pipeline_dtype": PLATFORM.parameter_dtype,
        "bf16": PLATFORM.parameter_dtype == torch.bfloat16,
        "bias_activation_fusion": PLATFORM.is_gpu,
        "bias_dropout_fusion": PLATFORM.is_gpu,
        "apply_rope_fusion": PLATFORM.is_gpu,
        "persist_layer_norm": PLATFORM.is_gpu,
        "masked_softmax_fusion": PLATFORM.is_gpu,
        "gradient_accumulation_fusion": False,
    }


def layout_arguments(parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that say how the model is laid out over processes."""
    is_interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
        # The interleaved schedule with batched sends gives wrong numbers on two stages under gloo, silently; upstream's command line forbids
        # the pair, its library does not.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # Micro-batches differ in shape, so stages tell each other the shape of what they send.
        "variable_seq_lengths": parallel.pipeline_model_parallel_size > 1,
        # The other dispatcher takes micro-batches of one shape only.
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": PLATFORM.is_gpu,
        **(recompute if parallel.recompute == "full" else {}),
    }


def dense_config(hf: Any, parallel: ParallelConfig) -> TransformerConfig:
    """Upstream's configuration for a transformers configuration object of a dense family."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type == "qwen3",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        **shared_arguments(),
        **layout_arguments(parallel),
    )


def _dense_chunk(hf: Any, config: TransformerConfig, stage: int | None) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=stage,
        **stage_ends(stage),
        **rope_arguments(hf),
    )
