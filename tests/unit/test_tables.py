"""`pivotrl tables`: the pages against committed ones, every number against its files, and what a specification may not say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.table_runs import DOMAINS, SEEDS, specification, write_evidence

from pivotrl.config.load import load_section
from pivotrl.config.tables import TablesConfig
from pivotrl.evaluation.tables.cells import Cell, Table, TableRow
from pivotrl.evaluation.tables.paper import paper_value
from pivotrl.evaluation.tables.write import escape_latex, latex, markdown
from pivotrl.identity import file_id

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tables"
type Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The invented runs with their tables in out/."""
    from pivotrl.verbs.tables import run_tables

    root = tmp_path_factory.mktemp("evidence")
    run_tables(write_evidence(root), root / "out", [])
    return root


@pytest.fixture(scope="module")
def record(evidence: Path) -> dict[str, Any]:
    return json.loads((evidence / "out" / "tables.json").read_text())


@pytest.mark.parametrize("name", ["tables.md", "tables.tex"])
def test_pages_are_the_committed_ones(evidence: Path, name: str) -> None:
    """Where a change is meant: copy the new page over the old one and read the difference."""
    assert (evidence / "out" / name).read_text() == (GOLDEN / name).read_text()


def test_the_same_results_give_the_same_bytes(evidence: Path, cli: Cli) -> None:
    code, out, _ = cli("tables", evidence / "spec.yaml", "--out", evidence / "again")
    assert code == 0
    assert "PivotRL - SFT" in out
    files = [path.relative_to(evidence / "out") for path in (evidence / "out").rglob("*") if path.is_file()]
    assert len(files) == 4 + 6
    for file in files:
        assert (evidence / "again" / file).read_bytes() == (evidence / "out" / file).read_bytes(), file


def _items(root: Path, cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for source in cell["sources"] for item in json.loads((root / source).read_text())["items"]]


def test_every_score_can_be_counted_again_from_its_files(evidence: Path, record: dict[str, Any]) -> None:
    counted = 0
    for key, cell in record["cells"].items():
        if cell["kind"] != "score" or "average" in key:
            continue
        items = _items(evidence, cell)
        table, row, column = key.split("/")
        facet = row.rpartition(".")[2] if table in ("table2", "table3") else column if table == "table6" and column != "mean" else None
        scores = [item["score"] for item in items if facet is None or item["facet"] == facet]
        assert cell["value"] == pytest.approx(100 * sum(scores) / len(scores)), key
        assert cell["n"] == len(scores), key
        assert cell["low"] <= cell["value"] <= cell["high"], key
        counted += 1
    assert counted == 3 * len(DOMAINS) + 2 + 4 + 3 + 6 + 2


def test_a_change_is_the_difference_of_its_two_scores(record: dict[str, Any]) -> None:
    cells = record["cells"]
    for domain in DOMAINS:
        sft, pivotrl, difference = (cells[f"table1/{domain}/{name}"] for name in ("sft", "pivotrl", "difference"))
        assert difference["value"] == pytest.approx(pivotrl["value"] - sft["value"])
        assert difference["is_paired"]
        assert [test["name"] for test in difference["tests"]] == ["permutation over tasks", "permutation over seeds"]
        assert set(difference["sources"]) == {*sft["sources"], *pivotrl["sources"]}
    gains = [cells[f"table1/{domain}/pivotrl"]["value"] - cells[f"table1/{domain}/base"]["value"] for domain in DOMAINS]
    assert cells["table1/gain/pivotrl"]["value"] == pytest.approx(sum(gains) / len(gains))


def test_every_number_has_n_sources_and_known_files(evidence: Path, record: dict[str, Any]) -> None:
    for key, cell in record["cells"].items():
        if cell["kind"] == "missing":
            continue
        if cell["kind"] == "paper":
            assert cell["paper"], key
            continue
        assert cell["n"] > 0, key
        assert cell["sources"], key
        assert set(cell["sources"]) <= record["files"].keys(), key
        assert cell["unit"] == "share" or cell["low"] is not None, key
    for file, digest in record["files"].items():
        assert file_id(evidence / file) == digest


