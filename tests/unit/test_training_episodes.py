"""End-to-end RL on a world of digits: advantages, masks and metrics by hand, seeds, infra, refusals, and a resumed run as an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes.bandit import EOS, MAX_NEW_TOKENS, BanditEngine, BanditTrainer, Killed, bandit_text
from fakes.bandit_run import SEED, bandit_train_config, data_bytes, sampling_config
from pydantic import ValidationError

from pivotrl.config.load import load_recipe
from pivotrl.config.schema import TrainConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.identity import derive_seed
from pivotrl.launching.jobs import recipe_jobs
from pivotrl.metrics import check_name
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.episodes import EpisodeEnd, Limits, PlayedEpisode, WorldPlayer, play
from pivotrl.rollouts.local import LocalSampler
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.scripted import ScriptedEngine
from pivotrl.rundir import Stage, read_jsonl
from pivotrl.training.checks import Checks
from pivotrl.training.episodes import EpisodeSource, training_tasks
from pivotrl.training.stages import run_train
from pivotrl.types import Action, Completion, FinishReason, Message, ParseOutcome, Role, State, Tool, ToolOrigin
from pivotrl.worlds.protocol import World

# Tokens of a turn: the first decides. 9 closes in success, 8 closes in failure, 11 cannot be read, any other asks on and is answered with a 3.
RIGHT, WRONG, UNREADABLE, ANSWER = 9, 8, 11, 3
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class DigitTask:
    id: str
    first: int
    family: str = "digits"


@dataclass
class DigitEpisode:
    task_id: str
    messages: list[Message]
    success: bool = False
    is_done: bool = False
    num_turns: int = 0

    def state(self) -> State:
        return State(tuple(self.messages), (), ToolOrigin.NONE)

    def act(self, action: Action) -> None:
        assert not self.is_done
        self.num_turns += 1
        first = int(action.content.split()[0])
        self.is_done, self.success = first in (RIGHT, WRONG), first == RIGHT
        self.messages += [Message(Role.ASSISTANT, action.content), Message(Role.TOOL, str(ANSWER))]

    def outcome(self) -> Mapping[str, Any]:
        return {}


class DigitWorld:
    def reset(self, task: DigitTask) -> DigitEpisode:
        return DigitEpisode(task.id, [Message(Role.USER, str(task.first))])


class DigitRenderer:
    """A prompt is token 2 and every number of the conversation."""

    def render_prompt(self, state: State) -> tuple[int, ...]:
        return (2, *(int(word) for message in state.messages for word in message.content.split()))

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Action:
        assert tools == ()
        parse = ParseOutcome.MALFORMED if token_ids[0] == UNREADABLE else ParseOutcome.ABSENT
        return Action(bandit_text(token_ids), (), None, parse)

    def decode(self, token_ids: Sequence[int]) -> str:
        return bandit_text(token_ids)


class TableEngine(BanditEngine):
    """Samples from the bandit's table; the numbers of a completion depend on its prompt and seed alone."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        return [tuple(self._one(request, seed) for seed in request.seeds) for request in requests]

    def _one(self, request: GenerationRequest, seed: int) -> Completion:
        generator, logprobs_V_V = torch.Generator().manual_seed(seed), torch.log_softmax(self.table, dim=-1)
        tokens, logprobs = [request.prompt_token_ids[-1]], []
        while len(logprobs) < request.max_new_tokens and (not logprobs or tokens[-1] != EOS):
            row = logprobs_V_V[tokens[-1]]
            tokens.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            logprobs.append(row[tokens[-1]].item())
        return Completion(tuple(tokens[1:]), tuple(logprobs), FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH, self.policy_version)


@dataclass
class Policy:
    """The sampler's face: end-to-end RL asks it for engine and renderer, never for a verdict."""

    engine: Any
    renderer: Renderer = field(default_factory=lambda: cast(Renderer, DigitRenderer()))

    def take_cost(self) -> dict[str, float]:
        return {}


