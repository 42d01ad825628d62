"""The page of evidence: the committed one is what its committed record gives, and invented runs show that it comes out of the runs' files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.table_runs import write_page_runs

from pivotrl.config.load import load_section
from pivotrl.config.sweep import SweepConfig
from pivotrl.config.tables import RunSource, TablesConfig
from pivotrl.errors import UserError
from pivotrl.evaluation.evidence.__main__ import write_evidence
from pivotrl.evaluation.evidence.make import NUMBERS, PAGE, RECORD, page_files
from pivotrl.evaluation.evidence.record import from_bytes, to_bytes, unpack
from pivotrl.identity import file_id
from pivotrl.sweeping.runs import runs_of
from pivotrl.worlds.skills import SUITES

ROOT = Path(__file__).resolve().parents[2]
DOCS, RECIPES = ROOT / "docs", ROOT / "recipes" / "evidence"
_MAX_RECORD_BYTES = 1_500_000


def test_the_committed_page_is_what_its_record_gives() -> None:
    """Page and record are committed together; where there is neither, the evidence was not run."""
    assert (DOCS / PAGE).exists() == (DOCS / RECORD).exists() == (DOCS / NUMBERS).exists()
    if not (DOCS / PAGE).exists():
        assert not (DOCS / "evidence").exists(), "parts of a page without its record"
        return
    data = (DOCS / RECORD).read_bytes()
    assert len(data) < _MAX_RECORD_BYTES
    files = page_files(from_bytes(data))
    committed = {str(path.relative_to(DOCS)) for path in (DOCS / "evidence").rglob("*") if path.is_file()} - {RECORD}
    assert committed | {PAGE} == set(files)
    for name, content in files.items():
        assert (DOCS / name).read_bytes() == content, f"docs/{name} is not what docs/{RECORD} gives: write the page again and commit both"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented runs with their page in docs/."""
    root = tmp_path_factory.mktemp("page")
    write_evidence(write_page_runs(root), None, root / "docs")
    return root


@pytest.fixture(scope="module")
def numbers(made: Path) -> dict[str, Any]:
    return json.loads((made / "docs" / NUMBERS).read_text())


def test_the_record_alone_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pivotrl.evaluation.evidence", "--record", str(made / "docs" / RECORD), "--out", str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert written == sorted(
        path.relative_to(made / "docs") for path in (made / "docs").rglob("*") if path.is_file() and path.name != Path(RECORD).name
    )
    for name in written:
        assert (tmp_path / name).read_bytes() == (made / "docs" / name).read_bytes(), name


def test_the_record_holds_the_runs_own_scores(made: Path, tmp_path: Path) -> None:
    hashes = unpack(from_bytes((made / "docs" / RECORD).read_bytes()), tmp_path)
    assert len(hashes) > 100
    for name, digest in hashes.items():
        assert file_id(made / name) == digest, name
        if "/units/" in name:
            kept = [{key: item[key] for key in ("item", "cluster", "facet", "score")} for item in json.loads((made / name).read_text())["items"]]
            assert json.loads((tmp_path / name).read_text())["items"] == kept, name
        if name.endswith("curve.jsonl"):
            pair = [[json.loads(line) for line in (root / name).read_text().splitlines()] for root in (made, tmp_path)]
            for ours, theirs in zip(*pair, strict=True):
                assert (ours["step"], ours["value"]) == (theirs["step"], theirs["value"])
                assert [item["score"] for item in ours["items"]] == [item["score"] for item in theirs["items"]]


def test_one_changed_score_changes_the_page(made: Path, tmp_path: Path) -> None:
    """Task by task the same runs, but one attempt of one arm: the arm's cell moves by one attempt, and the file has another hash."""
    shutil.copytree(made, tmp_path / "runs")
    unit = tmp_path / "runs" / "desk" / "sft-1" / "eval" / "units" / "world-trained.json"
    scores = json.loads(unit.read_text())
    scores["items"][3]["score"] = 1.0 - scores["items"][3]["score"]
    unit.write_text(json.dumps(scores))
    write_evidence(tmp_path / "runs" / "page.yaml", None, tmp_path / "docs")
    assert (tmp_path / "docs" / PAGE).read_text() != (made / "docs" / PAGE).read_text()
    before, after = (json.loads((root / "docs" / NUMBERS).read_text()) for root in (made, tmp_path))
    cells = [record["cells"]["table1/desk/sft"] for record in (before, after)]
    assert abs(cells[0]["value"] - cells[1]["value"]) == pytest.approx(100 / 48, abs=1e-6)
    changed = {file for file, digest in before["files"].items() if after["files"][file] != digest}
    assert changed == {"desk/sft-1/eval/units/world-trained.json"}


