"""From a recipe's config to objects: the only place, with build_verifiers.py, that maps a `type:` to a class; heavy imports are inside the functions.

Called by pipeline.py. Nothing here runs a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pivotrl.artifacts import Selection, read_artifact
from pivotrl.build_verifiers import build_verifier
from pivotrl.config.engines import (
    EngineConfig,
    InProcessPlacement,
    ProcessesPlacement,
    RemotePlacement,
    ScriptedEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
)
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.schema import HuggingFaceModel, RandomTurnsRule, SelectConfig, SftConfig, TrainConfig
from pivotrl.config.verifiers import VerifierConfig
from pivotrl.errors import InfraLimitError, UserError
from pivotrl.rollouts.engine import EngineError
from pivotrl.rundir import Stage

if TYPE_CHECKING:
    from pivotrl.gym.episode_rows import EpisodeRow
    from pivotrl.gym.player import GymPlayer
    from pivotrl.rollouts.engine import Engine
    from pivotrl.rollouts.local import LocalSampler
    from pivotrl.rollouts.render import Renderer
    from pivotrl.training.protocols import PolicyTrainer
    from pivotrl.verifiers.protocol import Verifier
    from pivotrl.weights.buckets import WeightStore

HF_DIR = "hf"


def set_threads(loaded: LoadedRecipe) -> None:
    """Fixes torch's thread count, on which float sums depend."""
    import torch

    torch.set_num_threads(loaded.recipe.num_threads)


def start_checkpoint(loaded: LoadedRecipe, run: Path) -> Path:
    """The Hugging Face directory that the recipe starts from, before any training."""
    model = loaded.recipe.model
    return loaded.expand(model.path, run) if isinstance(model, HuggingFaceModel) else run / "model" / HF_DIR


def reference_checkpoint(loaded: LoadedRecipe, run: Path) -> Path:
    """pi_0: what `sft` made, or where the recipe has no `sft` section the model it starts from."""
    return run / "sft" / HF_DIR if loaded.recipe.sft is not None else start_checkpoint(loaded, run)


def chat_template(loaded: LoadedRecipe, run: Path) -> str | None:
    """Text of the recipe's own chat template, or None where the tokenizer's is used.

    Raises:
        UserError: for a file that cannot be read.
    """
    name = loaded.recipe.render.chat_template
    if name is None:
        return None
    path = loaded.expand(name, run)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"render.chat_template names {path}: {error}", rule="it must be a readable Jinja file", fix="correct the path") from error


def renderer(loaded: LoadedRecipe, run: Path, checkpoint: Path) -> Renderer:
    """The recipe's renderer on a checkpoint's tokenizer."""
    from pivotrl.rollouts.render import Renderer

    return Renderer.load(checkpoint, loaded.recipe.render, chat_template(loaded, run))


def verifier(loaded: LoadedRecipe, run: Path, config: VerifierConfig | None = None) -> Verifier:
    """The recipe's r_func, or the verifier of another section of it."""
    return build_verifier(config or loaded.recipe.verifier, expand=lambda path: loaded.expand(path, run))


def select_rule(loaded: LoadedRecipe, run: Path) -> SelectConfig:
    """The recipe's selection rule, with the number of turns where it takes that of another run.

    Raises:
        UserError: where that run has selected nothing yet, or its selection.json is not what `select` writes.
    """
    rule = loaded.recipe.select
    if not isinstance(rule, RandomTurnsRule) or rule.as_many_as is None:
        return rule
    from pivotrl.pivots.dataset import SELECTION

    selection = read_artifact(Stage.require(loaded.expand(rule.as_many_as, run), "select") / SELECTION, Selection)
    return RandomTurnsRule(rule="random", num_turns=selection["num_pivots"])


