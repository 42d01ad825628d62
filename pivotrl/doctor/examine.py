"""All checks of one recipe in their order: what needs nothing first, so that a contradiction is known before a gigabyte is read.

Called by verbs/doctor.py. A check that cannot run because an earlier one failed is named among what was not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pivotrl import build
from pivotrl.config.launch import ClusterFile
from pivotrl.config.load import LoadedRecipe, load_keys, load_recipe, load_section
from pivotrl.config.planning import ClusterConfig
from pivotrl.doctor.checkpoint import check_checkpoint, check_context, model_config
from pivotrl.doctor.cost import check_on_cluster, check_without_cluster, count_turns
from pivotrl.doctor.data import Seen, check_data
from pivotrl.doctor.environment import check_environment
from pivotrl.doctor.findings import Findings
from pivotrl.doctor.jobs import check_conversion, check_jobs, jobs_environment
from pivotrl.doctor.machine import check_disk, check_judges, check_packages, check_port
from pivotrl.doctor.settings import check_settings, place
from pivotrl.doctor.turns import check_turns
from pivotrl.launching.render import load_target
from pivotrl.pipeline import default_run

SAMPLE_SIZE = 64
"""Expert turns that are rendered, parsed and judged."""
TORCHRUN_PORT = 29500
"""Where torchrun's processes meet unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for."""

    recipe: Path
    overrides: Sequence[str]
    run: Path | None
    """None: the recipe's default run directory."""
    cluster: Path | None
    """A file of launch/clusters, whose hardware file counts, or of configs/clusters."""
    model: Path | None
    """Describes a model whose checkpoint is elsewhere."""
    is_static: bool
    """Only what the recipe's own files tell: no data, no checkpoint, no machine."""
    sample_size: int = SAMPLE_SIZE
    port: int = TORCHRUN_PORT


@dataclass(frozen=True, slots=True)
class Target:
    """Where the run is to be launched, as far as it was said."""

    cluster: ClusterFile | None
    hardware: ClusterConfig | None


def examine(request: Request) -> Findings:
    """Runs every check.

    Raises:
        UserError: for a cluster or model file that cannot be read: these are the command's own words, not the recipe's.
    """
    findings = Findings()
    target = _target(request.cluster) if request.cluster is not None else Target(None, None)
    with findings.refused_by("recipe", str(request.recipe)):
        loaded = load_recipe(request.recipe, request.overrides)
        _examine(loaded, request, target, findings)
    return findings


def _examine(loaded: LoadedRecipe, request: Request, target: Target, findings: Findings) -> None:
    run = request.run or default_run(loaded)
    check_settings(loaded, findings)
    if target.cluster is not None:
        check_jobs(loaded, target.cluster, run, findings)
    checkpoint = build.start_checkpoint(loaded, run)
    config = model_config(loaded, checkpoint, request.model, findings)
    if config is None:
        findings.not_checked["layout, memory and cost"] = "nothing here describes the model; give --model FILE"
    else:
        check_context(loaded, config, findings)
        if target.hardware is None:
            check_without_cluster(loaded, config, findings)
        else:
            check_on_cluster(loaded, config, target.hardware, findings)
        if target.cluster is not None:
            check_conversion(loaded, config, target.cluster, target.hardware, findings)
    if request.is_static:
        findings.not_checked["data, checkpoint and machine"] = "--static"
        _check_template(loaded, run, findings)
        count_turns(loaded, None, findings)
        return
    check_packages(loaded, findings)
    check_port(request.port, findings)
    if config is not None:
        check_disk(loaded, run, config, findings)
    with jobs_environment(loaded, target.cluster):
        if all(one.check != "environment" for one in findings.found):
            check_judges(loaded, run, findings)
        check_checkpoint(loaded, checkpoint, config, findings)
        check_environment(loaded, run, findings)
        seen = _check_data(loaded, run, request, findings)
        if seen is not None:
            _check_path(loaded, run, checkpoint, config, seen, findings)
    count_turns(loaded, None if seen is None else seen.candidates.total(), findings)