def test_every_shown_text_is_in_the_record(evidence: Path, record: dict[str, Any]) -> None:
    shown = set(re.findall(r"-?\+?\d[\d,.]* \[[^\]]*\](?: s)? n=[\d,]+(?: p=\S+)?", (evidence / "out" / "tables.md").read_text()))
    known = {cell["text"].replace("<", "\\<") for cell in record["cells"].values()}
    assert len(shown) > 40
    assert shown <= known


def test_the_cost_of_the_same_accuracy(record: dict[str, Any]) -> None:
    """PivotRL: 0.4, 0.61, 0.8 at 0, 640, 1280 turns reaches 0.7 at 640 + 640 * 9/19; end-to-end at its end, 2560. Profiling adds 500 and 30 s."""
    cells, turns = record["cells"], 640 + 640 * 9 / 19
    for domain in DOMAINS:
        value = lambda kind, column, domain=domain: cells[f"figure1/{domain}.{kind}/{column}"]["value"]  # noqa: E731
        assert value("turns", "pivotrl") == pytest.approx(turns)
        assert value("turns", "end_to_end") == 2560
        assert value("turns", "ratio") == pytest.approx(turns / 2560)
        assert value("turns_profiled", "ratio") == pytest.approx((turns + 500) / 2560)
        assert value("wall", "ratio") == pytest.approx((20 + 20 * 9 / 19) / 80)
        assert value("wall_profiled", "ratio") == pytest.approx((50 + 20 * 9 / 19) / 80)
    assert cells["figure1/mean.turns/ratio"]["value"] == pytest.approx(turns / 2560)
    drawn = record["figures"]["figure1_desk"]["panels"][0]["lines"][0]
    assert drawn["points"] == [[0.0, 0.4], [640.0, pytest.approx(0.61)], [1280.0, pytest.approx(0.8)]]
    assert drawn["band"][1] == [640.0, 0.6, 0.62]


def test_the_spread_of_rewards(record: dict[str, Any]) -> None:
    """Steps 0-3 and 16-19 of 20, std 0.4 - 0.002 step against 0.2 - 0.002 step."""
    cells = record["cells"]
    assert cells["figure3/desk/pivots.early"]["value"] == pytest.approx(0.4 - 0.002 * 1.5)
    assert cells["figure3/desk/random.late"]["value"] == pytest.approx(0.2 - 0.002 * 17.5)
    assert (cells["figure3/desk/above"]["text"], cells["figure3/desk/pivots.early"]["n"]) == ("20 of 20", 4 * len(SEEDS))


