"""Every command of README.md runs as written (`make test` aside), and the quickstart's result lies in its recipe's expected ranges."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART_RUN = "runs/quickstart"
# The suite that runs this test, and what brought the reader here.
NOT_RUN = ("make test", "git clone")


def _commands() -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and not line.startswith(NOT_RUN)]


def _run(command: str, scratch: Path) -> str:
    # The same words with the run directory moved, so that a test never touches a user's runs.
    moved = command.replace(QUICKSTART_RUN, str(scratch / "quickstart")).replace("runs/", f"{scratch}/")
    # A reader's environment: the recipe sets its own number of threads.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"RUN": str(scratch / "quickstart")}
    done = subprocess.run(moved, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    scratch = tmp_path_factory.mktemp("readme")
    return scratch, {command: _run(command, scratch) for command in _commands()}


def test_there_is_something_to_run() -> None:
    assert "make quickstart" in _commands()


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_every_command_of_the_readme_runs(outputs: tuple[Path, dict[str, str]]) -> None:
    scratch, printed = outputs
    assert set(printed) == set(_commands())
    assert "In-domain success" in printed["make quickstart"]
    page = (scratch / "quickstart" / "report" / "index.html").read_text()
    assert "<html" in page
    assert not re.search(r"(?:src|href)=[\"']?https?://", page), "the page must not need a network"


@pytest.mark.slow
def test_the_quickstart_rises_and_forgets_nothing(outputs: tuple[Path, dict[str, str]]) -> None:
    """Ranges of recipes/quickstart/expected.json: before and after per suite, and the change."""
    scores = json.loads((outputs[0] / "quickstart" / "eval" / "scores.json").read_text())
    measured = {f"{row['name']}/{row['checkpoint']}": row["score"] for row in scores["suites"]}
    measured |= {f"{row['name']}/change": row["difference"] for row in scores["differences"]}
    expected = json.loads((ROOT / "recipes" / "quickstart" / "expected.json").read_text())
    outside = {name: (measured[name], limits) for name, limits in expected["scores"].items() if not limits["low"] <= measured[name] <= limits["high"]}
    assert outside == {}


def test_every_path_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
