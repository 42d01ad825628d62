"""The CPU platform: megatron-core works, torch itself is untouched, and upstream is reached through one door."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import BuiltinFunctionType

import pytest
import torch

import pivotrl
from pivotrl.megatron import platform

_PACKAGE = Path(pivotrl.__file__).parent


@pytest.fixture(scope="module")
def active() -> platform.Platform:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device: the CPU platform is not used")
    return platform.activate()


def test_without_cuda_the_platform_is_the_cpu(active: platform.Platform) -> None:
    assert active == platform.Platform(torch.device("cpu"), torch.float32, "gloo")
    assert platform.activate() is active


def test_torch_itself_is_untouched(active: platform.Platform) -> None:
    """Factories changed for everybody once corrupted what transformers loaded."""
    assert all(isinstance(getattr(torch, name), BuiltinFunctionType) for name in ("zeros", "empty", "tensor", "empty_like", "randn"))
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_megatron_modules_see_a_cpu_where_they_ask_for_cuda(active: platform.Platform) -> None:
    from megatron.core.optimizer import clip_grads

    seen = clip_grads.torch
    assert seen is not torch
    assert seen.zeros(2, device="cuda").device == torch.device("cpu")
    assert seen.empty(1, device=torch.device("cuda", 0)).device == torch.device("cpu")
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.nn is torch.nn


def test_upstream_does_not_compile_its_small_functions(active: platform.Platform) -> None:
    from megatron.core import jit

    function = object()
    assert jit.jit_fuser(function) is function


def test_megatron_is_imported_through_one_door() -> None:
    """And Megatron-Bridge in one file, which goes through the same door first."""
    allowed = {_PACKAGE / "megatron" / "upstream.py", _PACKAGE / "megatron" / "bridge.py", *(_PACKAGE / "megatron" / "cpu").glob("*.py")}
    offenders = [str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py") if path not in allowed and "megatron" in _imported_packages(path)]
    assert not offenders


def test_the_cpu_platform_is_loaded_by_the_platform_alone() -> None:
    importers = {
        str(path.relative_to(_PACKAGE))
        for path in _PACKAGE.rglob("*.py")
        if "pivotrl.megatron.cpu" in path.read_text() and path.parent.name != "cpu" and _imports_cpu_folder(path)
    }
    assert importers == {"megatron/platform.py"}


def _imported_packages(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add((node.module or "").split(".")[0])
    return packages


def _imports_cpu_folder(path: Path) -> bool:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return any((node.module or "").startswith("pivotrl.megatron.cpu") for node in nodes)


def test_upstream_does_not_import_torchs_compiler() -> None:
    """A decorator of a method that only inference calls would: a quarter of what a start imports."""
    code = """import sys, torch; kept = torch.compile; import pivotrl.megatron.upstream
print(torch.compile is kept, "torch._inductor.compile_fx" in sys.modules)"""
    words = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert words.stdout.split() == ["True", "False"]