def engine(loaded: LoadedRecipe, run: Path, checkpoint: Path, *, render: Renderer) -> Engine:
    """The recipe's rollout engine with the checkpoint's weights as policy version 0, here or in processes of its own.

    Raises:
        InfraLimitError: where it cannot be started for want of memory, or no replica can be.
    """
    config, placement = loaded.recipe.engine, loaded.recipe.placement
    if isinstance(config, ScriptedEngineConfig):
        config = config.model_copy(update={"path": str(loaded.expand(config.path, run))})
    if isinstance(placement, InProcessPlacement):
        try:
            return load_engine(config, checkpoint, stop_token_ids=render.stop_token_ids, pad_token_id=render.pad_token_id)
        except EngineError as error:
            raise InfraLimitError(f"{error}; free memory on this machine, and run the same command to resume") from error
    from pivotrl.rollouts.launchers import LocalLauncher, RemoteLauncher
    from pivotrl.rollouts.pool import EnginePool

    start = {
        "engine": config.model_dump(mode="json"),
        "checkpoint": str(checkpoint.resolve()),
        "stop_token_ids": render.stop_token_ids,
        "pad_token_id": render.pad_token_id,
        "num_threads": loaded.recipe.num_threads,
    }
    store, directory = _weight_store(loaded, run, placement), run / "engines"
    if isinstance(placement, RemotePlacement):
        return EnginePool(RemoteLauncher(placement, directory), store, placement, start)
    return EnginePool(LocalLauncher(placement, directory, num_threads=loaded.recipe.num_threads), store, placement, start)


def load_engine(config: EngineConfig, checkpoint: Path, *, stop_token_ids: Sequence[int], pad_token_id: int) -> Engine:
    """The engine of a config, in this process."""
    match config:
        case ScriptedEngineConfig():
            from pivotrl.rollouts.scripted import ScriptedEngine

            return ScriptedEngine.load(config)
        case TransformersEngineConfig():
            from pivotrl.rollouts.transformers_engine import TransformersEngine

            return TransformersEngine.load(checkpoint, config, stop_token_ids=stop_token_ids, pad_token_id=pad_token_id)
        case VllmEngineConfig():
            from pivotrl.rollouts.vllm import VllmEngine

            return VllmEngine.load(checkpoint, config, stop_token_ids=stop_token_ids, pad_token_id=pad_token_id)


def import_engine(config: EngineConfig) -> None:
    """Imports what `load_engine` needs, for a process that has to wait before it is told to load one.

    Raises:
        UserError: where the engine's package is not installed.
    """
    match config:
        case ScriptedEngineConfig():
            pass
        case TransformersEngineConfig():
            import pivotrl.rollouts.transformers_engine  # noqa: F401
        case VllmEngineConfig():
            from pivotrl.rollouts.vllm import import_vllm

            import_vllm()


def _weight_store(loaded: LoadedRecipe, run: Path, placement: ProcessesPlacement | RemotePlacement) -> WeightStore:
    if placement.transfer == "shared_memory":
        from pivotrl.weights.shared_memory import SharedMemoryStore

        return SharedMemoryStore()
    if placement.transfer == "nccl":
        from pivotrl.weights.broadcast import BroadcastStore

        return BroadcastStore()
    from pivotrl.weights.filesystem import FilesystemStore

    return FilesystemStore(loaded.expand(placement.weights_dir, run))


def sampler(loaded: LoadedRecipe, run: Path, checkpoint: Path, judged_by: VerifierConfig | None = None) -> LocalSampler:
    """Engine, renderer and verifier as the one definition of a local rollout; the caller closes `.engine`.

    Args:
        judged_by: another verifier than the recipe's r_func.
    """
    from pivotrl.rollouts.local import LocalSampler

    # The verifier first: what it lacks (a judge's address, a tool) should be known before the weights are loaded.
    judge, render = verifier(loaded, run, judged_by), renderer(loaded, run, checkpoint)
    return LocalSampler(engine(loaded, run, checkpoint, render=render), render, judge, loaded.recipe.sampling, loaded.recipe.seed)


