"""Action formats by the name that `render.action_format` gives."""

from __future__ import annotations

from pivotrl.actions.hermes import HermesFormat
from pivotrl.actions.plain import PlainFormat
from pivotrl.actions.protocol import ActionFormat
from pivotrl.actions.qwen3_coder import Qwen3CoderFormat
from pivotrl.actions.terminus2 import Terminus2Format
from pivotrl.errors import UserError

_FORMATS: dict[str, ActionFormat] = {
    action_format.name: action_format for action_format in (HermesFormat(), Qwen3CoderFormat(), Terminus2Format(), PlainFormat())
}

ACTION_FORMAT_NAMES = tuple(_FORMATS)


def action_format(name: str) -> ActionFormat:
    """The format called `name`.

    Raises:
        UserError: for a name that is not in `ACTION_FORMAT_NAMES`.
    """
    try:
        return _FORMATS[name]
    except KeyError:
        raise UserError(
            f"render.action_format is {name!r}", rule=f"it must be one of {', '.join(ACTION_FORMAT_NAMES)}", fix="use one of these names"
        ) from None