def test_every_number_of_a_table_is_in_the_record(made: Path, numbers: dict[str, Any]) -> None:
    known = {_plain(cell["text"]) for cell in numbers["cells"].values()}
    shown = []
    for line in (made / "docs" / PAGE).read_text().splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            shown += [_plain(cell.strip().strip("*")) for cell in re.split(r"(?<!\\)\|", line)[2:-1]]
    values = [cell for cell in shown if re.search(r"\d", cell) and cell not in ("", "-")]
    headings = {"p after Holm"}
    assert len(values) > 150
    assert {value for value in values if value not in known and value not in headings} == set()


def _plain(text: str) -> str:
    return text.replace("\\", "")


def test_every_number_names_its_files(made: Path, numbers: dict[str, Any]) -> None:
    for key, cell in numbers["cells"].items():
        files = numbers["file_sets"][cell["files"]]
        assert cell["formula"], key
        if cell["value"] is not None and cell["kind"] != "paper":
            assert files, key
            assert cell["n"] > 0, key
        assert set(files) <= numbers["files"].keys(), key
    for file, digest in numbers["files"].items():
        assert file_id(made / file) == digest, file


def test_the_verdicts_follow_from_the_cells(made: Path, numbers: dict[str, Any]) -> None:
    """The invented PivotRL beats the base, forgets too much to tell, has the larger spread in every quarter."""
    cells = numbers["cells"]
    verdicts = {key: cells[f"verdicts/{key}/verdict"]["text"] for key in ("H1", "H2", "H3", "H4", "H5")}
    assert verdicts["H1"] == ("shown" if cells["detail/H1/pivotrl/value"]["low"] > 0 else "not decided") == "shown"
    assert cells["detail/H1/pivotrl/value"]["value"] == pytest.approx(cells["table1/gain/pivotrl"]["value"])
    assert cells["detail/H2/sft/value"]["value"] == pytest.approx(cells["table2/average/sft"]["value"])
    assert cells["detail/H3/turns/value"]["value"] == pytest.approx(cells["figure1/mean.turns/ratio"]["value"])
    assert [cells[f"detail/H5/quarter{i}/value"]["value"] for i in range(1, 5)] == pytest.approx([0.2] * 4)
    assert verdicts["H5"] == "shown"
    ps = {key: cells[f"detail/{key}/p_tasks"]["value"] for key in ("H1/pivotrl", "H2/sft", "H4/pivots", "H4/reward")}
    smallest = min(ps, key=ps.__getitem__)
    assert cells[f"detail/{smallest}/p_holm"]["value"] == pytest.approx(min(1.0, 4 * ps[smallest]))
    page = (made / "docs" / PAGE).read_text()
    assert page.index("## Verdicts") < page.index("## In short") < page.index("### Table 1")


def test_missing_arms_are_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "shell" / "episodes-0")
    for seed in (0, 1):
        shutil.rmtree(tmp_path / "runs" / "desk" / f"random-{seed}")
        shutil.rmtree(tmp_path / "runs" / "shell" / f"episodes-{seed}", ignore_errors=True)
        shutil.rmtree(tmp_path / "runs" / "shell" / f"sft-{seed}")
    write_evidence(tmp_path / "runs" / "page.yaml", None, tmp_path / "docs")
    page = (tmp_path / "docs" / PAGE).read_text()
    for line in ("- random on desk: seeds 0, 1", "- sft on shell: seeds 0, 1", "- episodes on shell: seeds 0, 1"):
        assert line in page.splitlines()
    assert "its verdicts are preliminary" in page
    cells = json.loads((tmp_path / "docs" / NUMBERS).read_text())["cells"]
    assert {key: cells[f"verdicts/{key}/verdict"]["text"] for key in ("H1", "H2", "H3", "H4", "H5")} == {
        "H1": "shown",
        "H2": "not decided",
        "H3": "not decided",
        "H4": "not decided",
        "H5": "not decided",
    }
    assert cells["detail/H3/turns/value"]["text"] == "not run on shell"


def test_a_run_that_failed_twice_counts_as_the_base(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "desk" / "sft-1")
    failed = {"status": "failed", "errors": ["first", "non-finite loss in /tmp/somewhere/train/metrics.jsonl"], "wall_s": 1.0}
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps({"name": "x", "runs": {"desk/sft-1": failed}}))
    write_evidence(tmp_path / "runs" / "page.yaml", None, tmp_path / "docs")
    page = (tmp_path / "docs" / PAGE).read_text()
    assert "- desk/sft-1: non-finite loss in metrics.jsonl" in page.splitlines()
    assert "## What is missing" not in page
    own, base = (json.loads((made / "desk" / run).read_text())["items"] for run in ("sft-0/eval/units/world-trained.json", _BASE))
    cell = json.loads((tmp_path / "docs" / NUMBERS).read_text())["cells"]["table1/desk/sft"]
    assert cell["value"] == pytest.approx(100 * sum(item["score"] for item in own + base) / len(own + base), abs=1e-6)


_BASE = "pivotrl-1/eval/units/world-reference.json"


