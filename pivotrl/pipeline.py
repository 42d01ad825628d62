"""The stages of a run, wired: which directories each reads, what it hashes, which function does the work.

`run_stage` runs one, `run_all` all in order; finished stages are not repeated and an unfinished one resumes. The work
itself is in trajectories/, profiling/, training/, evaluation/ and observability/. Called by cli.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pivotrl import build
from pivotrl.config.environment import WHERE_PLAYED
from pivotrl.config.load import RECIPE_FILE, LoadedRecipe, load_recipe
from pivotrl.config.schema import EnvironmentSuite, GgufModel, HeldOutSuite, IngestConfig, MegatronModel, ScratchModel
from pivotrl.console import results_console
from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id
from pivotrl.locks import exclusive
from pivotrl.rundir import STAGES, Stage, output_hash

LOCK = ".lock"
"""Below a run: held while a stage directory is made that several processes may want at once."""

_WEIGHT_SUFFIXES = (".safetensors", ".json", ".jinja")


def load(recipe: Path, overrides: Sequence[str]) -> LoadedRecipe:
    """The checked recipe of a folder."""
    return load_recipe(recipe, overrides)


def default_run(loaded: LoadedRecipe) -> Path:
    """runs/<recipe name> below the working directory."""
    return Path("runs") / loaded.recipe.name


def run_stage(name: str, loaded: LoadedRecipe, run: Path) -> None:
    """Runs one stage, after the preparing ones (`world`, `model`) that the recipe needs.

    Raises:
        UserError: where an earlier stage has not been run.
    """
    prepare(name, loaded, run)
    was_done = Stage.is_done(run, name)
    STAGE_FUNCTIONS[name](loaded, run)
    if was_done and name != "report":
        sys.stderr.write(f"{name}: finished before, kept ({run / name})\n")


def run_all(loaded: LoadedRecipe, run: Path) -> None:
    """Runs every stage of the recipe in order and prints the final table."""
    for name in loaded.recipe.stages:
        run_stage(name, loaded, run)
    from pivotrl.evaluation.summary import final_table

    results_console().print(final_table(run))


def prepare(name: str, loaded: LoadedRecipe, run: Path) -> None:
    """Runs the stages that a recipe's `world` or `model` puts before a stage; of several processes one does, the others wait."""
    for needed in _preparing(loaded, name):
        with exclusive(run / LOCK):
            STAGE_FUNCTIONS[needed](loaded, run)


def _preparing(loaded: LoadedRecipe, name: str) -> list[str]:
    """The stages outside the contract that a stage needs: the world's files, and the model that training starts from."""
    first = "profile" if loaded.recipe.train.episodes is None else "train"
    starts_model = name == "sft" or (name == first and loaded.recipe.sft is None)
    prepared = ["world"] if loaded.recipe.world is not None and (name == "ingest" or starts_model) else []
    if starts_model and isinstance(loaded.recipe.model, ScratchModel | GgufModel | MegatronModel):
        prepared.append("model")
    return prepared


def open_stage(
    loaded: LoadedRecipe, run: Path, name: str, sections: Sequence[str], inputs: Mapping[str, str], left_out: Sequence[tuple[str, str]] = ()
) -> Stage | None:
    """The stage's directory opened for work, or None where it is finished.

    Args:
        left_out: (section, key) of what changes no byte of the result, and so is no part of what the directory belongs to.
    """
    config = loaded.section(*sections)
    for section, key in left_out:
        del config[section][key]
    stage = Stage.open(run, name, config=config, inputs=inputs, seed=loaded.recipe.seed)
    return None if Stage.is_done(run, name) else stage


def checkpoint_hash(directory: Path) -> str:
    """One hash over the files of a Hugging Face directory that decide what it computes."""
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a directory",
            rule="a checkpoint is a Hugging Face directory",
            fix="correct model.path, or run the stage that makes it",
        )
    return content_id({path.name: file_id(path) for path in sorted(directory.iterdir()) if path.suffix in _WEIGHT_SUFFIXES})


def template_hash(loaded: LoadedRecipe, run: Path) -> str:
    """Hash of the recipe's own chat template, or of None."""
    return content_id(build.chat_template(loaded, run))


def _world(loaded: LoadedRecipe, run: Path) -> None:
    recipe = loaded.recipe
    stage = open_stage(loaded, run, "world", ["world", "model", "render"], {"chat_template": template_hash(loaded, run)})
    if stage is None or recipe.world is None:
        return
    from pivotrl.actions.registry import action_format
    from pivotrl.worlds.generate import write_expert, write_world

    if not isinstance(recipe.model, ScratchModel):
        write_expert(stage, config=recipe.world, run_seed=recipe.seed)
        return
    template = build.chat_template(loaded, run)
    if template is None:
        raise UserError(
            "the recipe has a `world` and a scratch model but no render.chat_template",
            rule="a world trains the tokenizer of a model from scratch, and its template is saved with it",
            fix="set render.chat_template to a file",
        )
    write_world(
        stage,
        config=recipe.world,
        model=recipe.model,
        run_seed=recipe.seed,
        action_format=action_format(recipe.render.action_format),
        chat_template=template,
    )


