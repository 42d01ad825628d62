"""One training stage of a tiny random model by the megatron-core trainer and a real engine, put together as build puts together a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fakes.objective_steps import train_config
from fakes.tiny_tokenizer import CHATML, save_checkpoint, tiny_tokenizer
from fakes.trainer_batches import hf_model

from pivotrl.config.engines import TransformersEngineConfig
from pivotrl.config.schema import MoeConfig, ParallelConfig, RenderConfig, SamplingConfig, TrainConfig
from pivotrl.megatron.trainer import Trainer
from pivotrl.rollouts.engine import Engine
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.transformers_engine import TransformersEngine
from pivotrl.rundir import Stage
from pivotrl.training.ahead import sampling_ahead
from pivotrl.training.checks import Checks
from pivotrl.training.sources import PivotSource
from pivotrl.training.stages import run_train
from pivotrl.training.validation import Validation
from pivotrl.types import Action, Message, ParseOutcome, Role, State, ToolOrigin, Verdict

SEED = 3
SAMPLING = SamplingConfig(temperature=0.8, max_new_tokens=5, truncated="mask")
ENGINE = TransformersEngineConfig(type="transformers", batch_size=16)

type Start = Callable[[Path, Renderer, TransformersEngineConfig], Engine]


class LikesVowels:
    """Reward 1 for a vowel in the text: a random model says one about half of the time."""

    def verify(self, state: State, expert: Action, action: Action) -> Verdict:
        return Verdict.ok(1.0, "vowel") if set("aeiou") & set(action.content) else Verdict.invalid("no vowel")


def save_tiny(directory: Path, family: str, **settings: object) -> Path:
    """A checkpoint of a random model with tokenizer and template."""
    hf_model(family, vocab_size=len(tiny_tokenizer()), **settings).save_pretrained(directory)
    return save_checkpoint(directory, chat_template=CHATML)


def tiny_config(**changes: object) -> TrainConfig:
    base = {"num_steps": 4, "group_size": 4, "pivots_per_step": 2, "micro_batch_tokens": 96, "optimizer": {"lr": 3e-3}, "checkpoint_every": 2}
    return train_config(**{**base, **changes})


def stop_tokens(renderer: Renderer) -> tuple[int, ...]:
    """Every third token ends an action: a random model would hardly ever say the one that does, and all its samples would be cut."""
    return (*renderer.stop_token_ids, *range(5, len(tiny_tokenizer()), 3))


def in_process(hf_dir: Path, renderer: Renderer, engine: TransformersEngineConfig) -> Engine:
    return TransformersEngine.load(hf_dir, engine, stop_token_ids=stop_tokens(renderer), pad_token_id=renderer.pad_token_id)


def run_tiny(
    folder: Path,
    hf_dir: Path,
    train: TrainConfig,
    *,
    engine: TransformersEngineConfig = ENGINE,
    moe: MoeConfig | None = None,
    sampling: SamplingConfig = SAMPLING,
    trainer_class: type[Trainer] = Trainer,
    start: Start = in_process,
) -> None:
    """Runs, or resumes, the stage in `folder` to its end."""
    renderer = Renderer.load(hf_dir, RenderConfig(action_format="hermes", history_reasoning="drop", max_prompt_tokens=64), None)
    started = start(hf_dir, renderer, engine)
    sampler = LocalSampler(started, renderer, LikesVowels(), sampling, run_seed=SEED)
    tasks = [_task(renderer, name) for name in ("one", "two", "three", "four", "five")]
    source = PivotSource(sampler, tasks[:3], config=train, sampling=sampling, decode=renderer.decode, seed=SEED)
    validation = train.validation and Validation(
        sampler, tasks[3:], train.validation, truncated="mask", max_infra_frac=train.max_infra_frac, seed=SEED
    )
    trainer = trainer_class.from_hf(
        hf_dir,
        optimizer=train.optimizer,
        parallel=ParallelConfig(),
        moe=moe or MoeConfig(),
        num_steps=train.num_steps,
        seed=SEED,
        with_reference=train.kl.beta > 0,
    )
    stage = Stage("train", folder, {"stage": "train"}, started_s=0.0)
    folder.mkdir(exist_ok=True)
    with sampling_ahead(source, train) as rounds:
        run_train(stage, trainer, rounds, config=train, sampling=sampling, checks=Checks(validation))
    started.close()


def _task(renderer: Renderer, name: str) -> LocalTask:
    state = State((Message(Role.USER, f"Say {name}."),), (), ToolOrigin.NONE)
    return LocalTask(name, renderer.render_prompt(state), state, Action(name, (), None, ParseOutcome.ABSENT))
