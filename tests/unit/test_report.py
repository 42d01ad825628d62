"""The report shows the run's numbers, says plainly what was not run, escapes what models wrote, and needs nothing but itself."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.runs import HOSTILE_TEXT, profiled, trajectory, write_ingest, write_profile, write_whole_run

from pivotrl.errors import UserError
from pivotrl.observability import charts, conversation, fields, sections
from pivotrl.observability.charts import Bar, Series, histogram, line_chart, nice_ticks
from pivotrl.observability.conversation import step_examples, visible
from pivotrl.observability.readings import Judging, read_run
from pivotrl.observability.report import write_report
from pivotrl.rundir import Stage, read_json, write_json, write_jsonl

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements with attributes, visible text by section, and a check that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self._section = "head"
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self._section] = self.text.get(self._section, "") + " " + " ".join(data.split())


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "repair_desk"
    run.mkdir()
    write_whole_run(run)
    return run


@pytest.fixture(scope="module")
def html(whole_run: Path) -> str:
    return write_report(whole_run, whole_run / "report").read_text()


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def svgs(text: str) -> Iterator[ElementTree.Element]:
    for source in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        yield ElementTree.fromstring(source)


def test_result_shows_both_checkpoints_with_n_interval_and_change(page: Page) -> None:
    for figure in ("held_out", "120", "0.550", "[0.470, 0.630]", "0.930", "+0.380", "[+0.290, +0.460]", "50 / 4", "1e-09"):
        assert figure in page.text["result"]


def test_the_change_on_single_turns_is_split_into_format_and_decision(page: Page) -> None:
    text = page.text["result"]
    for figure in ("format gain +0.080", "[+0.030, +0.120]", "decision gain +0.300", "[+0.220, +0.390]", "87.5 %", "99.0 %", "At 2 candidates"):
        assert figure in text


def test_the_theorys_numbers_are_shown_where_they_were_measured(page: Page, tmp_path: Path) -> None:
    assert "What the theory says" not in page.text["result"]
    write_whole_run(tmp_path)
    file = tmp_path / "eval" / "scores.json"
    signal, outside = {"value": 0.375, "low": 0.25, "high": 0.5, "n": 7}, {"value": 0.93, "low": 0.8, "high": 1.0, "n": 4}
    absent = {"value": None, "low": None, "high": None, "n": 0}
    measured = {"signal_pivots": signal, "order": {"outside": outside, "inside": absent, "num_actions": 19}}
    write_json(file, {**read_json(file), "diagnostics": measured})
    text = Page(write_report(tmp_path, tmp_path / "report").read_text()).text["result"]
    assert re.search(r"signal sqrt\(mu \(1 - mu\)\), pivots\s*0\.375\s*\[0\.250, 0\.500\]\s*7", text)
    assert re.search(r"outside M\s*0\.930\s*\[0\.800, 1\.000\]\s*4", text)
    assert "actions in M" not in text


def test_funnel_narrows_as_the_run_did(page: Page, whole_run: Path) -> None:
    steps = {step.label: step.count for step in sections.funnel(read_run(whole_run))}
    assert steps == {"Trajectories": 4, "Candidates": 12, "Profiled": 12, "With a usable profile": 11, "Informative": 4, "Pivots": 3}
    assert "rule eq5, lambda_diff 0.6" in page.text["funnel"]
    assert "1 quarantined: prompt too long" in page.text["funnel"]


def test_pass_rates_count_every_usable_profile_and_mark_the_pivots(whole_run: Path) -> None:
    levels = read_run(whole_run).levels
    assert [level.label for level in levels] == [f"{k}/8" for k in range(9)]
    assert [level.count for level in levels] == [5, 1, 2, 0, 0, 0, 0, 1, 2]
    assert [level.num_pivots for level in levels] == [0, 1, 2, 0, 0, 0, 0, 0, 0]


def test_pass_rates_of_several_k_are_binned_with_the_ends_apart(tmp_path: Path) -> None:
    candidates = write_ingest(tmp_path / "ingest", [trajectory(0)])
    write_profile(tmp_path, [profiled(candidates[0], 0, 7), profiled(candidates[1], 3, 11), profiled(candidates[2], 5, 5)])
    levels = {level.label: level.count for level in read_run(tmp_path).levels}
    assert {label: count for label, count in levels.items() if count} == {"0": 1, "0.2-": 1, "1": 1}


def test_selection_counts_by_reason_domain_and_depth(page: Page, whole_run: Path) -> None:
    by_domain, by_depth = sections.selection_tables(read_run(whole_run).selection)
    assert by_domain.groups == ("all", "conversational")
    assert by_domain.rows[0] == ("kept", (3, 3))
    assert dict(by_domain.rows)["always fails"] == (5, 5)
    assert by_depth.groups == ("0", "1", "2-3")
    assert by_depth.totals == (4, 4, 4)
    assert "63.6 %" in page.text["selection"]
    assert "of 11 usable training turns" in page.text["selection"]


def test_a_judges_cost_is_shown_by_stage(tmp_path: Path) -> None:
    """From the profile's timing.json and the sum of the training steps' lines; a stage that asked no judge has no row."""
    write_whole_run(tmp_path)
    assert "What the judge cost" not in write_report(tmp_path, tmp_path / "report").read_text()
    names = ("requests", "failures", "cache_hits", "prompt_tokens", "completion_tokens")
    profile = {f"rollout/judge_{name}/sum": number for name, number in zip(names, (1_234, 5, 6, 98_765, 432), strict=True)}
    write_json(tmp_path / "profile" / "timing.json", {**profile, "time/judge_s/sum": 61.5, "wall_s": 9.0})
    steps = [{"step": 0, "rollout/judge_requests/sum": 20, "time/judge_s/sum": 1.0}, {"step": 1, "rollout/judge_cache_hits/sum": 3}]
    write_jsonl(tmp_path / "train" / "timing.jsonl", steps)
    found = {row.stage: row for row in read_run(tmp_path).judging}
    assert found == {"profile": Judging("profile", 1_234, 5, 6, 98_765, 432, 61.5), "train": Judging("train", 20, 0, 3, 0, 0, 1.0)}
    text = Page(write_report(tmp_path, tmp_path / "report").read_text()).text["cost"]
    for figure in ("What the judge cost", "1,234", "98,765", "61.5 s"):
        assert figure in text


def test_cost_counts_profiling(page: Page, whole_run: Path) -> None:
    rows = {row.stage: row for row in sections.cost(read_run(whole_run))}
    assert (rows["Profile"].turns, rows["Train"].turns, rows["Validation"].turns, rows["Evaluation"].turns) == (96, 20, 80, 240)
    total = rows["Total of what is known"]
    assert (total.turns, total.prompt_tokens, total.completion_tokens, total.wasted_tokens) == (436, 1_350, 4_821, 100)
    assert "116" in page.text["head"], "the tile adds profiling and training"


def test_every_chart_names_axes_and_n(html: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", html, flags=re.DOTALL)
    titles = [re.search(r"<h3>(.*?)</h3>", figure).group(1) for figure in figures]  # pyright: ignore[reportOptionalMemberAccess]
    assert titles[:4] == ["Pass rates under the reference policy", "Reward", "Held-out reward", "Reward spread"]
    assert {"Zero-variance groups", "KL to the reference", "Tokens wasted", "Format"} <= set(titles)
    for figure in figures:
        assert figure.count('class="axis-label"') == 2
        assert "n = " in figure
    charts_found = list(svgs(html))
    assert len(charts_found) == len(figures)
    assert all(chart.get("aria-label") for chart in charts_found)


def test_a_non_finite_value_is_a_gap_and_is_said(html: str, page: Page) -> None:
    kl = next(svg for svg in svgs(html) if svg.get("aria-label") == "KL to the reference")
    assert len(kl.findall("circle")) == 4
    assert "1 metric values were NaN or infinite" in page.text["training"]


def test_rollouts_of_first_middle_and_last_step_with_reasons(page: Page, whole_run: Path) -> None:
    examples = step_examples(whole_run)
    assert [example.step for example in examples] == [0, 2, 4]
    assert (examples[1].best.text, examples[1].best.reward, examples[1].worst.reward) == ("answer 1 of step 2", 1.0, 0.0)
    assert examples[0].rewards == "2 of 4 passed"
    assert [turn.speaker for turn in examples[0].context] == ["system", "user"]
    for text in ("Device 2 hums.", "same call", "wrong tool", 'open_ticket({"device": "2-0"})'):
        assert text in page.text["rollouts"]


def test_model_output_is_text_and_never_markup(html: str, page: Page) -> None:
    assert HOSTILE_TEXT in page.text["rollouts"]
    assert "<script" not in html.lower()
    assert not [tag for tag, _ in page.elements if tag in ("script", "img", "iframe", "object", "link", "form")]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_page_needs_nothing_but_itself(html: str, page: Page) -> None:
    for _, attributes in page.elements:
        for name in ("href", "src", "action", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"@import|url\(|https?://", html)
    policy = next(attributes["content"] for tag, attributes in page.elements if tag == "meta" and "http-equiv" in attributes)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements


def test_provenance_names_stages_seeds_and_the_pivot_set(page: Page) -> None:
    for text in ("p0licyhash", "sampling.temperature", "finished", "not run", "trajectories.parquet"):
        assert text in page.text["provenance"]


@pytest.mark.parametrize(("is_stable", "words"), [(True, "is prefix-stable"), (False, "each state was rendered whole"), (None, "")])
def test_a_template_that_rewrites_history_is_named(is_stable: bool | None, words: str) -> None:
    provenance = {} if is_stable is None else {"prefix_stable": is_stable}
    note = sections.rendering_note(fields.Fields("selection.json", {"provenance": provenance}))
    assert words in note
    assert bool(note) is bool(words)


def test_the_same_run_gives_the_same_page(whole_run: Path, html: str, tmp_path: Path) -> None:
    assert write_report(whole_run, tmp_path / "again").read_text() == html


def test_missing_stages_are_said_plainly(tmp_path: Path) -> None:
    write_ingest(tmp_path / "ingest", [trajectory(0)])
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metrics.jsonl").write_text("")
    page = Page(write_report(tmp_path, tmp_path / "report").read_text())
    assert "The eval stage is not run." in page.text["result"]
    assert "The profile stage is not run." in page.text["funnel"]
    assert "The select stage is not run." in page.text["selection"]
    assert "The train stage is unfinished." in page.text["training"]
    assert "not run" in page.text["funnel"]


def test_a_run_in_progress_may_end_in_half_a_line(tmp_path: Path) -> None:
    Stage.open(tmp_path, "train", config={}, inputs={}, seed=0)
    (tmp_path / "train" / "metrics.jsonl").write_text('{"step":0,"rollout/reward/mean":0.5}\n{"step":1,"rollout/rew')
    assert len(read_run(tmp_path).steps) == 1


def test_rollouts_without_the_stages_before_are_still_shown(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write_jsonl(tmp_path / "train" / "rollouts.jsonl", [{"step": 3, "pivot_id": "p", "text": "hello", "reward": 0.25}])
    page = Page(write_report(tmp_path, tmp_path / "report").read_text())
    assert "hello" in page.text["rollouts"]
    assert "The trajectory is not in this run directory." in page.text["rollouts"]


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("eval/scores.json", {"suites": [{"name": "world", "checkpoint": "trained", "score": "high"}]}, "eval/scores.json: suites: score is 'high'"),
        ("eval/scores.json", {"suites": {"name": "world"}}, "eval/scores.json: suites is"),
        ("eval/scores.json", {"turns": 1.5}, "eval/scores.json: turns is '1.5'"),
        ("select/selection.json", {"by_reason": {"kept": True}}, "select/selection.json: by_reason: kept is 'True'"),
        ("train/timing.json", ["a", "list"], "train/timing.json holds list"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_file_and_key(file: str, value: object, message: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir()
    write_json(tmp_path / file, value)
    with pytest.raises(UserError, match=re.escape(message)):
        write_report(tmp_path, tmp_path / "report")


def test_a_directory_without_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no stage of a run"):
        write_report(tmp_path, tmp_path / "report")


def test_control_characters_cannot_redraw_the_page() -> None:
    assert visible("a\x00b\u202ec\u2066d\tend\n") == "a\\u0000b\\u202ec\\u2066d\tend\n"
    long = visible("x" * 10_000)
    assert len(long) < 2_500
    assert "[... 7,600 characters left out ...]" in long


def test_a_line_lies_where_its_numbers_say() -> None:
    """The oracle reads the ticks' own places: a point on a tick must be drawn at the tick."""
    points = ((0.0, 0.0), (5.0, 0.5), (10.0, 1.0))
    svg = ElementTree.fromstring(line_chart("t", x_label="step", y_label="share", series=[Series("s", points)], y_floor=0.0, y_ceiling=1.0))
    lines = svg.find("polyline")
    assert lines is not None
    drawn = [tuple(map(float, pair.split(","))) for pair in lines.attrib["points"].split()]
    ticks = {text.text: text for text in svg.findall("text") if text.get("class") == "tick"}
    assert drawn[1][1] == pytest.approx(float(ticks["0.5"].attrib["y"]) - 3.5, abs=0.11)
    assert drawn[1][0] == pytest.approx(float(ticks["5"].attrib["x"]), abs=0.11)
    assert drawn[0][1] - drawn[1][1] == pytest.approx(drawn[1][1] - drawn[2][1], abs=0.11)


