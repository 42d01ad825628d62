"""Completions from a file or a function instead of a model: replays and tests.

Consumes a JSONL file of ``{"prompt_hash": ..., "token_ids": [[...], ...]}``, one row per prompt. Sample i of a request gets recording
i modulo the number of recordings, whatever its seed. A recorded completion is whole: it finishes with STOP unless max_new_tokens cuts
it. Nothing was sampled, so every log-probability is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from pivotrl.config.engines import ScriptedEngineConfig
from pivotrl.errors import UserError
from pivotrl.identity import content_id
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.types import Completion, FinishReason

if TYPE_CHECKING:
    import torch

type Script = Callable[[tuple[int, ...], int, int], Sequence[int]]
"""(prompt token ids, seed, sample index) -> the whole completion's token ids."""


def prompt_hash(prompt_token_ids: Sequence[int]) -> str:
    """The key of a prompt in a script file."""
    return content_id(list(prompt_token_ids))


class ScriptedEngine:
    """The engine protocol over a script. Weights are accepted, not looked at: they only set the version."""

    def __init__(self, script: Script, *, policy_version: int = 0) -> None:
        self._script = script
        self._policy_version = policy_version

    @staticmethod
    def load(config: ScriptedEngineConfig) -> ScriptedEngine:
        """Reads the whole file.

        Raises:
            UserError: for a file that cannot be read, or a row of another form.
        """
        path = Path(config.path)
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"engine.path names {path}: {error.strerror}", rule="it must be a readable JSONL file", fix="correct the path") from error
        recordings = dict(_recording(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip())

        def script(prompt_token_ids: tuple[int, ...], _seed: int, sample_index: int) -> Sequence[int]:
            key = prompt_hash(prompt_token_ids)
            if key not in recordings:
                raise EngineError(f"no recorded completion for prompt {key}")
            return recordings[key][sample_index % len(recordings[key])]

        return ScriptedEngine(script)

    @staticmethod
    def from_function(script: Script) -> ScriptedEngine:
        """An engine that asks `script` for every completion; the function may raise EngineError."""
        return ScriptedEngine(script)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Recorded completions by request, then by seed.

        Raises:
            EngineError: for a prompt that is not in the script, naming its hash.
        """
        return [
            tuple(
                self._completion(self._script(request.prompt_token_ids, seed, index), request.max_new_tokens)
                for index, seed in enumerate(request.seeds)
            )
            for request in requests
        ]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Reads the tensors to the end, so that a sender's own checks run, and takes the version."""
        for _ in named_tensors:
            pass
        self._policy_version = version

    def weight_digests(self) -> Mapping[str, str]:
        """Nothing: no model is held."""
        return {}

    def close(self) -> None:
        """Nothing to free."""

    def _completion(self, token_ids: Sequence[int], max_new_tokens: int) -> Completion:
        kept = tuple(token_ids[:max_new_tokens])
        finish = FinishReason.STOP if len(kept) == len(token_ids) else FinishReason.LENGTH
        return Completion(kept, (0.0,) * len(kept), finish, self._policy_version)


def _recording(line: bytes, where: str) -> tuple[str, list[list[int]]]:
    try:
        row: Any = orjson.loads(line)
        key, completions = row["prompt_hash"], row["token_ids"]
        is_valid = isinstance(key, str) and bool(completions) and all(_is_completion(ids) for ids in completions)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"{where} is not a recorded prompt",
            rule='a row is {"prompt_hash": "...", "token_ids": [[1, 2], ...]} with at least one completion, none of them empty',
            fix="record the file again, or remove the row",
        )
    return key, completions


def _is_completion(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)
