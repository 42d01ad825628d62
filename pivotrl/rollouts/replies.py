"""Answers between processes: an error becomes a message, and the message raises it again at the other end.

Kinds that callers tell apart keep their type; anything else arrives as a bug with its traceback. Used by an engine's process towards the trainer
(replica.py, connected.py) and by vLLM's workers towards the engine's process (vllm_workers.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from pivotrl.errors import UserError
from pivotrl.rollouts.engine import EngineError, is_out_of_memory


class Aborted(RuntimeError):
    """The sender gave up in the middle of a hand-over."""


def error_reply(error: Exception) -> dict[str, Any]:
    """The message for an error; `result_of` raises it.

    >>> error_reply(ValueError("tensor 'w' is missing"))
    {'error': 'value', 'message': "tensor 'w' is missing"}
    """
    if isinstance(error, UserError):
        return {"error": "user", "problem": error.problem, "rule": error.rule, "fix": error.fix}
    if isinstance(error, EngineError) or is_out_of_memory(error):
        return {"error": "engine", "message": str(error) or "out of memory"}
    if isinstance(error, ValueError):
        return {"error": "value", "message": str(error)}
    if type(error) in (RuntimeError, Aborted):
        return {"error": "runtime", "message": str(error)}
    return {"error": "bug", "message": "".join(traceback.format_exception(error))}


def result_of(reply: Mapping[str, Any]) -> Any:
    """What "ok" holds.

    Raises:
        UserError, EngineError, ValueError, RuntimeError: as the other end raised them.
    """
    match reply.get("error"):
        case None:
            return reply["ok"]
        case "user":
            raise UserError(reply["problem"], rule=reply["rule"], fix=reply["fix"])
        case "engine":
            raise EngineError(reply["message"])
        case "value":
            raise ValueError(reply["message"])
        case "runtime":
            raise RuntimeError(reply["message"])
        case _:
            raise RuntimeError(f"an engine's process failed:\n{reply['message']}")
