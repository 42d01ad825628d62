"""What modules named megatron.* see as `torch` on a machine without CUDA: the real module with a CPU where they ask for a CUDA device.

megatron-core has no switch for the device: it writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its functions. An
import hook therefore gives every megatron module, in place of the name `torch`, a proxy whose tensor factories send a CUDA device to
the CPU and whose ``torch.cuda`` answers for the CPU (streams and events do nothing, the CPU generator is the device's generator).
torch itself is left untouched on purpose: replacing its factories for everybody changed what transformers loads from a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")
_PACKAGE = "megatron."
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "as_tensor")
_LIKE_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like")

type ModulePatch = Callable[[ModuleType], None]


class NullStream:
    """Stands for a CUDA stream or event: work on a CPU is done when the call returns, so there is nothing to order or wait for."""

    device = CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def query(self) -> bool:
        """Whether the recorded work is complete: always."""
        return True

    def record_event(self, event: NullStream | None = None) -> NullStream:
        """The event that marks this point of the stream."""
        return event if event is not None else NullStream()

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    synchronize = wait = record = wait_stream = wait_event = _nothing


class ModuleProxy(ModuleType):
    """A module that answers the overridden names itself and every other name from the real module."""

    def __init__(self, real: ModuleType, overrides: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        # Page-locked memory exists only for transfers to a device.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _null_context(*_args: Any, **_kwargs: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """State of the CPU generator, whatever device or clone options upstream passes."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    """Sets the CPU generator's state, whatever device options upstream passes."""
    torch.set_rng_state(new_state)


def build_proxy() -> ModuleProxy:
    """A proxy of `torch` that knows one device, the CPU."""
    random = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": torch.manual_seed, "manual_seed_all": torch.manual_seed}
    cuda = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_stream": _nothing,
        "is_current_stream_capturing": lambda: False,
        "Stream": NullStream,
        "Event": NullStream,
        "current_stream": NullStream,
        "default_stream": NullStream,
        "stream": _null_context,
        "device": _null_context,
        "random": ModuleProxy(torch.cuda.random, random),
        **random,
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in (*_FACTORIES, *_LIKE_FACTORIES)}
    return ModuleProxy(torch, {"cuda": ModuleProxy(torch.cuda, cuda), **factories})


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """`@torch.compile` changes nothing meanwhile: it would import torch's compiler, seconds of every start, for functions never called here."""
    compiler = torch.compile
    torch.compile = lambda model=None, **_options: model if model is not None else lambda function: function
    try:
        yield
    finally:
        torch.compile = compiler


class MegatronFinder(importlib.abc.MetaPathFinder):
    """Loads modules named megatron.* as usual, then swaps their `torch` for the proxy and applies the patch registered for the name."""

    def __init__(self, proxy: ModuleProxy, patches: Mapping[str, ModulePatch]) -> None:
        self._proxy = proxy
        self._patches = patches

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _nothing_compiled():
                execute(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self._proxy
            patch = self._patches.get(module.__name__)
            if patch is not None:
                patch(module)

        spec.loader.exec_module = exec_module
        return spec


def install(patches: Mapping[str, ModulePatch]) -> None:
    """Puts the import hook first; does nothing where it is installed already.

    Args:
        patches: by module name, what to change in a module right after it was loaded.

    Raises:
        RuntimeError: where megatron.core was imported before, so that its modules hold the real torch.
    """
    if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        return
    if any(name.startswith(_PACKAGE) for name in sys.modules):
        raise RuntimeError("megatron.core was imported before pivotrl.megatron.platform.activate()")
    sys.meta_path.insert(0, MegatronFinder(build_proxy(), patches))
