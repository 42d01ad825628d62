"""Stand-ins for the transformer-engine layers that megatron-core's specs name, with transformer-engine's class and parameter names.

With these bound, upstream's transformer-engine specs build the model on a CPU, so that parameter names (for example
``linear_qkv.layer_norm_weight``) and hence checkpoints are the same on both platforms. The linears are upstream's own parallel ones.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as upstream_layers
from megatron.core.extensions import transformer_engine_spec_provider as upstream_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from pivotrl.megatron.cpu.layers import CausalAttention, Norm, norm_parameters, normalize


class TENorm(Norm):
    """Norm of the residual stream and of queries and keys."""


class TEColumnParallelLinear(ColumnParallelLinear):
    """Linear split along its outputs."""


class TERowParallelLinear(RowParallelLinear):
    """Linear split along its inputs."""


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and linear as one module; parameters `layer_norm_weight` and `layer_norm_bias` beside `weight` and `bias`."""

    layer_norm_bias: torch.nn.Parameter | None

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **linear_arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **linear_arguments)
        self._norm_config = config
        self.layer_norm_weight, bias = norm_parameters(config, input_size)
        self.register_parameter("layer_norm_bias", bias)

    def forward(self, hidden: torch.Tensor, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(linear(norm(hidden)), bias where the caller adds it)."""
        config = self._norm_config
        normalized = normalize(hidden, config, weight=self.layer_norm_weight, bias=self.layer_norm_bias, eps=config.layernorm_epsilon)
        return super().forward(normalized, *arguments, **keywords)


class TELinear(torch.nn.Module):
    """Linear that every tensor parallel process holds whole; upstream uses it for the latent projections of experts."""

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str | None, config: TransformerConfig, bias: bool, **_linear_arguments: Any
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or bias:
            raise NotImplementedError(f"the CPU platform has no TELinear with parallel_mode {parallel_mode} and bias {bias}")
        self.config = config
        self.parallel_mode = None  # As transformer-engine says "not split" to whoever saves or converts the module.
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # Upstream's `finalize_model_grads` sums the gradients of the tensor parallel processes, each of which saw part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(linear(hidden), no bias)."""
        return torch.nn.functional.linear(hidden, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """One copy of the weight for all tensor parallel processes."""
        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, None, sharded_offsets, **groups)


class TEDotProductAttention(CausalAttention):
    """Core attention."""


_STAND_INS = (TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear, TELayerNormColumnParallelLinear, TEDotProductAttention)


def install() -> None:
    """Binds the stand-ins where upstream's specs look for transformer-engine's classes.

    Raises:
        RuntimeError: where the real transformer-engine is present: it would be hidden.
    """
    if upstream_layers.HAVE_TE:
        raise RuntimeError("transformer-engine is installed but no CUDA device is usable; its layers cannot run here")
    for stand_in in _STAND_INS:
        for module in (upstream_layers, upstream_provider):
            setattr(module, stand_in.__name__, stand_in)
    # Upstream takes another norm for queries and keys where transformer-engine is older than 1.9.
    upstream_provider.is_te_min_version = lambda *_args, **_kwargs: True
    # These modules decided at import that transformer-engine is absent.
    gpt_layer_specs.TESpecProvider = upstream_provider.TESpecProvider
    transformer_block.LayerNormImpl = TENorm
    moe_layer.__dict__.update(HAVE_TE=True, TELinear=TELinear)