def config_of(**changes: object) -> TrainConfig:
    base: dict[str, object] = {"episodes": {"tasks_per_step": 1, "max_turns": 3}, "group_size": 4, "advantage": "no_std", "num_steps": 1}
    return bandit_train_config(**{**base, **changes})


def source_of(
    engine: Any, config: TrainConfig, *, num_tasks: int = 1, truncated: str = "zero", max_prompt_tokens: int = 40
) -> EpisodeSource[DigitTask]:
    policy = Policy(engine)
    return EpisodeSource(
        cast(LocalSampler, policy),
        WorldPlayer(cast(World[DigitTask], DigitWorld()), engine, policy.renderer, run_seed=SEED),
        [DigitTask(f"task-{i}", 4 + i) for i in range(num_tasks)],
        config=config,
        sampling=sampling_config(truncated),
        max_prompt_tokens=max_prompt_tokens,
        seed=SEED,
    )


# (sample, turn) of task-0 to its completion: a success in two turns, a failure, a cut turn, an unreadable turn and then a success.
TURNS = {(0, 0): (5, EOS), (0, 1): (RIGHT, EOS), (1, 0): (WRONG, EOS), (2, 0): (5, 5, 5, 5), (3, 0): (UNREADABLE, EOS), (3, 1): (RIGHT, 6, EOS)}


def scripted(turns: Mapping[tuple[int, int], tuple[int, ...]] = TURNS, *, fails: frozenset[tuple[int, int]] = frozenset()) -> ScriptedEngine:
    """Answers by seed: a turn drawn at another place than ("train", step, task, sample, turn) has no answer."""
    by_seed = {derive_seed(SEED, "train", 0, "task-0", *place): place for place in turns}

    def script(_prompt: tuple[int, ...], seed: int, _index: int) -> tuple[int, ...]:
        if by_seed[seed] in fails:
            raise EngineError("out of memory")
        return turns[by_seed[seed]]

    return ScriptedEngine.from_function(script)


def rows_of(source: EpisodeSource[DigitTask]) -> tuple[list[tuple], Any]:
    """Every training sequence as (tokens, loss mask, advantage, weight), sorted, and the step's data."""
    data = source.batch(0)
    rows = []
    for batch in data.micro_batches:
        for i, length in enumerate(batch.lengths_B.tolist()):
            tokens, mask = batch.token_ids_B_T[i, :length].tolist(), batch.action_mask_B_T[i, :length].int().tolist()
            rows.append((tuple(tokens), tuple(mask), batch.advantages_B[i].item(), batch.loss_weights_B[i].item()))
            assert not batch.action_mask_B_T[i, length:].any()
    return sorted(rows), data


@pytest.mark.parametrize(
    ("truncated", "advantages", "cut_weight"),
    [("zero", (0.5, -0.5, -0.5, 0.5), 1.0), ("exclude", (1 / 3, -2 / 3, None, 1 / 3), None), ("mask", (0.5, -0.5, -0.5, 0.5), 0.0)],
)
def test_every_turn_carries_its_episodes_advantage_on_its_own_tokens(truncated: str, advantages: tuple, cut_weight: float | None) -> None:
    rows, data = rows_of(source_of(scripted(), config_of(kl={"beta": 0.1}), truncated=truncated))
    a, b, c, d = advantages
    expected = [
        ((2, 4, 5, EOS), (0, 0, 1, 1), a, 1.0),
        ((2, 4, 5, EOS, 3, RIGHT, EOS), (0, 0, 0, 0, 0, 1, 1), a, 1.0),
        ((2, 4, WRONG, EOS), (0, 0, 1, 1), b, 1.0),
        ((2, 4, UNREADABLE, EOS), (0, 0, 1, 1), d, 1.0),
        ((2, 4, UNREADABLE, EOS, 3, RIGHT, 6, EOS), (0, 0, 0, 0, 0, 1, 1, 1), d, 1.0),
    ]
    # A weight of 0 takes the sequence out of the forward, never out of the denominators.
    expected += [((2, 4, 5, 5, 5), (0, 0, 1, 1, 1), c, 1.0)] if cut_weight else []
    for found, wanted in zip(rows, sorted(expected), strict=True):
        assert found == (*wanted[:2], pytest.approx(wanted[2]), wanted[3])
    num_turns, num_tokens = (5, 11) if truncated == "exclude" else (6, 14)
    assert {(batch.num_actions, batch.num_action_tokens) for batch in data.micro_batches} == {(num_turns, num_tokens)}
    assert data.metrics["perf/env_turns/sum"] == 6


