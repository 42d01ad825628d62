"""A twin run whole, as production runs: the SFT recipe, its result scored, then PivotRL from its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.judge_server import Reply, shown
from fakes.twins import data_file, write_twin

from pivotrl import pipeline
from pivotrl.megatron.conversion import Form, convert
from pivotrl.megatron.conversion import Request as Conversion
from pivotrl.rundir import read_json, read_jsonl

SAME = "VERDICT: SAME"


@dataclass(frozen=True, slots=True)
class Finished:
    """A twin that ran whole."""

    family: str
    domain: str
    recipe: Path
    words: list[str]
    """What production leaves to the command line: data and checkpoint."""
    reference: Path
    """SFT's checkpoint, pi_0."""
    run: Path


def run_whole(root: Path, family: str, domain: str, weights: Path) -> Finished:
    """Both recipes, every stage of each, in this process. `terminal` wants a judge at PIVOTRL_JUDGE_ENDPOINT."""
    paths = f"ingest.paths=[{data_file(domain)}]"
    sft = write_twin(root / "recipe_sft", family, domain, is_sft=True)
    run_stages(sft, root / "sft", [paths, f"model.path={weights}"], "ingest", "sft", "eval", "report")
    reference = root / "sft" / "sft" / "hf"
    recipe, words = write_twin(root / "recipe", family, domain, is_sft=False), [paths, f"model.path={reference}"]
    run_stages(recipe, root / "run", words, "ingest", "profile", "select", "train", "eval", "report")
    return Finished(family, domain, recipe, words, reference, root / "run")


def run_stages(recipe: Path, run: Path, words: Sequence[str], *stages: str) -> None:
    loaded = pipeline.load(recipe, words)
    for stage in stages:
        pipeline.run_stage(stage, loaded, run)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of each training step."""
    return [row for row in read_jsonl(run / "train" / "metrics.jsonl") if "rollout/reward/mean" in row]


def scored_turns(run: Path) -> set[str]:
    """Turns of the held-out suite."""
    return {item["item"] for path in (run / "eval" / "units").glob("held_out-*.json") for item in read_json(path)["items"]}


def verified_tensors(source: Path, out: Path, to: Form, *, config_dir: Path | None) -> int | None:
    """Converts; number of tensors found equal bit for bit after a round trip, logits compared with transformers'."""
    return convert(Conversion(source, out, to, verify=True, config_dir=config_dir, max_shard_bytes=2**30)).num_verified


def opinion(body: Mapping[str, Any]) -> Reply:
    """A judge of the made-up terminal episodes: looking at the same files, whatever with, is the same."""
    first, second = (set(re.findall(r"\w+\.txt", action)) for action in shown(body))
    return Reply(SAME if first == second and first else "VERDICT: DIFFERENT")
