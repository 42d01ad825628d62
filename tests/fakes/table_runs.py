"""Invented run directories of several arms and seeds, with the files that `pivotrl tables` reads, and a specification of them.

Outcomes are drawn from a named rate per arm, domain and seed, so that tests can count them again from the files.
"""

from __future__ import annotations

import random
from pathlib import Path

import yaml

from pivotrl.identity import derive_seed
from pivotrl.rundir import Stage, write_json, write_jsonl

DOMAINS, SEEDS = ("desk", "shell"), (0, 1)
# Share of tasks solved: (in domain, arithmetic, code tracing).
RATES = {"base": (0.4, 0.8, 0.7), "sft": (0.6, 0.5, 0.4), "pivotrl": (0.8, 0.8, 0.6), "random": (0.65, 0.75, 0.7), "strict": (0.5, 0.8, 0.7)}
NUM_TASKS, NUM_ATTEMPTS, NUM_QUESTIONS = 12, 2, 10


def write_arm(run: Path, arm: str, seed: int, *, checkpoints: tuple[str, ...] = ("trained",), curve: tuple[float, ...] = ()) -> None:
    """RUN/eval with the unit files of `world` and `skills`, and RUN/train and RUN/profile where there is a curve.

    Args:
        curve: accuracy at steps 0, 10, 20, ...; 64 turns and 2 seconds a step, 500 turns and 30 seconds of profiling.
    """
    stage = Stage.open(run, "eval", config={}, inputs={"arm": arm}, seed=3)
    (stage.path / "units").mkdir()
    for checkpoint in checkpoints:
        draw = random.Random(derive_seed(seed, "table_runs", run.parent.name, arm, checkpoint))
        rates = RATES["base" if checkpoint == "reference" else arm]
        world = [
            {"item": f"task-{task}#{attempt}", "cluster": f"task-{task}", "facet": ("refund", "exchange")[task % 2]}
            | {"score": float(draw.random() < rates[0]), "num_turns": 4, "is_well_formed": True}
            for task in range(NUM_TASKS)
            for attempt in range(NUM_ATTEMPTS)
        ]
        skills = [
            {"item": f"{skill}#{index}", "cluster": f"{skill}#{index}", "facet": skill}
            | {"score": float(draw.random() < rate), "num_turns": 1, "is_well_formed": True}
            for skill, rate in zip(("arithmetic", "tracing"), rates[1:], strict=True)
            for index in range(NUM_QUESTIONS)
        ]
        for suite, items in (("world", world), ("skills", skills)):
            write_json(stage.path / "units" / f"{suite}-{checkpoint}.json", {"items": items, "samples": []})
    stage.finish(outputs=[], summary={})
    if curve:
        write_training(run, arm, curve)


def write_training(run: Path, arm: str, curve: tuple[float, ...]) -> None:
    """RUN/train as the loop leaves it, and RUN/profile's cost."""
    (run / "train").mkdir()
    num_steps = 10 * (len(curve) - 1)
    spread = 0.4 if arm == "pivotrl" else 0.2
    write_jsonl(
        run / "train" / "metrics.jsonl",
        ({"step": step, "rollout/reward/std": spread - 0.002 * step, "perf/env_turns/sum": 64 * (step + 1)} for step in range(num_steps)),
    )
    spans = {"time/rollout_s/sum": 1.0, "time/train_s/sum": 0.75, "time/sync_s/sum": 0.25}
    write_jsonl(run / "train" / "timing.jsonl", ({"step": step, **spans} for step in range(num_steps)))
    write_jsonl(run / "train" / "validation.jsonl", ({"step": 10 * index, "value": value, "n": 40} for index, value in enumerate(curve)))
    profile = Stage.open(run, "profile", config={}, inputs={}, seed=0)
    profile.finish(outputs=[], summary={"cost": {"turns": 500}})
    write_json(profile.path / "timing.json", {"wall_s": 30.0})


def write_evidence(root: Path) -> Path:
    """Five arms with two seeds on two domains below `root`, and the specification, whose path is returned."""
    for seed in SEEDS:
        for domain in DOMAINS:
            write_arm(root / domain / f"pivotrl-{seed}", "pivotrl", seed, checkpoints=("reference", "trained"), curve=(0.4, 0.6 + 0.02 * seed, 0.8))
            write_arm(root / domain / f"sft-{seed}", "sft", seed)
            write_arm(root / domain / f"random-{seed}", "random", seed, curve=(0.4, 0.45, 0.5))
            write_arm(root / domain / f"strict-{seed}", "strict", seed)
            write_training_only(root / domain / f"episodes-{seed}", seed)
    spec = root / "spec.yaml"
    spec.write_text(yaml.safe_dump(specification()))
    return spec