def _target(path: Path) -> Target:
    """What a file says: one of configs/clusters describes nodes, one of launch/clusters names such a file, or none where it has no GPUs."""
    if "gpus_per_node" in load_keys(path):
        return Target(None, load_section(ClusterConfig, file=path))
    found = load_target(path)
    return Target(found.cluster, found.hardware)


def _check_template(loaded: LoadedRecipe, run: Path, findings: Findings) -> None:
    with findings.refused_by("template", place(loaded, "render.chat_template")):
        build.chat_template(loaded, run)


def _check_data(loaded: LoadedRecipe, run: Path, request: Request, findings: Findings) -> Seen | None:
    recipe = loaded.recipe
    if "ingest" not in recipe.stages:
        findings.not_checked["data"] = "the recipe reads no trajectories"
        return None
    absent = [path for path in recipe.ingest.paths if not loaded.expand(path, run).exists()]
    if recipe.world is not None and absent and all("{run}" in path for path in absent):
        findings.not_checked["data"] = "the run makes them, and they are not there yet"
        return None
    config = recipe.ingest
    named = {"tools": config.tools, "decontamination": config.decontamination}
    config = config.model_copy(update={key: str(loaded.expand(path, run)) for key, path in named.items() if path is not None})
    with findings.refused_by("data-missing", place(loaded, "ingest.paths")):
        paths = build.expand_all(loaded, run, recipe.ingest.paths)
        seen = check_data(config, paths, findings, run_seed=recipe.seed, sample_size=request.sample_size)
        _check_amount(loaded, seen, findings)
        return seen
    return None


def _check_amount(loaded: LoadedRecipe, seen: Seen, findings: Findings) -> None:
    recipe, num_train = loaded.recipe, seen.candidates["train"]
    if 0 < num_train < recipe.train.pivots_per_step:
        findings.error(
            "too-few-pivots",
            f"the data give {num_train:,} training turns and train.pivots_per_step is {recipe.train.pivots_per_step}",
            where=place(loaded, "train.pivots_per_step"),
            rule="a step takes that many different pivots, and selection leaves fewer than there are turns",
            fix="lower train.pivots_per_step or give more data",
        )
    if num_train and not seen.candidates["held_out"] and recipe.ingest.held_out_frac > 0:
        findings.warn(
            "held-out",
            f"ingest.held_out_frac is {recipe.ingest.held_out_frac:g} and no task of the data falls into that share",
            where=place(loaded, "ingest.held_out_frac"),
            rule="whole tasks are held out, by hash of their id",
            fix="raise it, or give data with more tasks",
        )


def _check_path(loaded: LoadedRecipe, run: Path, checkpoint: Path, config: object, seen: Seen, findings: Findings) -> None:
    """Template, tokenizer, action format and verifier on the sampled turns."""
    renderer = verifier = None
    if any(one.check == "checkpoint-config" for one in findings.found):
        findings.not_checked["template, action format and verifier"] = "the checkpoint's config.json is refused"
    elif checkpoint.is_dir():
        with findings.refused_by("template", place(loaded, "render.chat_template")):
            renderer = build.renderer(loaded, run, checkpoint)
    else:
        findings.not_checked["template, action format and verifier"] = "the checkpoint, which has the tokenizer, is not there"
    if not any(one.check in ("judge", "environment") for one in findings.found):
        with findings.refused_by("verifier", place(loaded, "verifier.type")):
            verifier = build.verifier(loaded, run)
    if renderer is None:
        return
    num_tokens, vocabulary = len(renderer.template.tokenizer), getattr(config, "vocab_size", None)
    if vocabulary is not None and num_tokens > vocabulary:
        findings.error(
            "tokenizer",
            f"the tokenizer has {num_tokens:,} tokens and the model's vocab_size is {vocabulary:,}",
            where=str(checkpoint),
            rule="every token needs a row of the embedding",
            fix="copy tokenizer and weights from one place",
        )
    elif verifier is None:
        findings.not_checked["action format and verifier"] = "the verifier cannot be built"
    else:
        check_turns(seen.sample, loaded.recipe, renderer, verifier, findings)
