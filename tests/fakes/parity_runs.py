"""A run on a tiny checkpoint that has done all before `train`, and its recipes: what the tests of the parity gate's command share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from fakes.tiny_tokenizer import save_checkpoint, tiny_tokenizer
from fakes.trainer_batches import hf_model

from pivotrl import pipeline

ROOT = Path(__file__).resolve().parents[2]
_TEMPLATE = ROOT / "recipes" / "quickstart" / "chat_template.jinja"
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"type": "transformers", "batch_size": 32},
    "vllm": {"type": "vllm", "kv_cache_bytes": 64 << 20, "max_num_seqs": 16},
}
_RECIPE: dict[str, Any] = {
    "name": "parity",
    "seed": 3,
    "num_threads": 1,
    "world": {
        "type": "order_desk",
        "num_train_tasks": 8,
        "num_test_tasks": 2,
        "num_pretraining_episodes": 2,
        "num_skill_examples": 2,
        "noise": 0.0,
    },
    "ingest": {"paths": ["{run}/world/expert.jsonl"], "near_duplicate_threshold": 1.0, "held_out_frac": 0.1},
    "render": {"action_format": "hermes", "chat_template": str(_TEMPLATE), "history_reasoning": "drop", "max_prompt_tokens": 200},
    "sampling": {"temperature": 0.8, "max_new_tokens": 8, "truncated": "zero"},
    # A random model's actions earn nothing: a verifier of text gives groups with some variance at least.
    "verifier": {"type": "tool_call", "message": "any"},
    "profile": {"num_samples": 2, "max_candidates": 8, "unit_candidates": 8},
    "select": {"rule": "all"},
    "train": {
        "num_steps": 5,
        "pivots_per_step": 2,
        "group_size": 2,
        "advantage": "mean_std",
        "aggregation": "action",
        "clip": {"low": 0.2, "high": 0.2},
        "kl": {"beta": 0.1},
        "optimizer": {"lr": 1.0e-2},
        "micro_batch_tokens": 2048,
        "checkpoint_every": 2,
        "parity": {"max_logprob_difference": 1.0e-3, "every_steps": 2, "num_pivots": 2, "num_samples": 2},
    },
    "eval": {"suites": [{"type": "held_out", "num_candidates": 1, "num_samples": 1}]},
}


def tiny_checkpoint(directory: Path, family: str, *, seed: int = 0) -> Path:
    """A random model of the family with a tokenizer, of sizes that vLLM's kernels for a CPU take."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "max_position_embeddings": 1024}
    hf_model(family, seed=seed, vocab_size=len(tiny_tokenizer()), **sizes).save_pretrained(directory)
    return save_checkpoint(directory, chat_template=None)


def write_recipe(folder: Path, checkpoint: Path, engine: str = "transformers") -> Path:
    """A recipe folder on a checkpoint."""
    folder.mkdir(parents=True)
    recipe = {**_RECIPE, "model": {"type": "huggingface", "path": str(checkpoint)}, "engine": ENGINES[engine]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def prepare_run(folder: Path, family: str) -> Path:
    """FOLDER/run with finished stages up to `select`, FOLDER/hf and FOLDER/<engine> with recipes; returns FOLDER."""
    tiny_checkpoint(folder / "hf", family)
    recipes = {engine: write_recipe(folder / engine, folder / "hf", engine) for engine in ENGINES}
    loaded = pipeline.load(recipes["transformers"], [])
    for stage in ("ingest", "profile", "select"):
        pipeline.run_stage(stage, loaded, folder / "run")
    return folder


def copied_run(prepared: Path, run: Path) -> Path:
    """A copy of the prepared run."""
    return Path(shutil.copytree(prepared / "run", run))
