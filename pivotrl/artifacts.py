"""The JSON files of a run directory that one stage or verb writes and another reads: what of each is read, checked when it is.

A shape names only the keys that are read; others are left alone. So a file that somebody edited, or that another version wrote, is an error
that names file and key, where it is read. observability/fields.py does the same for the report, which must do without keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from pivotrl.errors import UserError
from pivotrl.rundir import read_json, read_jsonl

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class StageManifest(TypedDict):
    """manifest.json of any finished stage."""

    seed: int


class Cost(TypedDict):
    """What a profile sampled."""

    turns: int


class SetProvenance(TypedDict):
    """What a pivot set is valid for."""

    policy_hash: str
    reason: NotRequired[str]


class CostSummary(TypedDict):
    """Headline numbers of a profile whose price is shown."""

    cost: Cost


class CostManifest(TypedDict):
    """profile/manifest.json where its price is shown."""

    summary: CostSummary


class ProfileSummary(TypedDict):
    """Headline numbers of a profile that is selected from."""

    provenance: dict[str, Any]


class ProfileManifest(TypedDict):
    """profile/manifest.json where it is selected from."""

    summary: ProfileSummary


class SetSummary(TypedDict):
    """Headline numbers of a profile whose history is shown."""

    cost: Cost
    provenance: SetProvenance


class SetManifest(TypedDict):
    """profile/manifest.json where its history is shown."""

    summary: SetSummary


class Selection(TypedDict):
    """select/selection.json."""

    num_pivots: int
    num_turns: int
    provenance: dict[str, Any]


class Declined(TypedDict):
    """pivot_sets/STEP/declined.json."""

    why: str


class StepRow(TypedDict):
    """A row of metrics.jsonl; its metrics are read by name where they are there."""

    step: int


TurnsRow = TypedDict("TurnsRow", {"perf/env_turns/sum": NotRequired[float]})
"""A row of metrics.jsonl as its turns are counted."""


class LedgerRow(TypedDict):
    """A row of train/ledger.jsonl."""

    step: int
    pivot_set: NotRequired[str]


class ValidationRow(TypedDict):
    """A row of train/validation.jsonl."""

    step: int
    value: float


class Part(TypedDict):
    """One part of a difference."""

    value: float


class GainRow(TypedDict):
    """A difference on single turns as its parts."""

    format: Part
    decision: Part


class SuiteRow(TypedDict):
    """One suite on one checkpoint."""

    name: str
    checkpoint: str
    n: int
    score: float | None


class DifferenceRow(TypedDict):
    """One suite, trained minus reference."""

    name: str
    difference: float | None
    low: NotRequired[float | None]
    high: NotRequired[float | None]
    gain: NotRequired[GainRow]


class Scores(TypedDict):
    """eval/scores.json."""

    suites: list[SuiteRow]
    differences: list[DifferenceRow]


class ScoredItem(TypedDict):
    """One attempt at one item, where only its score is read."""

    item: str
    cluster: str
    facet: str
    score: float


class ScoredUnit(TypedDict):
    """eval/units/SUITE-CHECKPOINT.json where tables are made of it."""

    items: list[ScoredItem]


class Item(ScoredItem):
    """One attempt at one item: the fields of `evaluation.suites.ItemScore`."""

    num_turns: int
    is_well_formed: NotRequired[bool]


class EvalUnit(TypedDict):
    """eval/units/SUITE-CHECKPOINT.json where the stage goes on from it."""

    items: list[Item]
    samples: list[dict[str, Any]]


class UnitRollout(TypedDict):
    """One sample in a unit of a profile."""

    num_tokens: int
    verdict: str


class UnitRow(TypedDict):
    """A row of profile/units/*.jsonl."""

    profile: dict[str, Any]
    rollouts: list[UnitRollout]
    expert_was_infra: bool


class RuleFile(TypedDict):
    """profile/adaptive.json."""

    num_samples: int
    min_samples: int
    round_samples: int
    stopped: list[list[int]]
    expected_samples: float
    expected_differing_frac: float
    differing_frac_bound: float


class SubmissionRow(TypedDict):
    """One accepted job."""

    stage: str
    job_id: str
    num_shards: int
    depends_on: str | None
    command: list[str]
    submitted_at: str


class JobsRecord(TypedDict):
    """launch/jobs.json."""

    slurm_conf: str | None
    path: str
    submissions: list[SubmissionRow]


class WeightIndex(TypedDict):
    """model.safetensors.index.json of a Hugging Face checkpoint."""

    weight_map: dict[str, str]


class GenerationConfig(TypedDict):
    """generation_config.json of a Hugging Face checkpoint."""

    eos_token_id: NotRequired[int | list[int] | None]


def read_artifact[Shape](path: Path, shape: type[Shape]) -> Shape:
    """The value of a JSON file, every key kept.

    Raises:
        UserError: where it is damaged, or a key of the shape is missing or of another type, naming file and key.
    """
    value = read_json(path)
    check_shape(value, shape, source=str(path))
    return value


def read_artifact_lines[Shape](path: Path, shape: type[Shape], *, is_growing: bool = False) -> Iterator[Shape]:
    """The rows of a JSONL file; `is_growing` and errors as `read_jsonl` and `read_artifact`, the line named."""
    for number, row in enumerate(read_jsonl(path, is_growing=is_growing), 1):
        check_shape(row, shape, source=f"{path}:{number}")
        yield row  # pyright: ignore[reportReturnType] (checked)


def check_shape(value: Any, shape: Any, *, source: str) -> None:
    """Raises a UserError that names source and key where a value lacks a key of the shape or has another type there."""
    from pydantic import ValidationError

    try:
        _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        found = "is missing" if first["type"] == "missing" else f"is {str(first['input'])[:60]!r}"
        what = f"{source}: {key} {found}" if key else f"{source} holds {type(value).__name__}"
        raise UserError(
            what, rule=f"it is not what the stage writes ({first['msg'].lower()})", fix="restore the file, or remove its stage's directory to redo it"
        ) from error


@functools.cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)