def test_values_on_the_floor_are_drawn_at_the_bottom() -> None:
    series = [Series("s", ((0.0, 0.0), (1.0, 0.0)))]
    svg = ElementTree.fromstring(line_chart("t", x_label="step", y_label="share", series=series, y_floor=0.0, y_ceiling=None))
    assert [text.text for text in svg.findall("text") if text.get("text-anchor") == "end"] == ["0", "0.25", "0.5", "0.75", "1"]


def test_bars_are_as_high_as_their_counts() -> None:
    bars = [Bar("0/2", 4, 0), Bar("1/2", 2, 1), Bar("2/2", 0, 0)]
    svg = ElementTree.fromstring(histogram("t", x_label="rate", y_label="n", bars=bars, marker=(2.0, "lambda 1")))
    heights = [float(rectangle.attrib["height"]) for rectangle in svg.iter("rect")]
    assert heights[0] == pytest.approx(2 * heights[2], abs=0.2)
    assert heights[2] == pytest.approx(2 * heights[3], abs=0.2)
    assert heights[4] == heights[5] == 0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (-0.02, 0.31), (1e-7, 3e-6), (0, 123_456), (5, 5), (0, 0), (-3, -1)])
def test_ticks_cover_the_data_in_even_steps(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 7
    steps = {round((late - early) / (ticks[1] - ticks[0]), 6) for early, late in pairwise(ticks)}
    assert steps == {1.0}


def test_empty_charts_are_not_drawn() -> None:
    assert line_chart("t", x_label="x", y_label="y", series=[Series("s", ())], y_floor=None, y_ceiling=None) == ""
    assert histogram("t", x_label="x", y_label="y", bars=[], marker=None) == ""


@pytest.mark.parametrize("module", [charts, conversation, fields, sections])
def test_examples_in_the_docstrings_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # pyright: ignore[reportArgumentType]
