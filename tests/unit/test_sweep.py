"""What a specification stands for, and that every run is tried in order, repeated once where it fails, and never twice where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fakes.sweep_work import noted

from pivotrl.config.load import load_section
from pivotrl.config.sweep import SweepConfig
from pivotrl.errors import UserError
from pivotrl.progress import progress_bar
from pivotrl.rundir import read_json
from pivotrl.sweeping.runs import SweepRun, only, runs_of
from pivotrl.sweeping.schedule import RECORD, Sweep, read_records

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "name": "demo",
    "base": {"recipe": "base"},
    "domains": [{"name": "search", "files": ["search.yaml"]}, {"name": "swe"}],
    "arms": [
        {"name": "short", "recipe": "short", "domains": ["search", "swe"], "seeds": [1, 2]},
        {"name": "long", "recipe": "long", "domains": ["search"], "seeds": [1], "cost": 2, "set": {"train": {"num_steps": 7}}},
        {"name": "reader", "recipe": "reader", "domains": ["search"], "seeds": [2], "after": ["short"], "cost": 3},
    ],
    "set": {"num_threads": 1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "search.yaml").write_text("world: {type: search}\nrender: {max_prompt_tokens: 9}\n")
    return tmp_path


def spec(folder: Path, **changes: object) -> SweepConfig:
    (folder / "spec.yaml").write_text(yaml.safe_dump({**SPEC, **changes}))
    return load_section(SweepConfig, file=folder / "spec.yaml")


def test_longer_runs_come_first_and_every_override_is_a_word(folder: Path) -> None:
    runs = {run.name: run for run in runs_of(spec(folder), folder)}
    assert list(runs) == ["base", "search/reader-2", "search/long-1", "search/short-1", "swe/short-1", "search/short-2", "swe/short-2"]
    domain = ('world={"type":"search"}', "render.max_prompt_tokens=9")
    assert runs["search/long-1"].overrides == (*domain, "train.num_steps=7", "num_threads=1", "seed=1")
    assert runs["search/reader-2"].after == ("base", "search/short-2")
    assert runs["swe/short-2"].overrides == ("num_threads=1", "seed=2")
    assert runs["base"].overrides == ()
    assert runs["base"].recipe == folder / "base"


def test_filters_keep_the_base(folder: Path) -> None:
    runs = runs_of(spec(folder), folder)
    assert [run.name for run in only(runs, ["arm=short,long", "seed=1"])] == ["base", "search/long-1", "search/short-1", "swe/short-1"]
    with pytest.raises(UserError, match=r"names the seed '9'"):
        only(runs, ["seed=1,9"])
    with pytest.raises(UserError, match="form KEY=NAME"):
        only(runs, ["short"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "{arm}-{seed}"}, "without {domain}"),
        ({"arms": [*SPEC["arms"], SPEC["arms"][0]]}, "names short twice"),
        ({"arms": [{**SPEC["arms"][0], "domains": ["tau2"]}]}, "'tau2', which `domains` does not list"),
        ({"arms": [{**SPEC["arms"][0], "after": ["other"]}]}, "comes after 'other'"),
        ({"arms": [SPEC["arms"][0], {**SPEC["arms"][2], "seeds": [3]}]}, "lacks some of its domains or seeds"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(folder, **changes)


def sweep(root: Path, arms: str, *, num_workers: int = 1, after: dict[str, tuple[str, ...]] | None = None) -> tuple[Sweep, list[str]]:
    """A sweep of fake runs, one per word, and the names in the order they were tried (with one worker)."""
    runs = [SweepRun(arm, Path(), (), arm=arm.split("-", maxsplit=1)[0], after=(after or {}).get(arm, ())) for arm in arms.split()]
    found = Sweep("demo", root, runs, read_records(root))
    with progress_bar("sweep", len(runs), "runs") as bar:
        found.execute(noted, num_workers=num_workers, bar=bar)
    log = root / "work.log"
    return found, [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_failed_run_is_repeated_once_and_the_others_go_on(tmp_path: Path) -> None:
    found, tried = sweep(tmp_path, "shaky bad good")
    assert tried == ["shaky", "shaky", "bad", "bad", "good"]
    assert [run.name for run in found.failed] == ["bad"]
    recorded = read_json(tmp_path / RECORD)["runs"]
    assert {name: (one["status"], one["errors"]) for name, one in recorded.items()} == {
        "shaky": ("done", ["no luck"]),
        "bad": ("failed", ["no luck", "no luck"]),
        "good": ("done", []),
    }
    _, tried = sweep(tmp_path, "shaky bad good")
    assert Counter(tried)["bad"] == 2, "a later call tries nothing again that failed for good"


def test_a_worker_serves_many_runs_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    found, tried = sweep(tmp_path, "good-1 deadly good-2 good-3")
    processes = {
        name: [int(line.split()[1]) for line in (tmp_path / "work.log").read_text().splitlines() if line.split()[0] == name] for name in tried
    }
    assert len(processes["deadly"]) == 2
    assert processes["good-1"][0] == processes["deadly"][0] != processes["deadly"][1]
    assert processes["good-2"] == processes["good-3"]
    assert [run.name for run in found.failed] == ["deadly"]
    assert "process died" in found.records["deadly"].errors[0]


def test_runs_wait_for_what_they_read_and_fail_with_it(tmp_path: Path) -> None:
    after = {"good-reader": ("good-written",), "good-lost": ("bad",)}
    found, tried = sweep(tmp_path, "good-reader good-lost bad good-written", num_workers=2, after=after)
    assert tried.index("good-written") < tried.index("good-reader")
    assert "good-lost" not in tried
    assert found.records["good-lost"].errors == ["not run: bad failed, which it reads"]


def test_a_run_that_was_underway_waits_again(tmp_path: Path) -> None:
    sweep(tmp_path, "good")
    record = (tmp_path / RECORD).read_text()
    (tmp_path / RECORD).write_text(record.replace('"done"', '"running"'))
    assert {name: one.status for name, one in read_records(tmp_path).items()} == {"good": "waiting"}


def test_a_misspelt_key_shows_before_the_first_run(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, error = cli(
        "sweep", ROOT / "recipes" / "evidence" / "sweep.yaml", "--root", tmp_path / "runs", "--only", "arm=k4", "base=null", "set.train.num_stepz=3"
    )
    assert code == 2
    assert "conversational/k4-1" in error
    assert "did you mean 'num_steps'?" in error
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_every_override_and_writes_nothing(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    spec_file = ROOT / "recipes" / "evidence" / "sweep.yaml"
    code, out, _ = cli(
        "sweep", spec_file, "--root", tmp_path / "runs", "--only", "arm=k4", "--only", "seed=3", "--dry-run", "base=null", "set.seed=3"
    )
    assert code == 0
    (line,) = [line for line in out.splitlines() if "conversational/k4-3" in line]
    assert "render.action_format=" in line
    assert line.split()[-1] == "missing"
    assert not (tmp_path / "runs").exists()