def test_metrics_and_rows_by_hand() -> None:
    _, data = rows_of(source_of(scripted(), config_of()))
    assert all(check_name(name) for name in data.metrics)
    assert data.metrics == pytest.approx(
        {
            "rollout/reward/mean": 1 / 2,
            "rollout/reward/std": 1 / 2,
            "rollout/group_zero_variance/frac": 0,
            "rollout/group_dropped/count": 0,
            "rollout/episode_turns/mean": 6 / 4,
            "rollout/truncated/frac": 1 / 6,
            "rollout/malformed/frac": 1 / 6,
            "rollout/absent/frac": 5 / 6,
            "rollout/verifier_error/frac": 0,
            "rollout/response_tokens/mean": 14 / 6,
            "rollout/response_tokens/sum": 14,
            "rollout/prompt_tokens/sum": 4 * 2 + 2 * 5,
            "rollout/wasted_tokens/sum": 0,
            "sync/policy_age_steps/max": 0,
            "perf/env_turns/sum": 6,
        }
    )
    assert data.ledger_rows == [{"step": 0, "task_id": "task-0", "epoch": 0, "policy_version": 0, "num_counted": 4, "num_turns": 6}]
    shown = [(row["sample_index"], row["turn"], row["text"], row["reward"], row["verdict"], row["reason"]) for row in data.rollout_rows]
    assert shown == [
        (0, 0, "5 1", 1.0, "ok", "success"),
        (0, 1, "9 1", 1.0, "ok", "success"),
        (1, 0, "8 1", 0.0, "ok", "wrong final state"),
        (2, 0, "5 5 5", 0.0, "invalid", "truncated"),
        (3, 0, "11 1", 1.0, "ok", "success"),
        (3, 1, "9 6 1", 1.0, "ok", "success"),
    ]


def test_a_limit_ends_an_episode_as_a_failure() -> None:
    """Sample 0 asks on to the turn limit; with room for 5 prompt tokens its third turn is not sampled."""
    asks = {**TURNS, (0, 1): (5, EOS), (0, 2): (5, EOS)}
    for max_prompt_tokens, reason, num_turns in ((40, "turn limit", 7), (5, "prompt too long", 6)):
        data = source_of(scripted(asks), config_of(), max_prompt_tokens=max_prompt_tokens).batch(0)
        assert {(row["reward"], row["verdict"], row["reason"]) for row in data.rollout_rows if row["sample_index"] == 0} == {(0.0, "ok", reason)}
        assert data.metrics["perf/env_turns/sum"] == num_turns


def test_a_failed_engine_takes_open_episodes_out_of_the_group_and_beyond_the_limit_stops_the_run() -> None:
    engine = scripted(fails=frozenset({(3, 1)}))
    _, data = rows_of(source_of(engine, config_of(max_infra_frac=0.5)))
    assert data.metrics["rollout/verifier_error/frac"] == 0.5
    assert data.metrics["rollout/group_zero_variance/frac"] == 1
    assert [(row["num_counted"], row["num_turns"]) for row in data.ledger_rows] == [(2, 4)]
    with pytest.raises(InfraLimitError, match=r"2 of 4 verdicts at step 0 .* engine: out of memory"):
        source_of(engine, config_of(max_infra_frac=0.4)).batch(0)


