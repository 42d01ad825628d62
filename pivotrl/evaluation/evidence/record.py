"""The compact record of many runs: of each file that the tables read, its content hash and what they read of it.

`collect` makes it from run directories, `unpack` writes directories again that give every table the same numbers, so that a page can be made from
either. Scores of 0 and 1 are strings of digits beside one shared list of items. The record is JSON under gzip, the same bytes for the same runs.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from pivotrl.config.tables import RunSource, TablesConfig
from pivotrl.errors import UserError
from pivotrl.evaluation.named import UNITS
from pivotrl.evaluation.tables.curves import REWARD_STD, SPANS
from pivotrl.evaluation.tables.sources import run_directory
from pivotrl.identity import canonical_json, content_id, file_id
from pivotrl.observability.sinks import METRICS
from pivotrl.observability.sinks import TIMING as STEP_TIMING
from pivotrl.rundir import MANIFEST, SUCCESS, TIMING, Stage, read_json, read_jsonl, write_json, write_jsonl

SCHEMA_VERSION = 1
# What `pivotrl sweep` leaves below its root.
_SWEEP = "sweep.json"
_COLUMNS = {
    METRICS: (REWARD_STD, "perf/env_turns/sum", "rollout/response_tokens/sum"),
    STEP_TIMING: SPANS,
}
# Of a stage's manifest; the summary's own keys are those of the profile.
_MANIFEST_KEYS = ("seed", "commit", "inputs")
_SUMMARY_KEYS = ("cost", "malformed_frac", "num_profiled")

type Record = dict[str, Any]


def collect(config: TablesConfig, root: Path) -> Record:
    """The record of every finished run that the specification names; runs that are not there are left out.

    A run that sweep.json below the root calls failed, after its second attempt, counts as the base's scores; `stopped` names it with its error.

    Raises:
        UserError: for a source that is no run directory, or a file that is damaged.
    """
    lists: dict[str, list[list[str]]] = {}
    runs: dict[str, dict[str, Any]] = {}
    failed, stopped = _failed(root), dict[str, str]()
    for source in config.results:
        if not isinstance(source, RunSource):
            raise UserError(
                f"the specification has a source of type {source.type!r} ({source.arm})",
                rule="evidence is made from run directories",
                fix="leave that source to `pivotrl tables`",
            )
        for domain in source.domains:
            for seed in source.seeds:
                run = run_directory(root, source, domain, seed)
                name = str(run.relative_to(root))
                if name in runs:
                    continue
                if Stage.is_done(run, "eval"):
                    runs[name] = _run(run, _curve_file(config), lists)
                elif name in failed and (base := _base_run(config, root, domain, seed)) is not None:
                    runs[name] = _as_base(base, lists)
                    stopped[name] = failed[name]
    return {"schema_version": SCHEMA_VERSION, "spec": config.model_dump(mode="json"), "lists": lists, "runs": runs, "stopped": stopped}


def unpack(record: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Writes the runs below `root` and returns the content hashes of the files that they were made from, by path below it."""
    hashes: dict[str, str] = {}
    for name, files in record["runs"].items():
        for file, entry in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, entry, record["lists"])
            hashes[f"{name}/{file}"] = entry["hash"]
        (root / name / "eval" / SUCCESS).touch()
    return hashes


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """The record as a file's bytes."""
    return gzip.compress(canonical_json(record), compresslevel=9, mtime=0)


def from_bytes(data: bytes) -> Record:
    """The record of a file's bytes.

    Raises:
        UserError: where they are no record of this version.
    """
    try:
        record = orjson.loads(gzip.decompress(data))
    except (gzip.BadGzipFile, EOFError, orjson.JSONDecodeError) as error:
        raise UserError(f"the record is damaged ({error})", rule="it is JSON under gzip", fix="restore it, or collect the runs again") from error
    if record["schema_version"] != SCHEMA_VERSION:
        raise UserError(
            f"the record has schema_version {record['schema_version']}", rule=f"this version reads {SCHEMA_VERSION}", fix="collect the runs again"
        )
    return record


def _curve_file(config: TablesConfig) -> str | None:
    return config.efficiency.curve if config.efficiency is not None else None


def _failed(root: Path) -> dict[str, str]:
    """Last error by run, of runs that failed for good; paths are cut to their last part, so that no machine's are published."""
    if not (root / _SWEEP).exists():
        return {}
    records = read_json(root / _SWEEP)["runs"]
    return {name: re.sub(r"/\S*/", "", (one["errors"] or ["no error was noted"])[-1]) for name, one in records.items() if one["status"] == "failed"}


