"""The formats by name, and which one a file is of: exactly one adapter may claim a file.

Adapters are imported when asked for. Called by `ingest.py` and by the command line for ``--format``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence

from pivotrl.errors import UserError
from pivotrl.trajectories.source import Adapter, Probe, RowQuarantined

AUTO = "auto"
FORMATS = (
    "tau2",
    "tau_bench",
    "agentdojo",
    "swe_agent",
    "swe_smith",
    "mini_swe_agent",
    "openhands",
    "terminus2",
    "chatml_tools",
    "verifiers",
    "nemo_gym",
    "sharegpt",
    "codex",
    "atif",
    "openai_chat",
)
"""Every format, in the order in which the audit lists them. Each is the module ``adapters/<name>.py`` with an instance ``ADAPTER``."""


def adapter(name: str) -> Adapter:
    """The adapter of a format.

    Raises:
        UserError: for a name that is no format.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, (*FORMATS, AUTO), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use `auto` to detect the format of each file"
        raise UserError(f"format {name!r} is unknown", rule=f"a format is one of {', '.join((AUTO, *FORMATS))}", fix=hint)
    return importlib.import_module(f"pivotrl.trajectories.adapters.{name}").ADAPTER


def all_adapters() -> tuple[Adapter, ...]:
    """Every adapter, in the order of `FORMATS`."""
    return tuple(adapter(name) for name in FORMATS)


def detect(probe: Probe, adapters: Sequence[Adapter]) -> Adapter:
    """The one adapter that claims the file.

    Raises:
        RowQuarantined: where none does, or more than one.
    """
    claims: list[Adapter] = []
    failures: list[str] = []
    for candidate in adapters:
        try:
            if candidate.sniff(probe):
                claims.append(candidate)
        # One adapter that trips over a hostile file must not take the file from the others.
        except Exception as error:  # noqa: BLE001
            failures.append(f"{candidate.name} ({type(error).__name__})")
    if len(claims) == 1:
        return claims[0]
    if claims:
        names = " and ".join(claim.name for claim in claims)
        raise RowQuarantined(f"ambiguous format: {names} both claim it; name one with --format", file=probe.name)
    keys = f", first keys {', '.join(map(repr, list(probe.first_row)[:6]))}" if isinstance(probe.first_row, dict) else ""
    failed = f"; failed to look: {', '.join(failures)}" if failures else ""
    raise RowQuarantined(f"unknown format: none of {len(adapters)} formats claims it{keys}{failed}", file=probe.name)