def _model(loaded: LoadedRecipe, run: Path) -> None:
    model = loaded.recipe.model
    if isinstance(model, ScratchModel):
        stage = open_stage(loaded, run, "model", ["model"], {"world": output_hash(Stage.require(run, "world"))})
        if stage is None:
            return
        from pivotrl.megatron.hf_checkpoint import init_hf_checkpoint

        init_hf_checkpoint(model, tokenizer_dir=run / "world" / "tokenizer", out_dir=stage.path / build.HF_DIR, seed=loaded.recipe.seed)
    elif isinstance(model, MegatronModel):
        from pivotrl.weights import megatron_form

        source, description = (None if path is None else loaded.expand(path, run) for path in (model.path, model.hf_path))
        assert source is not None
        stage = open_stage(loaded, run, "model", ["model"], megatron_form.inputs(source, description))
        if stage is None:
            return
        megatron_form.convert(source, description, stage.path / build.HF_DIR)
    else:
        assert isinstance(model, GgufModel)
        from pivotrl.weights.gguf import convert_gguf, find_gguf

        gguf = find_gguf(model)
        stage = open_stage(loaded, run, "model", ["model"], {"gguf": file_id(gguf)})
        if stage is None:
            return
        convert_gguf(gguf, stage.path / build.HF_DIR)
    stage.finish(outputs=_files_below(stage.path, build.HF_DIR), summary={})


def _ingest(loaded: LoadedRecipe, run: Path) -> None:
    from pivotrl.trajectories.ingest import ingest_inputs

    config = loaded.recipe.ingest
    named = {key: getattr(config, key) for key in ("tools", "decontamination")}
    config = config.model_copy(update={key: str(loaded.expand(path, run)) for key, path in named.items() if path is not None})
    paths = build.expand_all(loaded, run, config.paths)
    stage = open_stage(loaded, run, "ingest", ["ingest"], ingest_inputs(config, paths))
    if stage is not None:
        _run_ingest(stage, config, paths, loaded.recipe.seed)


def ingest_paths(paths: Sequence[Path], out: Path, *, format_name: str, tools: Path | None) -> None:
    """Ingests files into a directory of the user's, without a recipe.

    Raises:
        UserError: for a path that does not exist, an unknown format, or where nothing at all was kept.
    """
    from pivotrl.trajectories.ingest import ingest_inputs

    config = IngestConfig(paths=tuple(map(str, paths)), format=format_name, tools=str(tools) if tools else None, held_out_frac=0.0)
    inputs = ingest_inputs(config, paths)
    stage = Stage.open(out.parent, out.name, config=config.model_dump(mode="json"), inputs=inputs, seed=0)
    if Stage.is_done(out.parent, out.name):
        sys.stderr.write(f"ingest: finished before, kept ({out})\n")
        return
    _run_ingest(stage, config, paths, 0)


def _run_ingest(stage: Stage, config: IngestConfig, paths: Sequence[Path], seed: int) -> None:
    from pivotrl.trajectories.audit import audit_table
    from pivotrl.trajectories.ingest import run_ingest

    results_console().print(audit_table(run_ingest(stage, config, paths=paths, run_seed=seed)))


def _sft(loaded: LoadedRecipe, run: Path) -> None:
    config = loaded.recipe.sft
    if config is None:
        raise UserError(
            f"recipe {loaded.recipe.name} has no `sft` section", rule="the sft stage needs one", fix="add it, or start with `pivotrl profile`"
        )
    start = build.start_checkpoint(loaded, run)
    paths = build.expand_all(loaded, run, config.paths)
    inputs = {
        "checkpoint": checkpoint_hash(start),
        "paths": content_id([file_id(path) for path in paths]),
        "chat_template": template_hash(loaded, run),
    }
    if config.use_ingested:
        inputs["ingest"] = output_hash(Stage.require(run, "ingest"))
    stage = open_stage(loaded, run, "sft", ["sft", "render", "model", "num_threads"], inputs)
    if stage is None:
        return
    build.set_threads(loaded)
    from pivotrl.training.demonstrations import render_demonstrations
    from pivotrl.training.sources import DemonstrationSource
    from pivotrl.training.stages import run_sft

    rendered = render_demonstrations(
        build.renderer(loaded, run, start),
        ingest_dir=run / "ingest" if config.use_ingested else None,
        paths=paths,
        max_tokens=config.max_sequence_tokens,
    )
    source = DemonstrationSource(rendered.sequences, config=config, seed=loaded.recipe.seed)
    trainer = build.trainer(loaded, start, config, with_reference=False)
    run_sft(stage, trainer, source, config=config)


def _profile(loaded: LoadedRecipe, run: Path) -> None:
    from pivotrl.verbs.profile import run_profile_stage

    run_profile_stage(loaded, run)