@contextmanager
def open_sampler(loaded: LoadedRecipe, run: Path, checkpoint: Path) -> Iterator[LocalSampler]:
    """`sampler`, its engine closed at the end of the block."""
    opened = sampler(loaded, run, checkpoint)
    try:
        yield opened
    finally:
        opened.engine.close()


def environment_rows(loaded: LoadedRecipe, run: Path, key: Literal["train_rows", "test_rows"]) -> tuple[EpisodeRow, ...]:
    """The environment's rows of a key.

    Raises:
        UserError: for a path or a row that cannot be read.
    """
    from pivotrl.gym.episode_rows import read_episode_rows

    config = loaded.recipe.environment
    assert config is not None, "the schema demands an environment section"
    return read_episode_rows(expand_all(loaded, run, getattr(config, key)), key=f"environment.{key}", agent=config.agent)


@contextmanager
def open_player(loaded: LoadedRecipe, run: Path, rows: Sequence[EpisodeRow], sampler: LocalSampler) -> Iterator[GymPlayer]:
    """The environment's servers, and what plays rows there with a sampler's engine; ended with the block.

    Raises:
        UserError: where the policy's port is taken, or the servers know no agent of a row.
        InfraLimitError: where the servers do not come up.
    """
    from pivotrl.gym.player import opened

    config = loaded.recipe.environment
    assert config is not None, "the schema demands an environment section"

    def command(policy_base_url: str) -> list[str] | None:
        words = config.command
        return None if words is None else [loaded.expand_text(word, run).replace("{policy_base_url}", policy_base_url) for word in words]

    where = {"command": command, "directory": run / "environment", "run_seed": loaded.recipe.seed}
    with opened(config, rows, sampler.engine, sampler.renderer, **where) as player:
        yield player


def trainer(loaded: LoadedRecipe, checkpoint: Path, config: SftConfig | TrainConfig, *, with_reference: bool) -> PolicyTrainer:
    """The megatron-core trainer on a checkpoint, laid out as the recipe says over the processes that were started.

    Raises:
        UserError: for a layout that the model or the number of processes does not allow, before any process group exists.
    """
    from pivotrl.megatron import processes
    from pivotrl.megatron.trainer import Trainer, check_layout

    recipe = loaded.recipe
    arguments = {
        "checkpoint_dir": checkpoint,
        "optimizer": config.optimizer,
        "parallel": recipe.parallel,
        "moe": recipe.moe,
        "num_steps": config.num_steps,
        "seed": recipe.seed,
        "with_reference": with_reference,
    }
    check_layout(checkpoint, recipe.parallel, recipe.moe, processes.num_processes(), batching=config.batching)
    return processes.Leader(arguments) if processes.num_processes() > 1 else Trainer.from_hf(**arguments)


def scorer(loaded: LoadedRecipe, checkpoint: Path) -> PolicyTrainer:
    """A trainer that only scores: whole in this process whatever the layout of training; laid out as trained where several were started."""
    from pivotrl.config.schema import ParallelConfig
    from pivotrl.megatron import processes
    from pivotrl.megatron.trainer import Trainer

    recipe = loaded.recipe
    if processes.num_processes() > 1:
        return trainer(loaded, checkpoint, recipe.train, with_reference=False)
    alone = {"optimizer": None, "parallel": ParallelConfig(), "moe": recipe.moe}
    return Trainer.from_hf(checkpoint, **alone, num_steps=1, seed=recipe.seed, with_reference=False)


def expand_all(loaded: LoadedRecipe, run: Path, paths: Sequence[str]) -> list[Path]:
    """The recipe's paths with placeholders replaced.

    Raises:
        UserError: for one that does not exist.
    """
    expanded = [loaded.expand(path, run) for path in paths]
    for path in expanded:
        if not path.exists():
            raise UserError(
                f"{path} does not exist", rule="every named path must exist", fix="correct the path, which is relative to the working directory"
            )
    return expanded
