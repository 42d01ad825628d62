"""The few upstream functions a proxy of `torch` cannot reach, each changed right after its module is loaded.

Every patch names what upstream does (megatron-core 0.19.2) and why that fails without CUDA. None changes a number on a machine where
the upstream function already works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

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

    module.get_pos_emb_on_this_cp_rank = on_this_rank


PATCHES: Mapping[str, ModulePatch] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.models.common.embeddings.rope_utils": _patch_rotary,
    "megatron.core.ssm.mamba_mixer": patch_mamba_mixer,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
    "megatron.core.optimizer.optimizer": _patch_optimizer,
    "megatron.core.optimizer.clip_grads": _patch_clip_grads,
}
