"""The one place that knows whether this process computes on a GPU or a CPU.

`activate` runs before megatron.core is first imported (`pivotrl.megatron.upstream` sees to that) and answers with the device, number
format and communication backend that everything below pivotrl/megatron uses. Nothing else in the product asks for CUDA.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import resource
import warnings
from dataclasses import dataclass

import torch

from pivotrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Platform:
    """Where this process computes.

    >>> Platform(torch.device("cpu"), torch.float32, "gloo").is_gpu
    False
    """

    device: torch.device
    parameter_dtype: torch.dtype
    """Format of weights and activations. Optimizer state is float32 on both platforms, gradients are where the recipe does not say otherwise."""
    communication_backend: str
    """Backend of torch.distributed."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def memory_peak_bytes(self) -> int:
        """Most memory this process has held so far: of the GPU what tensors took, of a CPU what was resident."""
        if self.is_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        # Linux counts it in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@functools.cache
def activate() -> Platform:
    """Makes `import megatron.core` work on this machine; the same answer on every call.

    With a usable CUDA device it selects the process's device and changes nothing. Otherwise it installs the CPU platform
    (pivotrl/megatron/cpu): float32 and gloo.

    Raises:
        UserError: where a CUDA device is usable and transformer-engine is not installed.
    """
    _quiet_upstream()
    if torch.cuda.is_available():
        return _activate_gpu()
    from pivotrl.megatron.cpu import torch_proxy, upstream_patches

    torch_proxy.install(upstream_patches.PATCHES)
    with warnings.catch_warnings():
        # At import upstream warns of every optional GPU package that is absent; here their absence is the normal case.
        warnings.simplefilter("ignore")
        from pivotrl.megatron.cpu import transformer_engine

        transformer_engine.install()
    return Platform(torch.device("cpu"), torch.float32, "gloo")


def _activate_gpu() -> Platform:
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "a CUDA device is usable but transformer-engine is not installed",
            rule="on a GPU the trainer uses transformer-engine's layers",
            fix="install the `gpu` extra, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU",
        )
    # torchrun numbers the processes of a machine; a process of its own is number 0.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Platform(device, torch.bfloat16, "nccl")


def _quiet_upstream() -> None:
    """Keeps upstream's notices (deprecation of the model class, missing optional kernels) off the terminal; its errors still show."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Reports, at import by upstream, that no CUDA compiler was found.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    # Upstream calls torch's collectives and checkpoint functions by names and in ways that torch 2.13 is about to change.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