def test_turns_do_not_depend_on_which_episodes_are_open_beside_them() -> None:
    world, engine, limits = DigitWorld(), TableEngine(), Limits(40, MAX_NEW_TOKENS, 1.0, max_turns=4)
    tasks = [DigitTask(f"task-{i}", 4 + i % 4) for i in range(12)]
    renderer = cast(Renderer, DigitRenderer())

    def turns(chosen: Sequence[DigitTask]) -> dict[str, list]:
        played = play(engine, renderer, [world.reset(task) for task in chosen], limits=limits, seed_of=lambda i, t: derive_seed(1, chosen[i].id, t))  # type: ignore[arg-type]
        return {one.episode.task_id: one.turns for one in played}

    whole = turns(tasks)
    assert turns(tasks[::-1]) == whole
    assert turns(tasks[3:5]) == {task.id: whole[task.id] for task in tasks[3:5]}
    assert len({len(found) for found in whole.values()}) > 1


TRAINED = config_of(
    num_steps=4, episodes={"tasks_per_step": 2, "max_turns": 4}, group_size=6, kl={"beta": 0.1}, checkpoint_every=1, updates_per_rollout=2
)


def train(run: Path, on_call: Callable[[str], None] = lambda name: None, config: TrainConfig = TRAINED) -> dict[str, Any]:
    stage = Stage("train", run / "train", {"stage": "train", "config": config.model_dump(mode="json"), "seed": SEED}, started_s=0.0)
    stage.path.mkdir(parents=True, exist_ok=True)
    trainer = BanditTrainer(on_call=on_call, lr=0.3)
    return run_train(stage, trainer, source_of(TableEngine(), config, num_tasks=5), config=config, sampling=sampling_config(), checks=Checks())


