"""Teaches a model's attention and Mamba layers to take streams with shared prefixes, on either platform.

Upstream hands the description of a packed stream through to its core attention and its Mamba mixer. Where the description is a
`SharedPrefixParams`, these functions answer in the layer's place; every other call reaches the layer. Projections, norms, MLPs and
experts work token by token and need nothing, except that upstream's count of tokens per expert, which moves the balancing bias, is taken
over rows: padding counts for none and a shared prefix for all of its actions. Suffixes: S = this rank's tokens of the stream, B = rows of a
padded stream, E = experts, H = heads of queries, K = heads of keys and values, D = channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pivotrl.megatron.prefix_attention import attend_branches
from pivotrl.megatron.prefix_mamba import scan_branches
from pivotrl.megatron.shared_prefix import SharedPrefixParams, StreamParams
from pivotrl.megatron.slices import global_order
from pivotrl.megatron.upstream import (
    MambaMixer,
    TEDotProductAttention,
    TopKRouter,
    TransformerLayer,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    parallel_state,
)


def share_prefixes(chunk: torch.nn.Module) -> None:
    """Changes every core attention and Mamba mixer of a model chunk in place; parameters and their names stay as they are."""
    for module in chunk.modules():
        if isinstance(module, TEDotProductAttention):
            _rebind(module, "forward", _attend)
        elif isinstance(module, MambaMixer):
            _rebind(module, "_ssm_training", _scan)
        elif isinstance(module, TransformerLayer) and isinstance(router := getattr(module.mlp, "router", None), TopKRouter):
            module.register_forward_pre_hook(partial(_note_weights, router), with_kwargs=True)
            if router.enable_expert_bias:
                _rebind(router, "_apply_expert_bias", _count_tokens)


def rows_per_expert(router: Any, routing_map: torch.Tensor) -> torch.Tensor:
    """Tokens [E] that each expert got in a router's last pass, [tokens, E], counted over rows as the balancing bias is."""
    weights = getattr(router, "stream_weights", None)
    return routing_map.sum(dim=0) if weights is None else (routing_map * weights.unsqueeze(1)).sum(dim=0)


def _rebind(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """The method becomes `replacement(owner, the method, ...)`."""
    setattr(owner, name, partial(replacement, owner, getattr(owner, name)))


def _attend(
    module: Any, forward: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any
) -> torch.Tensor:
    packing = named.get("packed_seq_params")
    if not isinstance(packing, SharedPrefixParams):
        return forward(query, key, value, *others, **named)
    scale = module.config.softmax_scale if module.config.softmax_scale is not None else query.shape[-1] ** -0.5
    # [S, 1, heads, D]: a stream is a batch of one.
    query_S_H_D, key_S_K_D, value_S_K_D = (tensor.squeeze(1) for tensor in (query, key, value))
    if module.config.context_parallel_size == 1:
        output_S_H_D = attend_branches(query_S_H_D, key_S_K_D, value_S_K_D, packing.branches, scale=scale)
    else:
        output_S_H_D = _attend_by_heads(query_S_H_D, key_S_K_D, value_S_K_D, packing, scale)
    return output_S_H_D.flatten(1).unsqueeze(1)


def _attend_by_heads(
    query_S_H_D: torch.Tensor, key_S_K_D: torch.Tensor, value_S_K_D: torch.Tensor, packing: SharedPrefixParams, scale: float
) -> torch.Tensor:
    """Each context parallel rank trades its slice of the stream for all of the stream and its share of the heads, and back."""
    group: Any = parallel_state.get_context_parallel_group()
    size = group.size()
    order_S = global_order(packing.cu_seqlens_q.tolist(), size=size).to(query_S_H_D.device)

    def whole(tensor_S_H_D: torch.Tensor) -> torch.Tensor:
        heads, channels = tensor_S_H_D.shape[1:]
        if heads < size:
            tensor_S_H_D = tensor_S_H_D.repeat_interleave(size // heads, dim=1)
        gathered = all_to_all_sp2hp(tensor_S_H_D.flatten(1).contiguous(), group=group)
        return gathered.unflatten(1, (-1, channels)).index_select(0, order_S)

    output_S_H_D = attend_branches(whole(query_S_H_D), whole(key_S_K_D), whole(value_S_K_D), packing.branches, scale=scale)
    dealt = output_S_H_D.flatten(1).index_select(0, order_S.argsort())
    return all_to_all_hp2sp(dealt, group=group).unflatten(1, query_S_H_D.shape[1:])


def _scan(mixer: Any, ssm_training: Callable[..., torch.Tensor], projected: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
    if not isinstance(packed_seq_params, SharedPrefixParams):
        return ssm_training(projected, packed_seq_params)
    return scan_branches(mixer, projected, packed_seq_params)


def _note_weights(router: Any, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leaves the weights of the stream's tokens with the router; also before a recomputed forward pass.

    Upstream hands a router no description of the stream. It does hand it a padding mask, and then multiplies maps [tokens, E] by masks
    [tokens], which fits no shape; the mask goes no further than here.
    """
    packing, padding_B_S = named.get("packed_seq_params"), named.pop("padding_mask", None)
    weights_S = packing.token_weights_S if isinstance(packing, StreamParams) else None
    if padding_B_S is not None:
        # The first stage of upstream's GPTModel splits the mask as sequence parallelism splits the stream; its other models and stages do not.
        is_whole = padding_B_S.shape[1] != named["hidden_states"].shape[0]
        weights_S = (~_own_part(padding_B_S.T, layer.config) if is_whole else ~padding_B_S.T).flatten()
    elif weights_S is not None and layer.config.sequence_parallel:
        weights_S = _own_part(weights_S, layer.config)
    router.stream_weights = weights_S
    return arguments, named


def _own_part(tensor_S: torch.Tensor, config: Any) -> torch.Tensor:
    """The part of [S, ...] whose residual stream this tensor parallel rank holds."""
    return tensor_S.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]


def _count_tokens(router: Any, _count: Callable[..., None], routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    """Upstream's `TopKRouter._apply_expert_bias`, by weight. Like there, a pass without gradients counts nothing."""
    assert padding_mask is None
    if torch.is_grad_enabled():
        router.local_tokens_per_expert += rows_per_expert(router, routing_map)