def test_nothing_run_is_a_page_too(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "page.yaml", tmp_path / "page.yaml")
    write_evidence(tmp_path / "page.yaml", None, tmp_path / "docs")
    page = (tmp_path / "docs" / PAGE).read_text()
    assert page.count("not decided") >= 10
    assert "- pivotrl on desk: seeds 0, 1" in page


def test_an_arm_that_starts_at_the_matched_accuracy_leaves_no_ratio(made: Path, tmp_path: Path) -> None:
    """End-to-end RL ends below its start on one domain: no ratio there, none for the mean, and the domain is named."""
    shutil.copytree(made, tmp_path / "runs")
    for seed in (0, 1):
        curve = tmp_path / "runs" / "shell" / f"episodes-{seed}" / "train" / "curve.jsonl"
        rows = [json.loads(line) for line in curve.read_text().splitlines()]
        rows[0]["value"], rows[-1]["value"] = 0.5, 0.4
        curve.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_evidence(tmp_path / "runs" / "page.yaml", None, tmp_path / "docs")
    cells = json.loads((tmp_path / "docs" / NUMBERS).read_text())["cells"]
    assert cells["figure1/shell.turns/ratio"]["value"] is None
    assert cells["figure1/mean.turns/ratio"]["text"] == "not defined: an arm starts there on shell"
    assert cells["verdicts/H3/verdict"]["text"] == "not decided"
    assert cells["figure1/desk.turns/ratio"]["value"] is not None


def test_settings_and_exploratory_runs_are_shown_where_given(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "runs")
    grid = [{"value": 1e-4, "success": 0.41, "n": 192}, {"value": 2e-4, "success": 0.52, "n": 192}]
    (tmp_path / "runs" / "chosen.json").write_text(json.dumps({"pivotrl": {"lr": 2e-4, "grid": grid}}))
    (tmp_path / "runs" / "exploratory.md").write_text("Three variants were tried.\n")
    write_evidence(tmp_path / "runs" / "page.yaml", None, tmp_path / "docs")
    page = (tmp_path / "docs" / PAGE).read_text()
    assert "| pivotrl | 0.0002 | 52.0 | 192 |" in page
    assert "| **pivotrl** | **lr = 0.0002** |" in page
    assert "Three variants were tried." in page
    assert "chosen.json" in json.loads((tmp_path / "docs" / NUMBERS).read_text())["files"]


def test_arms_side_by_side_repeat_what_the_hypotheses_measure(numbers: dict[str, Any]) -> None:
    cells = numbers["cells"]
    shown = {key.removeprefix("exploratory_sides/"): cell for key, cell in cells.items() if key.startswith("exploratory_sides/")}
    for ours, other in (("pivotrl/own.base", "H1/pivotrl"), ("pivotrl/apart.base", "H2/pivotrl"), ("sft/apart.base", "H2/sft")):
        assert [shown[ours][key] for key in ("value", "low", "high", "n")] == [
            cells[f"detail/{other}/value"][key] for key in ("value", "low", "high", "n")
        ]
    assert (shown["pivotrl/own.pivotrl"]["text"], shown["pivotrl/apart.pivotrl"]["text"]) == ("-", "-")
    assert shown["sft/own.pivotrl"]["value"] == pytest.approx(-cells["comparisons/sft.mean/change"]["value"])


def test_a_damaged_record_is_refused(made: Path) -> None:
    with pytest.raises(UserError, match="the record is damaged"):
        from_bytes(b"no gzip")
    record = from_bytes((made / "docs" / RECORD).read_bytes())
    with pytest.raises(UserError, match="schema_version 0"):
        from_bytes(to_bytes({**record, "schema_version": 0}))


@pytest.mark.parametrize("name", ["tables.yaml", "tables_small.yaml"])
def test_the_specifications_are_valid(name: str) -> None:
    config = load_section(TablesConfig, file=RECIPES / name)
    assert config.num_resamples == 10_000
    assert config.out_of_domain is not None
    assert [one.name for one in config.out_of_domain.benchmarks] == list(SUITES["broad"])
    paths = {
        source.path.replace("{domain}", domain).replace("{arm}", source.arm).replace("{seed}", str(seed))
        for source in config.results
        if isinstance(source, RunSource)
        for domain in source.domains
        for seed in source.seeds
    }
    # What the sweeps run, and nothing else: three main arms on four domains with five seeds, twelve arms of the ablation with three, and the two
    # that were added afterwards on four domains with three.
    sweeps = ["sweep.yaml", "sweep_exploratory.yaml"] if name == "tables.yaml" else ["sweep_small.yaml"]
    runs = [run for sweep in sweeps for run in runs_of(load_section(SweepConfig, file=RECIPES / sweep), RECIPES) if run.arm]
    assert paths == {run.name for run in runs}
    assert len(paths) == (3 * 4 * 5 + 12 * 3 + 2 * 4 * 3 if name == "tables.yaml" else 3 * 2)
