"""Every command of README.md and of docs/your_own_run.md runs as written (`make test` aside), and the quickstart's result lies in its recipe's
expected ranges. No link of the documentation is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
WALK = (ROOT / "docs" / "your_own_run.md").read_text()
# The suite that runs this test, and what brought the reader here.
NOT_RUN = ("make test", "git clone")


def _commands(page: str) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", page, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and not line.startswith(NOT_RUN)]


def _moved(text: str, scratch: Path) -> str:
    """The same words with the run directory moved, so that a test never touches a user's runs."""
    return text.replace("runs/", f"{scratch}/")


def _run(command: str, scratch: Path) -> str:
    moved = _moved(command, scratch)
    # A reader's environment: the recipe sets its own number of threads.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"RUN": str(scratch / "quickstart")}
    done = subprocess.run(moved, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    scratch = tmp_path_factory.mktemp("readme")
    return scratch, {command: _run(command, scratch) for command in _commands(README)}


def test_there_is_something_to_run() -> None:
    assert "make quickstart" in _commands(README)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_every_command_of_the_readme_runs(outputs: tuple[Path, dict[str, str]]) -> None:
    scratch, printed = outputs
    assert set(printed) == set(_commands(README))
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_walk_from_trajectories_to_a_checkpoint_runs_and_improves(outputs: tuple[Path, dict[str, str]]) -> None:
    """On the quickstart's trajectories and checkpoint, as the page says."""
    scratch, _ = outputs
    (recipe,) = re.findall(r"```yaml\n(.*?)```", WALK, flags=re.DOTALL)
    (named,) = re.findall(r"Save this as `(.*?)`", WALK)
    file = Path(_moved(named, scratch))
    file.parent.mkdir()
    file.write_text(_moved(recipe, scratch))
    for command in _commands(WALK):
        _run(command, scratch)
    (change,) = json.loads((scratch / "my_run" / "eval" / "scores.json").read_text())["differences"]
    assert change["low"] > 0
    assert all(Path(_moved(path, scratch)).exists() for path in re.findall(r"`(runs/\S+)`", WALK))


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for folder in ("docs", "recipes") for path in sorted((ROOT / folder).rglob("*.md"))),
)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_a_page_links_to_exists(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)[^):]*\)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_index_of_the_documentation_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []
