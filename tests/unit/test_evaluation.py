"""The eval stage on a scripted policy whose right scores are known by construction, and the arithmetic of its rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes.scripted_desk import SAMPLING, ScriptedDesk, sampler_of

from pivotrl.actions.registry import action_format
from pivotrl.config.schema import EvalConfig, HeldOutSuite, RenderConfig, SkillsSuite, SuiteConfig, ToolCallVerifierConfig, WorldConfig, WorldSuite
from pivotrl.config.training import CurveConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.evaluation.runner import REFERENCE, SCORES, TRAINED, UNITS, EvalInputs, run_eval
from pivotrl.evaluation.scores import difference_row, gain_row, interval, suite_row
from pivotrl.evaluation.suites import ItemScore
from pivotrl.evaluation.summary import final_table
from pivotrl.identity import derive_seed
from pivotrl.pivots.statistics import wilson_interval
from pivotrl.rollouts.engine import EngineError
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.render import Renderer
from pivotrl.rundir import SUCCESS, Stage, read_json, read_jsonl, write_json, write_jsonl
from pivotrl.training.curve import SuccessCurve
from pivotrl.types import Action, State, Verdict
from pivotrl.verifiers.tool_call import ToolCallVerifier
from pivotrl.worlds.generate import pretraining_mixture, tokenizer_texts
from pivotrl.worlds.order_desk import OrderDesk
from pivotrl.worlds.protocol import TaskSplit
from pivotrl.worlds.skills import draw_questions
from pivotrl.worlds.tokenizer import save_tokenizer, train_tokenizer

SEED = 17
TEMPLATE = (Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "chat_template.jinja").read_text()
WORLD = WorldConfig(type="order_desk", num_train_tasks=1, num_test_tasks=10, num_pretraining_episodes=36, num_skill_examples=80, noise=0.4)
CONFIG = EvalConfig(
    suites=(
        WorldSuite(type="world", num_samples=2),
        HeldOutSuite(type="held_out", num_candidates=8, num_samples=3),
        SkillsSuite(type="skills", num_examples=16),
    )
)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = tokenizer_texts(pretraining_mixture(WORLD, SEED, action_format("hermes")), action_format("hermes"))
    save_tokenizer(train_tokenizer(texts, vocab_size=400), directory, chat_template=TEMPLATE, max_tokens=256)
    return Renderer.load(directory, RenderConfig(action_format="hermes", history_reasoning="drop", max_prompt_tokens=216), None)


@dataclass
class Bench:
    """A reference that solves 4 of 10 tasks and a trained policy that solves 9; both answer 12 of 16 questions and know one of two held-out tasks."""

    renderer: Renderer
    opened: list[str]

    def inputs(self) -> EvalInputs:
        engine = ScriptedDesk(self.renderer)
        train_task = OrderDesk().tasks(TaskSplit.TRAIN, num_tasks=2, seed=SEED)
        held_out = [turn for task in train_task for turn in engine.knows_task(task)]
        return EvalInputs(
            checkpoints={REFERENCE: Path(REFERENCE), TRAINED: Path(TRAINED)},
            open_sampler=self.open,
            held_out=held_out,
            trajectory_of={turn.candidate_id: turn.candidate_id.rsplit("-", 1)[0] for turn in held_out},
            world=WORLD,
            sampling=SAMPLING,
            max_prompt_tokens=216,
            run_seed=SEED,
        )

    def open(self, checkpoint: Path) -> LocalSampler:
        self.opened.append(checkpoint.name)
        engine = ScriptedDesk(self.renderer)
        num_known = {REFERENCE: 4, TRAINED: 9}[checkpoint.name]
        for task in OrderDesk().tasks(TaskSplit.TEST, num_tasks=10, seed=SEED)[:num_known]:
            engine.knows_task(task)
        engine.knows_task(OrderDesk().tasks(TaskSplit.TRAIN, num_tasks=1, seed=SEED)[0])
        for question in draw_questions(16, random.Random(derive_seed(SEED, "eval", "skills")))[:12]:
            engine.knows_question(question)
        return sampler_of(engine, self.renderer)


@pytest.fixture
def bench(renderer: Renderer) -> Bench:
    return Bench(renderer, [])


def evaluate(bench: Bench, run: Path) -> dict:
    return run_eval(Stage.open(run, "eval", config={}, inputs={}, seed=SEED), CONFIG, bench.inputs())


def test_scores_are_those_of_the_script(bench: Bench, tmp_path: Path) -> None:
    scores = evaluate(bench, tmp_path)
    found = {(row["name"], row["checkpoint"]): row for row in scores["suites"]}
    assert found["world", REFERENCE]["score"] == 0.4
    assert found["world", TRAINED]["score"] == 0.9
    assert found["world", TRAINED]["n"] == 20
    families = {task.family for task in OrderDesk().tasks(TaskSplit.TEST, num_tasks=10, seed=SEED)}
    assert set(found["world", TRAINED]["detail"]) == families
    assert sum(row["n"] for row in found["world", TRAINED]["detail"].values()) == 20
    assert found["skills", REFERENCE]["score"] == found["skills", TRAINED]["score"] == 12 / 16
    assert {name: row["score"] for name, row in found["skills", TRAINED]["detail"].items()} == {
        "format": 1.0,
        "arithmetic": 1.0,
        "sequence": 1.0,
        "trace": 1.0,
        "string": 0.5,
        "fact": 0.5,
        "greek_fact": 0.5,
        "translation": 0.5,
    }
    changes = {row["name"]: row for row in scores["differences"]}
    assert changes["world"]["difference"] == pytest.approx(0.5)
    assert (changes["world"]["wins"], changes["world"]["losses"]) == (10, 0)
    assert changes["skills"]["difference"] == 0.0
    assert scores["turns"] == sum(row["num_turns"] for row in scores["suites"])


def test_held_out_is_clustered_by_trajectory_and_only_the_known_task_scores(bench: Bench, tmp_path: Path) -> None:
    scores = evaluate(bench, tmp_path)
    row = next(row for row in scores["suites"] if row["name"] == "held_out")
    inputs = bench.inputs()
    known = OrderDesk().tasks(TaskSplit.TRAIN, num_tasks=1, seed=SEED)[0].id
    chosen = {item["item"].rsplit("#", 1)[0] for item in read_json(tmp_path / "eval" / UNITS / "held_out-reference.json")["items"]}
    assert len(chosen) == 8
    assert row["n"] == 24
    assert row["score"] == pytest.approx(sum(inputs.trajectory_of[one] == known for one in chosen) / 8)
    assert row["low"] < row["score"] < row["high"]


def test_the_gain_on_single_turns_sums_to_the_difference(bench: Bench, tmp_path: Path) -> None:
    """Both policies know the same held-out turns and mumble a readable nothing at the others: no gain of either kind."""
    scores = evaluate(bench, tmp_path)
    rows = {row["name"]: row for row in scores["differences"]}
    gain = rows["held_out"]["gain"]
    assert (gain["format"]["value"], gain["decision"]["value"], rows["held_out"]["difference"]) == (0.0, 0.0, 0.0)
    assert (gain["well_formed_before"], gain["well_formed_after"], gain["num_candidates"]) == (1.0, 1.0, 8)
    assert "gain" not in rows["world"]
    assert "gain" not in rows["skills"]


def test_invalid_verdicts_are_the_format_part_of_a_suites_gain() -> None:
    """By hand: f 1/2 -> 1, d 1 -> 1/2 at one candidate; format 1/2 * 3/4, decision -1/2 * 3/4."""
    before = [ItemScore("c#0", "t", "", 1.0, 1), ItemScore("c#1", "t", "", 0.0, 1, is_well_formed=False)]
    after = [ItemScore("c#0", "t", "", 1.0, 1), ItemScore("c#1", "t", "", 0.0, 1)]
    gain = gain_row("held_out", before, after, run_seed=1)
    assert gain is not None
    assert (gain["total"]["value"], gain["format"]["value"], gain["decision"]["value"]) == (0.0, 0.375, -0.375)


def test_samples_are_whole_conversations_with_their_end(bench: Bench, tmp_path: Path) -> None:
    evaluate(bench, tmp_path)
    rows = [row for row in read_jsonl(tmp_path / "eval" / "samples.jsonl") if row["suite"] == "world" and row["checkpoint"] == TRAINED]
    assert rows
    for row in rows:
        assert row["end"]["closed"] is (row["score"] == 1.0)
        assert [message["role"] for message in row["messages"][:3]] == ["system", "user", "assistant"]


def test_a_killed_stage_redoes_only_what_is_missing_and_ends_with_the_same_bytes(bench: Bench, tmp_path: Path) -> None:
    evaluate(bench, tmp_path)
    names = (SCORES, "samples.jsonl", "manifest.json")
    before = [(tmp_path / "eval" / name).read_bytes() for name in names]
    for name in (SUCCESS, SCORES, "samples.jsonl", f"{UNITS}/world-trained.json"):
        (tmp_path / "eval" / name).unlink()
    bench.opened.clear()
    evaluate(bench, tmp_path)
    assert bench.opened == [TRAINED]
    assert [(tmp_path / "eval" / name).read_bytes() for name in names] == before


def test_the_final_table_shows_before_after_and_cost(bench: Bench, tmp_path: Path) -> None:
    evaluate(bench, tmp_path)
    (tmp_path / "profile").mkdir()
    (tmp_path / "train").mkdir()
    write_json(tmp_path / "profile" / "manifest.json", {"summary": {"cost": {"turns": 3360}}})
    write_jsonl(tmp_path / "train" / "metrics.jsonl", [{"step": 0, "perf/env_turns/sum": 192}, {"step": 1, "perf/env_turns/sum": 384}])
    table = final_table(tmp_path)
    cells = [list(column.cells) for column in table.columns]
    assert (cells[1][0], cells[2][0]) == ("0.400", "0.900")
    assert str(cells[3][0]).startswith("+0.500")
    assert "single turns: +0.000 from readable actions, +0.000 from better ones" in str(table.caption)
    assert "3,744 (3,360 profiling + 384 training)" in str(table.caption)


def test_bad_suites_are_the_users_error(bench: Bench, tmp_path: Path) -> None:
    twice = EvalConfig(suites=(SkillsSuite(type="skills", num_examples=8), SkillsSuite(type="skills", num_examples=16)))
    with pytest.raises(UserError, match="once"):
        run_eval(Stage.open(tmp_path / "a", "eval", config={}, inputs={}, seed=SEED), twice, bench.inputs())
    empty = replace(bench.inputs(), held_out=())
    with pytest.raises(UserError, match="held_out_frac"):
        run_eval(Stage.open(tmp_path / "b", "eval", config={}, inputs={}, seed=SEED), CONFIG, empty)


def test_verdicts_that_were_lost_leave_the_score_within_the_limit_and_stop_the_stage_beyond_it(bench: Bench, tmp_path: Path) -> None:
    """Every fourth verdict is lost: 6 of 24."""
    inputs = bench.inputs()
    calls = 0

    class Flaky(ToolCallVerifier):
        def verify(self, state: State, expert: Action, action: Action) -> Verdict:
            nonlocal calls
            calls += 1
            return Verdict.infra("judge down") if calls % 4 == 0 else super().verify(state, expert, action)

    def flaky(checkpoint: Path) -> LocalSampler:
        judge = Flaky(ToolCallVerifierConfig(type="tool_call", message="similarity"))
        return LocalSampler(bench.open(checkpoint).engine, bench.renderer, judge, SAMPLING, SEED)

    held_out = (HeldOutSuite(type="held_out", num_candidates=8, num_samples=3),)
    inputs = replace(inputs, open_sampler=flaky)
    stage = Stage.open(tmp_path, "eval", config={}, inputs={}, seed=SEED)
    with pytest.raises(InfraLimitError, match=r"6 of 24 verdicts at the held_out suite .*judge down"):
        run_eval(stage, EvalConfig(suites=held_out, max_infra_frac=0.2), inputs)
    assert not (stage.path / SUCCESS).exists()
    scores = run_eval(stage, EvalConfig(suites=held_out, max_infra_frac=0.25), inputs)
    assert [row["n"] for row in scores["suites"]] == [18, 18]


@pytest.mark.parametrize("suite", CONFIG.suites, ids=lambda suite: suite.type)
def test_an_engine_that_dies_stops_the_stage_and_the_same_command_resumes_it(suite: SuiteConfig, bench: Bench, tmp_path: Path) -> None:
    def dead(checkpoint: Path) -> LocalSampler:
        policy = bench.open(checkpoint)
        if checkpoint.name == TRAINED:
            policy.engine.generate = fail  # type: ignore[method-assign]
        return policy

    def fail(requests: object) -> None:
        raise EngineError("out of memory")

    stage, config = Stage.open(tmp_path, "eval", config={}, inputs={}, seed=SEED), EvalConfig(suites=(suite,))
    with pytest.raises(InfraLimitError, match="out of memory"):
        run_eval(stage, config, replace(bench.inputs(), open_sampler=dead))
    assert sorted(path.name for path in (stage.path / UNITS).iterdir()) == [f"{suite.type}-reference.json"]
    bench.opened.clear()
    run_eval(stage, config, bench.inputs())
    assert bench.opened == [TRAINED]


def item(name: str, score: float, cluster: str | None = None) -> ItemScore:
    return ItemScore(name, cluster or name, "", score, num_turns=1)


def test_independent_binary_items_get_wilson_and_clustered_ones_a_wider_bootstrap() -> None:
    alone = [item(str(index), float(index < 30)) for index in range(40)]
    found = interval(alone, run_seed=1)
    assert (found.value, found.low, found.high) == (0.75, *(getattr(wilson_interval(30, 40), end) for end in ("low", "high")))
    together = [item(str(index), float(index < 30), str(index // 10)) for index in range(40)]
    clustered = interval(together, run_seed=1)
    assert clustered.value == 0.75
    assert clustered.high - clustered.low > found.high - found.low


def test_differences_pair_by_item_whatever_the_order() -> None:
    before = [item("a", 0.0), item("b", 1.0), item("c", 0.0), item("only before", 1.0)]
    after = [item("c", 1.0), item("a", 1.0), item("b", 0.0)]
    row = difference_row("world", before, after, run_seed=1)
    assert row["difference"] == pytest.approx(1 / 3)
    assert (row["n"], row["wins"], row["losses"]) == (3, 2, 1)
    assert row["sign_test_p"] == pytest.approx(1.0)


def test_a_suite_without_counted_items_has_no_score_rather_than_zero() -> None:
    row = suite_row("held_out", REFERENCE, [], run_seed=1)
    assert (row["score"], row["n"]) == (None, 0)


def test_an_all_zero_score_has_an_honest_interval() -> None:
    items = [ItemScore(f"task-{task}#{sample}", f"task-{task}", "", 0.0, num_turns=1) for task in range(16) for sample in range(2)]
    found = interval(items, run_seed=1)
    assert (found.value, found.low, found.n) == (0.0, 0.0, 32)
    assert found.high == pytest.approx(wilson_interval(0, 16).high)


def test_a_point_of_the_curve_is_what_the_suite_measures(bench: Bench, tmp_path: Path) -> None:
    evaluate(bench, tmp_path)
    suite = read_json(tmp_path / "eval" / UNITS / "world-trained.json")
    config = CurveConfig(every_steps=1, num_samples=2)
    point = SuccessCurve(bench.open(Path(TRAINED)), config, world=WORLD, sampling=SAMPLING, max_prompt_tokens=216, seed=SEED).point()
    assert point == {"value": 0.9, "items": suite["items"]}


def test_one_checkpoint_alone_has_scores_and_no_difference(bench: Bench, tmp_path: Path) -> None:
    inputs = replace(bench.inputs(), checkpoints={TRAINED: Path(TRAINED)})
    scores = run_eval(Stage.open(tmp_path, "eval", config={}, inputs={}, seed=SEED), CONFIG, inputs)
    assert {(row["name"], row["checkpoint"]) for row in scores["suites"]} == {(suite.type, TRAINED) for suite in CONFIG.suites}
    assert scores["differences"] == []
    assert bench.opened == [TRAINED]
    rows = list(zip(*(column.cells for column in final_table(tmp_path).columns), strict=True))
    assert [(row[1], row[3]) for row in rows] == [("not scored", "none")] * 3
    assert rows[0][2].startswith("0.900")
