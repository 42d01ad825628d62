"""Progress lines: what an interrupted call did counts as done but not in the rate."""

from __future__ import annotations

import re

import pytest

from pivotrl.progress import progress_bar


def test_skipped_work_is_done_but_not_in_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("train", 100, "steps") as bar:
        bar.skip(90)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train: 90/100 steps, 0.000 steps/s")
    with progress_bar("train", 100, "steps") as bar:
        bar.skip(50)
        bar.advance(10, "reward 0.5")
    shown = re.fullmatch(r"train: 60/100 steps, ([\d.,]+) steps/s, ETA \d+ s", capsys.readouterr().err.splitlines()[-1])
    assert shown is not None


def test_results_stay_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("ingest", None, "MB") as bar:
        bar.advance(3)
    assert capsys.readouterr().out == ""


def test_small_amounts_have_decimals_and_time_left_is_never_negative(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("data", 0.3, "MB") as bar:
        bar.advance(0.1 + 0.2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("data: 0.30/0.30 MB, ")
    assert line.endswith("ETA 0 s")
