"""`pivotrl audit`: finds the expert turns of whatever the user names, audits a verifier on them, writes audit.json and one HTML page.

The wiring only: the audit itself is in verifiers/audit/, the page in observability/audit_page.py. Called by cli.py.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pivotrl.build_verifiers import build_verifier
from pivotrl.config.load import load_verifier
from pivotrl.config.schema import IngestConfig
from pivotrl.errors import UserError
from pivotrl.identity import file_id
from pivotrl.progress import progress_bar
from pivotrl.rundir import Stage, output_hash, write_json
from pivotrl.types import Domain
from pivotrl.verifiers.audit.measure import Audit
from pivotrl.verifiers.audit.turns import ExpertTurn, count_turns, labelled_turns, quarantine_reasons, stored_turns
from pivotrl.verifiers.labelled import LabelledPair, is_labelled_file, read_pairs

RESULT = "audit.json"
_DOMAINS_RULE = f"turns have one of the domains {', '.join(Domain)}, labelled pairs may have others"


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What the command line asked for."""

    data: Path
    """An ingest directory, a run, a file of labelled pairs, or trajectories in any supported format."""
    verifier: str
    """The `type` of the verifier."""
    overrides: Sequence[str]
    """Its settings, key=value."""
    against: str | None
    """A second verifier with its settings in one string, or None."""
    labelled: Path | None
    """Labelled pairs to measure precision and recall with, or None."""
    limit: int | None
    """Audit a sample of that many turns; None audits all."""
    domain: str | None
    """Audit turns and pairs of this domain alone; None audits all."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The turns of the named data."""

    total: int
    turns: Iterable[ExpertTurn]
    pairs: Sequence[LabelledPair]
    inputs: dict[str, str]
    """Content hash of what was read, by name."""


def run_audit(request: AuditRequest, out: Path) -> int:
    """Audits, writes `out`, prints the tables; returns the number of expert actions that were neither accepted nor quarantined.

    Raises:
        UserError: for data that cannot be read, or a verifier that does not exist or lacks a setting.
    """
    from pivotrl.observability.audit_page import PAGE, print_audit, write_page

    config = load_verifier(request.verifier, request.overrides)
    against = None if request.against is None else _second(request.against)
    audit = Audit(build_verifier(config, expand=Path), None if against is None else build_verifier(against, expand=Path))
    with _source(request) as source:
        if not source.total and not source.pairs:
            raise UserError(
                f"{request.data} holds no expert turn", rule="an audit needs candidates or labelled pairs", fix="see the audit.json of its ingest"
            )
        _feed(audit, source, request.domain)
        inputs = source.inputs
    if not audit.num_judged:
        raise UserError(f"{request.data} holds nothing of the domain {request.domain}", rule=_DOMAINS_RULE, fix="leave --domain out, or correct it")
    settings = {
        "verifier": config.model_dump(mode="json"),
        "against": None if against is None else against.model_dump(mode="json"),
        "limit": request.limit,
        "domain": request.domain,
    }
    result = {**settings, "data": request.data.name, **audit.result()}
    stage = Stage.reopen(out.parent, out.name, config=settings, inputs=inputs, seed=0)
    write_json(out / RESULT, result)
    write_page(out, result)
    stage.finish(outputs=[RESULT, PAGE], summary={"expert": result["expert"]["accepted"], "num_rejected": audit.num_unexplained})
    print_audit(result)
    sys.stderr.write(f"audit: {out / PAGE}\n")
    return audit.num_unexplained


def _second(words: str) -> Any:
    try:
        name, *overrides = shlex.split(words)
    except ValueError as error:
        raise UserError(f"--against is {words!r}: {error}", rule="it is a verifier's name and its settings in one word", fix=_AGAINST) from error
    return load_verifier(name, overrides)


_AGAINST = 'write for example --against "tool_call message=exact"'


def _feed(audit: Audit, source: _Source, domain: str | None) -> None:
    with progress_bar("audit", source.total, "turns") as bar:
        for turn in source.turns:
            if domain in (None, turn.domain):
                audit.add_turn(turn)
            bar.advance(1)
    for pair in source.pairs:
        if domain in (None, pair.domain):
            audit.add_pair(pair)


@contextmanager
def _source(request: AuditRequest) -> Iterator[_Source]:
    """The data that the path names, whatever kind it is; trajectories are ingested into a directory that does not outlive the audit."""
    data = request.data
    if not data.exists():
        raise UserError(f"{data} does not exist", rule="DATA is an ingest directory, a run, labelled pairs or trajectories", fix="correct the path")
    pairs = read_pairs(request.labelled) if request.labelled is not None else []
    inputs = {"labelled": file_id(request.labelled)} if request.labelled is not None else {}
    if is_labelled_file(data):
        own = read_pairs(data)
        turns = labelled_turns(own)[: request.limit]
        yield _Source(len(turns), turns, [*own, *pairs], {**inputs, "data": file_id(data)})
    elif Stage.is_done(data, "ingest"):
        yield _stored(data / "ingest", quarantine_reasons(data), request.limit, pairs, inputs)
    elif Stage.is_done(data.parent, data.name) and (data / "candidates.parquet").is_file():
        yield _stored(data, {}, request.limit, pairs, inputs)
    else:
        with tempfile.TemporaryDirectory(prefix="pivotrl-audit-") as scratch:
            yield _stored(_ingested(data, Path(scratch)), {}, request.limit, pairs, inputs)


def _stored(ingest_dir: Path, quarantined: dict[str, str], limit: int | None, pairs: Sequence[LabelledPair], inputs: dict[str, str]) -> _Source:
    turns = stored_turns(ingest_dir, quarantined, limit)
    return _Source(count_turns(ingest_dir, limit), turns, pairs, {**inputs, "data": output_hash(ingest_dir)})


def _ingested(data: Path, scratch: Path) -> Path:
    from pivotrl.trajectories.ingest import ingest_inputs, run_ingest

    config = IngestConfig(paths=(str(data),), held_out_frac=0.0)
    stage = Stage.open(scratch, "ingest", config={}, inputs=ingest_inputs(config, [data]), seed=0)
    run_ingest(stage, config, paths=[data], run_seed=0)
    return stage.path
