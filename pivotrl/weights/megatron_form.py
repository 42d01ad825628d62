"""A checkpoint in megatron-core's torch_dist form, converted once to a Hugging Face directory.

Called by the `model` stage for recipes with `model.type: megatron`. The conversion is `pivotrl convert` in a process of its own: it takes one
process group of one process, which the trainer that follows must not meet, and its memory is free before that trainer starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pivotrl.child_process import own_environment
from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id


def inputs(source: Path, description: Path | None) -> Mapping[str, str]:
    """Content hashes of the weights and of what describes them, by name.

    Args:
        description: a Hugging Face directory of the same architecture, or None where `source` has its own.

    Raises:
        UserError: where one of them is no directory.
    """
    return {name: _content(path) for name, path in (("weights", source), ("description", description)) if path is not None}


def convert(source: Path, description: Path | None, out: Path) -> None:
    """Writes `out`, whole or not at all; does nothing where it is there.

    Raises:
        UserError: where the conversion was refused, which it has then explained on standard error.
    """
    if out.exists():
        return
    command = [sys.executable, "-m", "pivotrl", "convert", "--from", "megatron", "--to", "hf", str(source), str(out)]
    command += [] if description is None else ["--config", str(description)]
    code = subprocess.run(command, env=own_environment(), stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise UserError(
            f"{source} could not be converted (exit code {code})",
            rule="model.type megatron takes what `pivotrl convert --from megatron` takes",
            fix="see the lines above, and docs/convert.md",
        )


def _content(directory: Path) -> str:
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not a directory", rule="model.path and model.hf_path name checkpoint directories", fix="correct the path in the recipe"
        )
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return content_id({str(path.relative_to(directory)): file_id(path) for path in files})
