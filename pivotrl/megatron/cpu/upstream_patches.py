"""The few upstream functions a proxy of `torch` cannot reach, each changed right after its module is loaded.

Every patch names what upstream does (megatron-core 0.19.2) and why that fails without CUDA. None changes a number on a machine where
the upstream function already works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from pivotrl.megatron.cpu.mamba_mixer import patch_mamba_mixer
from pivotrl.megatron.cpu.torch_proxy import ModulePatch, get_rng_state, set_rng_state
from pivotrl.megatron.slices import own_positions

_CUDA_TYPE_PREFIX = "torch.cuda."
_CPU_TYPE_PREFIX = "torch."


def _cpu_type_names(constant: Any) -> Any:
    if isinstance(constant, str) and constant.startswith(_CUDA_TYPE_PREFIX) and constant.endswith("Tensor"):
        return _CPU_TYPE_PREFIX + constant.removeprefix(_CUDA_TYPE_PREFIX)
    if isinstance(constant, tuple):
        return tuple(_cpu_type_names(item) for item in constant)
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_cpu_type_names(constant.co_consts))
    return constant


def _expect_cpu_types(function: Callable[..., Any]) -> None:
    """Optimizers sort parameters by the text of ``tensor.type()``, for example 'torch.cuda.FloatTensor'; a CPU tensor says 'torch.FloatTensor'."""
    target = getattr(function, "__func__", function)
    if not isinstance(target, FunctionType):
        raise TypeError(f"{function!r} is not a Python function")
    target.__code__ = _cpu_type_names(target.__code__)


def _patch_jit(module: ModuleType) -> None:
    """Upstream compiles its small fused functions with torch.compile; on a CPU that costs minutes and gains nothing for small models."""
    module.disable_jit_fuser()


def _patch_random(module: ModuleType) -> None:
    """The generator of the device is reached through torch's private CUDA functions; here it is the CPU generator."""
    module.__dict__.update(_get_cuda_rng_state=get_rng_state, _set_cuda_rng_state=set_rng_state)


def _patch_distributed_optimizer(module: ModuleType) -> None:
    optimizer = module.DistributedOptimizer
    _expect_cpu_types(optimizer.__init__)
    _expect_cpu_types(optimizer._build_model_and_main_param_groups)
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_without_step(self: Any, model_param: torch.Tensor, tensors: Mapping[str, Any]) -> None:
        # torch's AdamW keeps a `step` tensor per parameter that the checkpoint holds once per group; upstream looks for it here and raises
        # KeyError. A value that is no tensor is skipped.
        set_states(self, model_param, {"step": None, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_without_step


def _patch_optimizer(module: ModuleType) -> None:
    _expect_cpu_types(module.Float16OptimizerWithFloat16Params.__init__)


def _patch_clip_grads(module: ModuleType) -> None:
    _expect_cpu_types(module.clip_grad_by_total_norm_fp32)


def _patch_rotary(module: ModuleType) -> None:
    """Upstream moves the numbers of a context parallel rank's slices to the device with `Tensor.cuda`, which no proxy of `torch` reaches."""

    def on_this_rank(embedding: torch.Tensor, sequence_dim: int, cp_group: Any) -> torch.Tensor:
        length = embedding.shape[sequence_dim]
        return embedding.index_select(sequence_dim, own_positions([0, length], size=cp_group.size(), rank=cp_group.rank()))

    module.__dict__.update(get_pos_emb_on_this_cp_rank=on_this_rank)


def _patch_token_dispatcher(module: ModuleType) -> None:
    """Upstream turns split sizes into a list of ints only on their way from a GPU; gloo's all-to-all takes no tensors either."""

    def maybe_move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001 (upstream's signature)
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.__dict__.update(maybe_move_tensor_to_cpu=maybe_move)


def _patch_mappings(module: ModuleType) -> None:
    """Experts split over processes gather as many tokens as each process happens to have; gloo gathers and scatters equal sizes only."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def is_even(group: Any, sizes: Any) -> bool:
        return group.size() == 1 or sizes is None or len({int(size) for size in sizes}) == 1

    def uneven_gather(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:  # noqa: FBT001
        if is_even(group, output_split_sizes):
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def uneven_scatter(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:  # noqa: FBT001
        if is_even(group, input_split_sizes):
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    module.__dict__.update(_gather_along_first_dim=uneven_gather, _reduce_scatter_along_first_dim=uneven_scatter)


def _patch_language_module(module: ModuleType) -> None:
    """With tied embeddings the first and last pipeline stage exchange their uninitialised copies at construction, moved there by `Tensor.cuda`.

    They are told that the model has no values yet, as upstream's own builds without memory do; loading fills both copies.
    """
    set_up = module.LanguageModule.setup_embeddings_and_output_layer

    def set_up_without_exchange(self: Any) -> None:
        kept, self.config.init_model_with_meta_device = self.config.init_model_with_meta_device, True
        try:
            set_up(self)
        finally:
            self.config.init_model_with_meta_device = kept

    module.LanguageModule.setup_embeddings_and_output_layer = set_up_without_exchange


def _patch_mamba_context_parallel(module: ModuleType) -> None:
    """Where sequences are packed, upstream asks transformer-engine's compiled module which tokens a context parallel rank holds."""

    def own_tokens(starts: torch.Tensor, _total: int, size: int, rank: int) -> torch.Tensor:
        return own_positions(starts.tolist(), size=size, rank=rank)

    compiled = SimpleNamespace(thd_get_partitioned_indices=own_tokens)
    module.__dict__.update(tex=compiled, is_te_min_version=lambda *_arguments, **_named: True)


PATCHES: Mapping[str, ModulePatch] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.models.common.embeddings.rope_utils": _patch_rotary,
    "megatron.core.models.common.language_module.language_module": _patch_language_module,
    "megatron.core.ssm.mamba_mixer": patch_mamba_mixer,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.ssm.mamba_context_parallel": _patch_mamba_context_parallel,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.token_dispatcher": _patch_token_dispatcher,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
    "megatron.core.optimizer.optimizer": _patch_optimizer,
    "megatron.core.optimizer.clip_grads": _patch_clip_grads,
}
