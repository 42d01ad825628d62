"""The layer comparison again, by a trainer of one process: whether the layout or the model's code is at fault.

`python -m pivotrl.training.parity_child FOLDER`, started by training/parity_layers.py outside the run's process group. FOLDER holds hf/ (the
export) and tokens.json; the first place that differs, or null, is written to place.json there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pivotrl.child_process import own_environment
from pivotrl.rundir import read_json, write_json

_TOKENS, _PLACE = "tokens.json", "place.json"


def place_in_one_process(folder: Path, token_ids: Sequence[int]) -> str | None:
    """The first place that differs in a trainer of one process on FOLDER/hf; None where none does.

    Raises:
        CalledProcessError: where one process cannot hold the model, or fails otherwise.
    """
    write_json(folder / _TOKENS, {"token_ids": list(token_ids)})
    command = [sys.executable, "-m", "pivotrl.training.parity_child", str(folder)]
    subprocess.run(command, env=own_environment(), check=True, stdout=sys.stderr)
    return read_json(folder / _PLACE)["place"]


def main(folder: Path) -> None:
    """Compares and writes the place."""
    from pivotrl.config.schema import MoeConfig, ParallelConfig
    from pivotrl.megatron.trainer import Trainer
    from pivotrl.training.parity_layers import first_difference, load_model

    alone = Trainer.from_hf(folder / "hf", optimizer=None, parallel=ParallelConfig(), moe=MoeConfig(), num_steps=1, seed=0, with_reference=False)
    model, tolerance = load_model(folder / "hf")
    token_ids = read_json(folder / _TOKENS)["token_ids"]
    difference = first_difference(alone.layer_outputs(token_ids), model, token_ids, tolerance)
    write_json(folder / _PLACE, {"place": difference.place if difference else None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
