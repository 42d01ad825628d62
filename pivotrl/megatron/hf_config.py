"""Reading a checkpoint directory's config.json as it is, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError

CONFIG = "config.json"


def read_config(checkpoint_dir: Path) -> dict[str, Any]:
    """Content of config.json.

    Raises:
        UserError: where the directory has none, or one that is no JSON object.
    """
    if not (checkpoint_dir / CONFIG).is_file():
        raise UserError(
            f"{checkpoint_dir} has no {CONFIG}",
            rule="a checkpoint in Hugging Face form is a directory with config.json, *.safetensors and tokenizer files",
            fix="give the path of such a directory",
        )
    # Published hybrids hold a bare Infinity, which is no JSON; transformers writes it like this.
    try:
        content = json.loads((checkpoint_dir / CONFIG).read_text(encoding="utf-8"), parse_constant=lambda name: {"__float__": name})
    except ValueError as error:
        raise UserError(f"{checkpoint_dir / CONFIG} is no JSON ({error})", rule="it describes the model", fix="copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise UserError(f"{checkpoint_dir / CONFIG} holds no object", rule="it describes the model by key", fix="copy the checkpoint again")
    return content
