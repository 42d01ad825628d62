"""The report's part about the parity gate: figures over the checks, the limit where it helps, findings as text; nothing where there was no gate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.runs import write_whole_run

from pivotrl.errors import UserError
from pivotrl.observability.parity_table import ParityFinding, parity_table
from pivotrl.observability.readings import read_run
from pivotrl.observability.report import write_report
from pivotrl.observability.sinks import METRICS, PARITY_FINDINGS
from pivotrl.rundir import read_jsonl, write_jsonl

# Step, then mean, 99th percentile and largest of the difference, then of the ratio.
CHECKS = ((0, (1e-5, 3e-5, 4e-5), (1.0, 1.25, 1.5)), (2, (3e-5, 2e-5, 6e-4), (0.5, 1.0, 1.0)))
FINDING = {"step": 4, "place": "layer 1", "what": "tensor <b>parallel</b> 2 alone differs", "fix": "train without", "largest": 0.25, "limit": 1e-3}


def _gated_run(run: Path, *, with_finding: bool) -> Path:
    write_whole_run(run)
    measured = {
        step: {
            f"sync/parity_{noun}/{name}": value
            for noun, values in (("difference", difference), ("ratio", ratio))
            for name, value in zip(("mean", "p99/max", "max"), values, strict=True)
        }
        for step, difference, ratio in CHECKS
    }
    rows = [{**row, **measured.get(row["step"], {})} for row in read_jsonl(run / "train" / METRICS)]
    write_jsonl(run / "train" / METRICS, rows)
    if with_finding:
        write_jsonl(run / "train" / PARITY_FINDINGS, [FINDING])
    return run


def test_figures_are_over_all_checks(tmp_path: Path) -> None:
    table = parity_table(read_run(_gated_run(tmp_path, with_finding=True)))
    assert table is not None
    assert (table.num_checks, table.limit) == (2, 1e-3)
    difference, ratio = table.rows
    assert (difference.mean, difference.p99, difference.largest) == (pytest.approx(2e-5), 3e-5, 6e-4)
    assert (ratio.mean, ratio.p99, ratio.largest) == (0.75, 1.25, 1.5)
    assert table.findings == (ParityFinding(4, "layer 1", "tensor <b>parallel</b> 2 alone differs", "train without", 0.25),)
    assert table.panels[0].caption.endswith("n = 2 checks; limit 0.001, the largest difference is 60 % of it")


def test_the_page_shows_them_and_a_finding_is_text(tmp_path: Path) -> None:
    html = write_report(_gated_run(tmp_path, with_finding=True), tmp_path / "report").read_text()
    training = html[html.index('<section id="training">') : html.index('<section id="cost">')]
    for words in ("2 checks passed; the limit of the largest difference is 0.001; 1 failed and stopped the run", "2e-05", "0.0006", ">limit<"):
        assert words in training
    assert "tensor &lt;b&gt;parallel&lt;/b&gt; 2 alone differs" in training
    assert training.count("<svg") == html.count("<svg") - html.count("<svg", 0, html.index('<section id="training">'))


def test_a_limit_far_above_everything_is_said_and_not_drawn(tmp_path: Path) -> None:
    run = _gated_run(tmp_path, with_finding=False)
    write_jsonl(run / "train" / PARITY_FINDINGS, [{**FINDING, "limit": 10.0}])
    table = parity_table(read_run(run))
    assert table is not None
    assert "limit 10, the largest difference is 0.006 % of it" in table.panels[0].caption
    assert ">limit<" not in table.panels[0].svg


def test_a_run_without_a_gate_has_no_such_part(tmp_path: Path) -> None:
    write_whole_run(tmp_path)
    assert parity_table(read_run(tmp_path)) is None
    assert "Parity" not in write_report(tmp_path, tmp_path / "report").read_text()


def test_a_run_that_failed_its_first_check_has_its_finding_alone(tmp_path: Path) -> None:
    write_whole_run(tmp_path)
    write_jsonl(tmp_path / "train" / PARITY_FINDINGS, [FINDING])
    html = write_report(tmp_path, tmp_path / "report").read_text()
    assert "0 checks passed" in html
    assert "layer 1" in html


def test_a_finding_of_the_wrong_type_is_an_error_that_names_file_and_key(tmp_path: Path) -> None:
    write_whole_run(tmp_path)
    write_jsonl(tmp_path / "train" / PARITY_FINDINGS, [{**FINDING, "place": 7}])
    with pytest.raises(UserError, match=re.escape(f"train/{PARITY_FINDINGS}:1: place is '7'")):
        write_report(tmp_path, tmp_path / "report")
