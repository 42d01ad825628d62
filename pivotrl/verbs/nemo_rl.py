"""The verb `export-nemo-rl`: a recipe and its run to a NeMo-RL configuration, NeMo-Gym rows and a table of what differs.

The mapping is in pivotrl/gym/nemo_rl.py. Called by cli.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from pivotrl import build
from pivotrl.config.load import LoadedRecipe
from pivotrl.gym.nemo_rl import BASE, ROWS, Line, as_config, check_exportable, known_keys, lines_of, without_equivalent
from pivotrl.rundir import Stage, atomic_write
from pivotrl.verbs.gym import run_export

CONFIG, DIFFERENCES = "grpo.yaml", "differences.md"


def run_export_nemo_rl(loaded: LoadedRecipe, run: Path, out: Path) -> None:
    """Writes OUT/train.jsonl, OUT/grpo.yaml and OUT/differences.md, the last two only once the rows are there.

    Raises:
        UserError: for a recipe that does not start from a checkpoint, or a run whose pivots are not selected.
    """
    check_exportable(loaded.recipe)
    Stage.require(run, "select")
    model = build.reference_checkpoint(loaded, run)
    out.mkdir(parents=True, exist_ok=True)
    run_export(run, out / ROWS, agent=None)
    lines = lines_of(loaded.recipe, model=str(model.resolve()), rows=(out / ROWS).resolve())
    differing = without_equivalent(loaded.recipe)
    head = (
        f"# {loaded.recipe.name} for NeMo-RL, written by `pivotrl export-nemo-rl`. Extends its {BASE}; {DIFFERENCES} says what has no equivalent.\n"
    )
    atomic_write(out / CONFIG, (head + yaml.safe_dump(as_config(lines), sort_keys=False)).encode())
    atomic_write(out / DIFFERENCES, differences_page(loaded.recipe.name, lines, differing).encode())
    sys.stdout.write(f"{len(lines)} keys, {len(differing)} without equivalent; {out}\n")


def differences_page(name: str, lines: list[Line], differing: dict[str, str]) -> str:
    """Markdown: what has no equivalent, then every key with where its name and its value come from."""
    known = known_keys()
    page = [f"# {name} in NeMo-RL", "", "Not run there. What this recipe says and that configuration cannot:", "", "| key | there |", "|---|---|"]
    page += [f"| `{key}` | {reason} |" for key, reason in differing.items()]
    page += ["", "Every key of grpo.yaml:", "", "| NeMo-RL | value | from | name seen in |", "|---|---|---|---|"]
    page += [f"| `{line.theirs}` | `{line.value}` | {line.ours} | {known[line.theirs]} |" for line in lines]
    return "\n".join(page) + "\n"
