"""The experts of a completion's tokens between arrays, records and messages.

`RoutedExperts` holds bytes, so that a record costs what it says and crosses processes as it is; arrays exist while an engine writes it
(`routed_experts`) and while the trainer reads it (`expert_indices`). Messages and checkpoints are JSON: there the prompt's part, equal in most
samples of a prompt, is written once (`route_rows`, `routes_of`). Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pivotrl.types import RoutedExperts

_TYPES = {1: np.dtype("<u1"), 2: np.dtype("<u2")}
_MOST_IN_A_BYTE = 256


def routed_experts(prompt_T_L_K: np.ndarray, completion_T_L_K: np.ndarray, *, num_experts: int, like: RoutedExperts | None = None) -> RoutedExperts:
    """The record of two arrays of integers [tokens, layers with experts, experts per token].

    Args:
        num_experts: routed experts of a layer; says how wide an index is.
        like: another sample of the same prompt, whose prompt part is shared where it is equal.
    """
    width = 1 if num_experts <= _MOST_IN_A_BYTE else 2
    prompt, completion = (part.astype(_TYPES[width]).tobytes() for part in (prompt_T_L_K, completion_T_L_K))
    if like is not None and like.prompt == prompt:
        prompt = like.prompt
    _, num_layers, experts_per_token = prompt_T_L_K.shape
    return RoutedExperts(num_layers, experts_per_token, width, prompt, completion)


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Where a model has experts.

    >>> ExpertLayers((1, 3), num_experts=8).numbers
    (1, 3)
    """

    numbers: tuple[int, ...]
    """Of the layers with experts, among all layers, from 0."""
    num_experts: int


def routes_of_all_layers(
    chosen_T_L_K: np.ndarray, layers: ExpertLayers, num_tokens: tuple[int, int], *, like: RoutedExperts | None = None
) -> RoutedExperts:
    """The record of what vLLM returns: the experts of all tokens but the last, [prompt + completion - 1, all layers, experts per token].

    Tokens whose keys and values came from the prefix cache are among them: their experts are cached by block, too. Layers without experts
    have a row of zeros. Read in vLLM 0.32: distributed/aux_output_connector (worker.py, connector.py: the tokens),
    model_executor/layers/fused_moe/routed_experts_capturer.py (layers; uint8 up to 256 experts, else uint16).

    Args:
        num_tokens: of prompt and completion.
        like: another sample of the same prompt.

    Raises:
        ValueError: for another number of tokens.
    """
    num_prompt, num_completion = num_tokens
    if len(chosen_T_L_K) != num_prompt + num_completion - 1:
        raise ValueError(f"the experts of {len(chosen_T_L_K)} tokens came with {num_prompt} + {num_completion} tokens; all but the last have some")
    own_T_L_K = chosen_T_L_K[:, list(layers.numbers)]
    return routed_experts(own_T_L_K[:num_prompt], own_T_L_K[num_prompt:], num_experts=layers.num_experts, like=like)


def expert_indices(routes: RoutedExperts) -> np.ndarray:
    """The experts [tokens, layers, experts per token], uint8 or uint16: the prompt's tokens, then the completion's."""
    return np.concatenate([_array(routes, routes.prompt), _array(routes, routes.completion)])


def num_routed_tokens(routes: RoutedExperts) -> tuple[int, int]:
    """How many tokens of the prompt and of the completion the record speaks about.

    >>> num_routed_tokens(RoutedExperts(1, 2, 1, prompt=bytes([3, 0]), completion=bytes()))
    (1, 0)
    """
    bytes_per_token = routes.num_layers * routes.experts_per_token * routes.bytes_per_index
    return len(routes.prompt) // bytes_per_token, len(routes.completion) // bytes_per_token


def route_rows(routes: Sequence[RoutedExperts | None]) -> list[list[Any] | None]:
    """Records as JSON-ready lists; `routes_of` reads them back. A prompt part equal to that of the record before is null."""
    rows: list[list[Any] | None] = []
    before: RoutedExperts | None = None
    for one in routes:
        if one is None:
            rows.append(None)
            continue
        is_repeated = before is not None and one.prompt == before.prompt
        prompt = None if is_repeated else base64.b64encode(one.prompt).decode()
        rows.append([one.num_layers, one.experts_per_token, one.bytes_per_index, prompt, base64.b64encode(one.completion).decode()])
        before = one
    return rows


def routes_of(rows: Sequence[Sequence[Any] | None]) -> list[RoutedExperts | None]:
    """Records from `route_rows`."""
    routes: list[RoutedExperts | None] = []
    before = b""
    for row in rows:
        if row is None:
            routes.append(None)
            continue
        num_layers, experts_per_token, width, prompt, completion = row
        before = before if prompt is None else base64.b64decode(prompt)
        routes.append(RoutedExperts(num_layers, experts_per_token, width, before, base64.b64decode(completion)))
    return routes


def _array(routes: RoutedExperts, part: bytes) -> np.ndarray:
    return np.frombuffer(part, _TYPES[routes.bytes_per_index]).reshape(-1, routes.num_layers, routes.experts_per_token)