def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    calls: list[str] = []
    undisturbed = train(tmp_path / "whole", calls.append)
    rows = list(read_jsonl(tmp_path / "whole" / "train" / "metrics.jsonl"))
    ledger = list(read_jsonl(tmp_path / "whole" / "train" / "ledger.jsonl"))
    assert rows[-1]["perf/env_turns/sum"] == sum(row["num_turns"] for row in ledger)
    assert [row["policy_version"] for row in ledger] == [0, 0, 2, 2]
    assert all(row["objective/logprob_mismatch/max"] < 1e-5 for row in rows if "objective/logprob_mismatch/max" in row)
    for number in range(2, len(calls), 4):
        left = [number]

        def kill(name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Killed(name)

        run = tmp_path / str(number)
        with pytest.raises(Killed):
            train(run, kill)
        assert train(run) == undisturbed
        assert data_bytes(run) == data_bytes(tmp_path / "whole")


def test_success_rises(tmp_path: Path) -> None:
    config = config_of(num_steps=25, episodes={"tasks_per_step": 2, "max_turns": 4}, group_size=12, checkpoint_every=25)
    train(tmp_path, config=config)
    rewards = [row["rollout/reward/mean"] for row in read_jsonl(tmp_path / "train" / "metrics.jsonl")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_what_makes_no_sense_without_pivots_is_refused() -> None:
    correction = {"type": "truncated", "level": "token", "cap": 4.0}
    for changes, match in (
        ({"reprofile": {"informative_frac": 0.5}}, "reprofile"),
        ({"validation": {"every_steps": 1, "num_pivots": 1, "num_samples": 1}}, "validation"),
        ({"max_policy_age": 1, "correction": correction}, "max_policy_age"),
        ({"batching": "shared_prefix"}, "different prompts"),
        ({"parity": {"max_logprob_difference": 0.1, "every_steps": 1}}, "the gate samples pivots"),
    ):
        with pytest.raises(ValidationError, match=match):
            config_of(**changes)
    with pytest.raises(UserError, match="held_out, whose turns come from a profile"):
        load_recipe(RECIPES / "world_terminal", ["train.episodes={tasks_per_step: 2}"])
    without = ("train.validation=null", "train.parity=null", "eval.suites=[]")
    with pytest.raises(UserError, match=r"no `world` or `environment` to play episodes in"):
        load_recipe(RECIPES / "smollm2_tool_calls", ["ingest.paths=[x]", "train.episodes={tasks_per_step: 2}", *without])
    words = ["train.episodes={tasks_per_step: 2}", "eval.suites=[{type: world, num_samples: 1}]"]
    with pytest.raises(UserError, match=r"leave eval.diagnostics out"):
        load_recipe(RECIPES / "world_terminal", [*words, "eval.diagnostics={num_probes: 1, num_prompts: 1, num_answers: 1}"])
    jobs = recipe_jobs(load_recipe(RECIPES / "world_terminal", words).recipe, gpus_per_node=0)
    assert [job.name for job in jobs] == ["ingest", "sft", "train", "eval", "report"]


def test_an_sft_baseline_ends_with_sft() -> None:
    words = ["eval.of=sft", "eval.suites=[{type: world, num_samples: 1}]"]
    loaded = load_recipe(RECIPES / "world_terminal", words)
    assert list(loaded.recipe.stages) == ["ingest", "sft", "eval", "report"]
    assert [job.name for job in recipe_jobs(loaded.recipe, gpus_per_node=0)] == ["ingest", "sft", "eval", "report"]
    whole = load_recipe(RECIPES / "world_terminal", [])
    assert list(whole.recipe.stages) == [job.name for job in recipe_jobs(whole.recipe, gpus_per_node=0)]
    for more, match in (
        (["eval.diagnostics={num_probes: 1, num_prompts: 1, num_answers: 1}"], "leave eval.diagnostics out"),
        (["sft=null", "model={type: huggingface, path: x}"], "no `sft` section"),
    ):
        with pytest.raises(UserError, match=match):
            load_recipe(RECIPES / "world_terminal", [*words, *more])
    with pytest.raises(UserError, match=r"train\.curve is set but there is no `world`"):
        load_recipe(RECIPES / "smollm2_tool_calls", ["ingest.paths=[x]", "eval.suites=[]", "train.curve={every_steps: 1, num_samples: 1}"])


def test_tasks_are_those_of_the_training_part_and_prompts_must_fit() -> None:
    tasks, config = [DigitTask(f"task-{i}", 4) for i in range(4)], config_of(episodes={"tasks_per_step": 2})
    assert [task.id for task in training_tasks(tasks, frozenset({"task-1", "task-3", "other"}), config=config)] == ["task-1", "task-3"]
    with pytest.raises(UserError, match=r"tasks_per_step is 2 but only 1 of the world's 4"):
        training_tasks(tasks, frozenset({"task-1"}), config=config)
    with pytest.raises(UserError, match=r"first prompt of task task-0 has 2 tokens and render.max_prompt_tokens is 1"):
        source_of(scripted(), config_of(), max_prompt_tokens=1)


class SilentPlayer:
    """Episodes whose agents never got a turn: every prompt was too long."""

    def first_prompt(self, task: DigitTask) -> tuple[int, ...]:
        return (task.first,)

    def play(self, tasks: Sequence[DigitTask], num_samples: int, **_: object) -> list[PlayedEpisode[DigitEpisode]]:
        return [PlayedEpisode(DigitEpisode(task.id, []), [], EpisodeEnd.CLOSED, 0.0) for task in tasks for _ in range(num_samples)]

    def take_cost(self) -> dict[str, float]:
        return {}


def test_a_step_without_a_turn_is_refused_and_says_what_to_raise() -> None:
    policy = Policy(scripted())
    source = EpisodeSource(
        cast(LocalSampler, policy),
        SilentPlayer(),
        [DigitTask("task-0", 4)],
        config=config_of(),
        sampling=sampling_config("zero"),
        max_prompt_tokens=40,
        seed=SEED,
    )
    with pytest.raises(UserError, match="no turn was sampled in the episodes of step 0"):
        source.batch(0)