def _base_run(config: TablesConfig, root: Path, domain: str, seed: int) -> Path | None:
    """The finished run that evaluated the base on that domain and seed."""
    name = config.main.base if config.main is not None else None
    sources = [source for source in config.results if isinstance(source, RunSource) and source.arm == name]
    runs = [run_directory(root, source, domain, seed) for source in sources if domain in source.domains and seed in source.seeds]
    return next((run for run in runs if Stage.is_done(run, "eval")), None)


def _as_base(base: Path, lists: dict[str, list[list[str]]]) -> dict[str, Any]:
    """The base's evaluation in the place of a run's own; hashes are of the base's files."""
    found = {f"eval/{MANIFEST}": _entry(base / "eval" / MANIFEST, "object", _manifest(read_json(base / "eval" / MANIFEST)))}
    for unit in sorted((base / "eval" / UNITS).glob("*-reference.json")):
        name = f"eval/{UNITS}/{unit.stem.removesuffix('-reference')}-trained.json"
        found[name] = _entry(unit, "unit", _items(read_json(unit)["items"], lists))
    return found


def _entry(path: Path, kind: str, content: Any) -> dict[str, Any]:
    return {"hash": file_id(path), "kind": kind, "content": content}


def _run(run: Path, curve: str | None, lists: dict[str, list[list[str]]]) -> dict[str, Any]:
    """The run's files by path below it: hash, kind and content."""
    found: dict[str, dict[str, Any]] = {}

    def add(path: Path, kind: str, content: Any) -> None:
        found[str(path.relative_to(run))] = _entry(path, kind, content)

    for unit in sorted((run / "eval" / UNITS).glob("*.json")):
        if unit.stem.partition("-")[0] in ("world", "skills"):
            add(unit, "unit", _items(read_json(unit)["items"], lists))
    for manifest in sorted({run / stage / MANIFEST for stage in ("sft", "train", "eval")} | set(run.glob(f"**/profile/{MANIFEST}"))):
        if manifest.exists():
            add(manifest, "object", _manifest(read_json(manifest)))
    for timing in sorted({run / "sft" / TIMING} | set(run.glob(f"**/profile/{TIMING}"))):
        if timing.exists():
            add(timing, "object", {"wall_s": read_json(timing)["wall_s"]})
    for stage in ("sft", "train"):
        for file, columns in _COLUMNS.items():
            if (path := run / stage / file).exists():
                add(path, "columns", _columns(path, columns))
    if curve is not None and (path := run / curve).exists():
        add(path, "curve", [_point(row, lists) for row in read_jsonl(path)])
    return found


def _manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: manifest[key] for key in _MANIFEST_KEYS if key in manifest}
    summary = {key: manifest["summary"][key] for key in _SUMMARY_KEYS if key in manifest.get("summary", {})}
    return {**kept, **({"summary": summary} if summary else {})}


def _items(items: Sequence[Mapping[str, Any]], lists: dict[str, list[list[str]]]) -> dict[str, Any]:
    """The items' names as the key of a shared list, their scores as digits where all are 0 or 1."""
    names = [[item["item"], item["cluster"], item["facet"]] for item in items]
    key = content_id(names)[:12]
    lists[key] = names
    scores = [item["score"] for item in items]
    is_binary = set(scores) <= {0, 1}
    return {"list": key, "scores": "".join(str(int(score)) for score in scores) if is_binary else scores}


def _point(row: Mapping[str, Any], lists: dict[str, list[list[str]]]) -> dict[str, Any]:
    listed = _items(row["items"], lists) if row.get("items") else {}
    return {"step": row["step"], "value": row["value"], **listed}


def _columns(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    rows = list(read_jsonl(path))
    return {key: [row.get(key) for row in rows] for key in ("step", *columns) if any(key in row for row in rows)}


def _write(path: Path, entry: Mapping[str, Any], lists: Mapping[str, Sequence[Sequence[str]]]) -> None:
    content = entry["content"]
    match entry["kind"]:
        case "unit":
            write_json(path, {"items": _listed(content, lists), "samples": []})
        case "object":
            write_json(path, content)
        case "columns":
            rows = [dict(zip(content, values, strict=True)) for values in zip(*content.values(), strict=True)]
            write_jsonl(path, ({key: value for key, value in row.items() if value is not None} for row in rows))
        case "curve":
            write_jsonl(
                path, ({"step": one["step"], "value": one["value"], "items": _listed(one, lists) if "list" in one else []} for one in content)
            )
        case kind:
            raise UserError(f"the record has an entry of kind {kind!r}", rule="a record is what `collect` makes", fix="collect the runs again")


def _listed(content: Mapping[str, Any], lists: Mapping[str, Sequence[Sequence[str]]]) -> list[dict[str, Any]]:
    names = lists[content["list"]]
    return [
        {"item": item, "cluster": cluster, "facet": facet, "score": float(score)}
        for (item, cluster, facet), score in zip(names, content["scores"], strict=True)
    ]
