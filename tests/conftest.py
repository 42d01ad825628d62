"""Fixtures for every test: the shared trajectories (never copied into the project) and single-threaded, offline numerics, the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tiny models gain nothing from a second thread, and threads that wait for each other cost a busy machine ten times the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine must not fail a property.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

_SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of real trajectories beside the checkout. A user's clone has none; CI must have it."""
    if not _SHARED_DATA.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{_SHARED_DATA} is missing and CI=true: the shared trajectories must lie beside the checkout")
        pytest.skip(f"no shared trajectories at {_SHARED_DATA}")
    return _SHARED_DATA


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Float sums depend on the number of threads: for tests that compare runs bit for bit, some of them in other processes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: words to (exit code, standard output, standard error)."""

    def call(*words: object) -> tuple[int, str, str]:
        from pivotrl.cli import main

        monkeypatch.setattr(sys, "argv", ["pivotrl", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        output, errors = capsys.readouterr()
        return code, output, errors

    return call
