"""The one door to megatron-core: activates the platform, then hands on the upstream names the trainer is made of.

Code runs at import here on purpose: megatron.core must never be imported before the platform is active. Nothing else in the product
imports megatron.* (pivotrl/megatron/cpu, which the platform loads, aside); a test keeps it so.
"""

from __future__ import annotations

from pivotrl.megatron.platform import activate

PLATFORM = activate()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.ssm import mamba_mixer  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

__all__ = [
    "PLATFORM",
    "AttnBackend",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "HybridModel",
    "MambaMixer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "PackedSeqParams",
    "RouterReplay",
    "RouterReplayAction",
    "ShardedTensor",
    "TEDotProductAttention",
    "TopKRouter",
    "TransformerConfig",
    "TransformerLayer",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "apply_factories",
    "dist_checkpointing",
    "filesystem_async",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "mamba_mixer",
    "model_parallel_cuda_manual_seed",
    "nested_values",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "unwrap_model",
]