def test_families_weigh_the_same_where_asked(tmp_path: Path, cli: Cli) -> None:
    """Two of four airline tasks and the one retail task: 60 % of tasks, (50 % + 100 %) / 2 of families."""
    for domain, rewards in {"airline": (1.0, 1.0, 0.0, 0.0), "retail": (1.0,)}.items():
        simulations = [{"task_id": str(i), "trial": 0, "reward_info": {"reward": reward}} for i, reward in enumerate(rewards)]
        (tmp_path / f"{domain}.json").write_text(json.dumps({"info": {"environment_info": {"domain_name": domain}}, "simulations": simulations}))
    spec = {
        "name": "one arm",
        "root": "{spec}",
        "domains": [{"name": "tau2", "title": "tau2-bench", "average": "families", "paper": "tau2-bench"}],
        "results": [{"type": "file", "arm": "a", "domains": ["tau2"], "format": "tau2", "paths": ["airline.json", "retail.json"]}],
        "families": {"domain": "tau2", "rows": [{"arm": "a", "title": "ours", "paper": "pivots"}]},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert cli("tables", tmp_path / "spec.yaml", "--out", tmp_path / "out")[0] == 0
    cells = json.loads((tmp_path / "out" / "tables.json").read_text())["cells"]
    assert [cells[f"table6/a/{name}"]["value"] for name in ("airline", "retail", "mean")] == [50.0, 100.0, 75.0]
    assert cells["table6/a/paper.airline"]["value"] == 58.67
    assert cells["table6/a/mean"]["sources"] == ["airline.json", "retail.json"]


def test_a_checkpoint_for_every_domain_is_counted_once(tmp_path: Path, cli: Cli) -> None:
    """One base file serves two domains; its n is its own, and the changes are of each domain's checkpoint against it."""
    score = {"base": 0.5, "one": 0.7, "two": 0.6}
    for name, value in score.items():
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"results": {"t": {"acc,none": value, "acc_stderr,none": 0.01}}, "n-samples": {"t": {"effective": 80}}})
        )
    common = {"type": "file", "format": "lm_eval", "benchmark": "mmlu"}
    spec = {
        "name": "ood",
        "root": "{spec}",
        "domains": [{"name": "one", "title": "one"}, {"name": "two", "title": "two"}],
        "results": [
            {**common, "arm": "base", "paths": ["base.json"]},
            {**common, "arm": "pivotrl", "domains": ["one", "two"], "paths": ["{domain}.json"]},
        ],
        "main": {"base": "base", "sft": "base", "pivotrl": "pivotrl"},
        "out_of_domain": {"benchmarks": [{"name": "mmlu", "title": "MMLU-Pro", "paper": "MMLU-Pro"}]},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    assert cli("tables", tmp_path / "spec.yaml", "--out", tmp_path / "out")[0] == 0
    cells = json.loads((tmp_path / "out" / "tables.json").read_text())["cells"]
    assert (cells["table2/mmlu/base"]["value"], cells["table2/mmlu/base"]["n"]) == (50.0, 80)
    assert cells["table2/mmlu/pivotrl"]["value"] == pytest.approx(15.0)
    assert not cells["table2/mmlu/pivotrl"]["is_paired"]
    assert cells["table1/one/pivotrl"]["text"] == "not run"


def test_the_papers_own_specification_is_valid() -> None:
    config = load_section(TablesConfig, file=GOLDEN.parents[2] / "configs" / "tables" / "paper.yaml")
    for domain in config.domains:
        assert paper_value("table1", domain.paper, "base") is not None
    assert config.out_of_domain is not None
    assert [paper_value("table2", one.paper, "sft") is not None for one in config.out_of_domain.benchmarks] == [True] * 8
    assert config.ablation is not None
    assert [row.paper for row in config.ablation.rows].count(None) == 1


def _changed(path: list[str | int], value: Any) -> dict[str, Any]:
    spec = specification()
    place: Any = spec
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return spec


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (_changed(["mian"], {}), ["unknown key mian", "did you mean 'main'"]),
        (_changed(["main", "sft"], "stf"), ["main names the arm 'stf'", "of which `results` has nothing"]),
        (_changed(["ablation", "domain"], "search"), ["ablation names the domain 'search'"]),
        (_changed(["results", 1, "path"], "{domain}/absent-{seed}"), ["absent-0/eval has no _SUCCESS"]),
        (_changed(["domains", 0, "suite"], "held_out"), ["no scores of the suite 'held_out'", "skills-trained, world-reference, world-trained"]),
        (_changed(["domains", 0, "paper"], "tau3"), ["paper's row 'tau3'", "Table 1, in domain has the rows tau2-bench"]),
        (_changed(["results"], [*specification()["results"], specification()["results"][1]]), ["sft on desk has two results for seed 0"]),
        (_changed(["efficiency", "curve"], "train/other.jsonl"), ["has no accuracy curve in train/other.jsonl"]),
    ],
)
def test_a_wrong_specification_is_one_line(spec: dict[str, Any], parts: list[str], evidence: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**spec, "root": str(evidence)}))
    code, _, err = cli("tables", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    (line,) = [line for line in err.splitlines() if line.startswith("pivotrl: error: ")]
    assert code == 2
    assert "Traceback" not in err
    for part in parts:
        assert part in line
    assert not (tmp_path / "out").exists()


def test_tables_need_no_torch() -> None:
    code = "import pivotrl.verbs.tables, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_text_cannot_break_out_of_a_format() -> None:
    hostile = 'a & b_c % $x$ #1 {y} ~ ^ \\ | "q" <i>\n\\end{tabular}'
    escaped = escape_latex(hostile)
    assert escaped == (
        r"a \& b\_c \% \$x\$ \#1 \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{} \textbar{} \textquotedbl{}q\textquotedbl{} "
        r"\textless{}i\textgreater{} \textbackslash{}end\{tabular\}"
    )
    table = Table("t", hostile, hostile, hostile, (("x", hostile),), (TableRow("r", "[1]", (Cell("[2, 3]", "count"),)),))
    page = latex("name", "label", [table], [])
    assert page.count(r"\end{tabular}") == 1
    assert r"{[1]} & {[2, 3]} \\" in page
    rows = [line for line in markdown("name", "label", [table], []).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert "\\<i>" in rows[0]