def _select(loaded: LoadedRecipe, run: Path) -> None:
    profile_dir = Stage.require(run, "profile")
    inputs = {"profile": output_hash(profile_dir)}
    if (rule := build.select_rule(loaded, run)) != loaded.recipe.select:
        inputs["rule"] = content_id(rule.model_dump(mode="json"))
    stage = open_stage(loaded, run, "select", ["select"], inputs)
    if stage is None:
        return
    from pivotrl.profiling.selection import run_select

    run_select(stage, profile_dir, rule, run_seed=loaded.recipe.seed)


def _train(loaded: LoadedRecipe, run: Path) -> None:
    from pivotrl.verbs.train import run_train_stage

    run_train_stage(loaded, run)


def _eval(loaded: LoadedRecipe, run: Path) -> None:
    recipe = loaded.recipe
    made_dir = Stage.require(run, recipe.eval.of)
    reference, trained = (
        build.start_checkpoint(loaded, run) if recipe.eval.of == "sft" else build.reference_checkpoint(loaded, run),
        made_dir / build.HF_DIR,
    )
    inputs = {recipe.eval.of: output_hash(made_dir), "reference": checkpoint_hash(reference)}
    sections = ["eval", "render", "engine", "sampling", "verifier", "world", "num_threads"]
    if "select" in recipe.stages:
        inputs["select"] = output_hash(Stage.require(run, "select"))
    elif any(isinstance(suite, HeldOutSuite) for suite in recipe.eval.suites):
        # An SFT baseline has no profile: its held-out turns are those that one would have kept.
        inputs["ingest"] = output_hash(Stage.require(run, "ingest"))
        sections.append("profile")
    rows: tuple[Any, ...] = ()
    if plays := any(isinstance(suite, EnvironmentSuite) for suite in recipe.eval.suites):
        rows = build.environment_rows(loaded, run, "test_rows")
        inputs["rows"] = content_id([row.id for row in rows])
        sections.append("environment")
    stage = open_stage(loaded, run, "eval", sections, inputs, WHERE_PLAYED if plays else ())
    if stage is None:
        return
    build.set_threads(loaded)
    from pivotrl.evaluation.runner import REFERENCE, TRAINED, EvalInputs, run_eval
    from pivotrl.verbs.diagnostics import diagnosis
    from pivotrl.verbs.held_out import held_out_tasks

    held_out, trajectory_of = held_out_tasks(loaded, run, reference)
    run_eval(
        stage,
        recipe.eval,
        EvalInputs(
            checkpoints={label: path for label, path in ((REFERENCE, reference), (TRAINED, trained)) if label in recipe.eval.checkpoints},
            open_sampler=lambda checkpoint: build.sampler(loaded, run, checkpoint, recipe.eval.verifier),
            held_out=held_out,
            trajectory_of=trajectory_of,
            world=recipe.world,
            sampling=recipe.sampling,
            max_prompt_tokens=recipe.render.max_prompt_tokens,
            run_seed=recipe.seed,
            open_player=lambda sampler: build.open_player(loaded, run, rows, sampler),
            environment_rows=rows,
            diagnose=diagnosis(loaded, run, reference=reference, trained=trained),
        ),
    )


def _report(loaded: LoadedRecipe, run: Path) -> None:
    del loaded
    report(run, None)


def report(run_or_recipe: Path, run: Path | None) -> None:
    """Writes RUN/report/index.html from whatever stages exist; redone at every call.

    Raises:
        UserError: where the directory is neither a run nor a recipe.
    """
    is_recipe = (run_or_recipe / RECIPE_FILE).is_file()
    run = (run or default_run(load_recipe(run_or_recipe))) if is_recipe else run_or_recipe
    from pivotrl.observability.report import PAGE, write_report

    page = write_report(run, run / "report")
    done = {name: output_hash(run / name) for name in STAGES if name != "report" and Stage.is_done(run, name)}
    Stage.reopen(run, "report", config={}, inputs=done, seed=0).finish(outputs=[PAGE], summary={})
    sys.stderr.write(f"report: {page}\n")


def print_config(loaded: LoadedRecipe) -> None:
    """One line per value: key, value, where it came from."""
    from rich.table import Table

    table = Table("key", "value", "from", title=str(loaded.directory), title_justify="left", box=None)
    values = loaded.recipe.model_dump(mode="json")
    for key, origin in sorted(loaded.origins.items()):
        value: Any = values
        for part in key.split("."):
            value = value[part]
        table.add_row(key, str(value), origin)
    results_console().print(table)


def _files_below(stage_dir: Path, name: str) -> list[str]:
    return sorted(str(path.relative_to(stage_dir)) for path in (stage_dir / name).rglob("*") if path.is_file())


STAGE_FUNCTIONS: Mapping[str, Callable[[LoadedRecipe, Path], None]] = {
    "world": _world,
    "model": _model,
    "ingest": _ingest,
    "sft": _sft,
    "profile": _profile,
    "select": _select,
    "train": _train,
    "eval": _eval,
    "report": _report,
}
