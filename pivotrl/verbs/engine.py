"""The verb `engine`: one rollout engine in this process, at the service of the trainer's process of a run. Called by cli.py.

Also what a trainer starts on its own machine: `python -m pivotrl.verbs.engine SOCKET KEYFILE NAME`. The engine's settings come with the
trainer's first message. A stage of the run ends, the next one begins: the engine of another checkpoint is then built in the same process.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError

if TYPE_CHECKING:
    from pivotrl.config.engines import EngineConfig
    from pivotrl.rollouts.engine import Engine

# Between two attempts to find the trainer, seconds.
_RETRY_S = 2.0


def run_engine(run: Path, config: EngineConfig | None, *, connect: str | None, patience_s: float) -> None:
    """Serves every stage of a run, one after the other.

    Ends where no trainer could be found for `patience_s` seconds, since nobody tells a remote engine that the run is over.

    Args:
        config: the recipe's engine, whose packages are imported while the trainer starts; None where it is not known. The trainer's message decides
            which one is built.
        connect: HOST:PORT of the trainer's process, or None to read it from RUN/engines/address.

    Raises:
        UserError: where no trainer was ever found, or it speaks another version's protocol.
    """
    from pivotrl.build import import_engine
    from pivotrl.rollouts.launchers import ADDRESS, KEY, split_address
    from pivotrl.rollouts.replica import serve
    from pivotrl.rollouts.wire import PeerLost, knock

    if config is not None:
        with contextlib.suppress(UserError):
            # The trainer hears of a package that is missing when it asks for the engine.
            import_engine(config)
    was_found, last_seen_s, reason = False, time.monotonic(), f"{run / 'engines' / ADDRESS} does not exist"
    while time.monotonic() - last_seen_s < patience_s:
        try:
            text = connect or (run / "engines" / ADDRESS).read_text().strip()
            connection = knock(split_address(text, key="--connect"), (run / "engines" / KEY).read_bytes(), name="")
        except (OSError, PeerLost) as error:
            reason = str(error)
            time.sleep(_RETRY_S)
            continue
        if (refusal := serve(connection, build_engine)) is not None:
            raise UserError(refusal, rule="trainer and engines are of one version", fix="install the same version of pivotrl on both")
        was_found, last_seen_s = True, time.monotonic()
    if not was_found:
        raise UserError(
            f"no trainer of {run} was found within {patience_s:g} s ({reason})",
            rule="the trainer's process listens where placement.listen says and writes its address and key below RUN/engines",
            fix="start the run, check that both machines see its directory, or raise --patience",
        )


def build_engine(start: Mapping[str, Any]) -> Engine:
    """The engine of a "start" message; the one place where its settings become objects on this side."""
    import torch
    from pydantic import TypeAdapter

    from pivotrl.build import load_engine
    from pivotrl.config.engines import EngineConfig

    torch.set_num_threads(start["num_threads"])
    config = TypeAdapter[EngineConfig](EngineConfig).validate_python(start["engine"])
    return load_engine(config, Path(start["checkpoint"]), stop_token_ids=start["stop_token_ids"], pad_token_id=start["pad_token_id"])


def _serve_here(socket: str, key_file: str, name: str) -> None:
    # A trainer that SIGTERM asks to stop ends the step it is in, for which it needs this engine; then it closes the connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from pivotrl.rollouts.replica import serve
    from pivotrl.rollouts.wire import knock

    serve(knock(socket, Path(key_file).read_bytes(), name=name), build_engine)


if __name__ == "__main__":
    _serve_here(*sys.argv[1:])