def write_training_only(run: Path, seed: int) -> None:
    """The end-to-end arm: a slower curve, and an eval so that it counts as a run."""
    write_arm(run, "random", seed, curve=(0.4, 0.4, 0.5, 0.6, 0.7))


def specification() -> dict:
    """Every table, over the runs of `write_evidence`."""
    every = {"domains": list(DOMAINS), "seeds": list(SEEDS)}
    arms = [{"type": "run", "arm": arm, **every, "path": "{domain}/{arm}-{seed}"} for arm in ("sft", "pivotrl", "random", "strict", "episodes")]
    return {
        "name": "Invented evidence",
        "root": "{spec}",
        "domains": [{"name": "desk", "title": "order desk", "paper": "tau2-bench"}, {"name": "shell", "title": "tiny shell"}],
        "results": [{"type": "run", "arm": "base", **every, "path": "{domain}/pivotrl-{seed}", "checkpoint": "reference"}, *arms],
        "main": {"base": "base", "sft": "sft", "pivotrl": "pivotrl"},
        "out_of_domain": {"benchmarks": [{"name": "arithmetic", "title": "arithmetic", "paper": "MATH500"}, {"name": "tracing", "title": "tracing"}]},
        "ablation": {
            "domain": "desk",
            "rows": [
                {"arm": "pivotrl", "title": "full", "paper": "full"},
                {"arm": "random", "title": "random turns", "paper": "without the pivot filter"},
                {"arm": "strict", "title": "pivots + strict reward"},
            ],
        },
        "families": {
            "domain": "desk",
            "rows": [{"arm": "base", "title": "base", "paper": "base"}, {"arm": "pivotrl", "title": "PivotRL", "paper": "pivots"}],
        },
        "efficiency": {"domains": list(DOMAINS), "pivotrl": "pivotrl", "end_to_end": "episodes"},
        "spread": {"domains": ["desk"], "pivots": "pivotrl", "random": "random"},
        "sensitivities": [
            {"name": "k", "title": "K", "domain": "desk", "reference": "pivotrl"}
            | {"points": [{"value": "4", "arm": "random"}, {"value": "16", "arm": "pivotrl"}]}
        ],
    }


def write_curve(run: Path, rates: tuple[float, ...], seed: int) -> None:
    """RUN/train/curve.jsonl: steps 0, 10, ... with every attempt; a task that a lower rate solves is solved by a higher one."""
    rows = []
    for index, rate in enumerate(rates):
        draw = random.Random(derive_seed(seed, "curve", run.parent.name))
        items = [
            {"item": f"task-{task}#{attempt}", "cluster": f"task-{task}", "facet": "refund", "score": int(draw.random() < rate), "num_turns": 4}
            for task in range(NUM_TASKS)
            for attempt in range(NUM_ATTEMPTS)
        ]
        rows.append({"step": 10 * index, "value": sum(item["score"] for item in items) / len(items), "items": items})
    write_jsonl(run / "train" / "curve.jsonl", rows)


def write_page_runs(root: Path) -> Path:
    """The runs of `write_evidence` with curves of single attempts, and the specification of a page of evidence, whose path is returned."""
    write_evidence(root)
    for seed in SEEDS:
        for domain in DOMAINS:
            write_curve(root / domain / f"pivotrl-{seed}", (0.2, 0.6, 0.8), seed)
            write_curve(root / domain / f"episodes-{seed}", (0.2, 0.3, 0.4, 0.5, 0.7), seed)
    page = {"num_resamples": 400, "pairs": "shared"}
    arms = {"full": "pivotrl", "random_functional": "random", "random_strict": "strict", "pivots_strict": "sft"}
    spec = {**specification(), **page, "hypotheses": {"domain": "desk", **arms}}
    spec["efficiency"]["curve"] = "train/curve.jsonl"
    rows = [{"arm": arm, "title": arm} for arm in ("pivotrl", "sft")]
    spec["exploratory"] = [{"name": "sides", "title": "Side by side", "domains": list(DOMAINS), "rows": rows}]
    file = root / "page.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file
