"""The parts of a decoding loop that know no model: random numbers, sampling, batching, and what its layers keep of a sequence.

Called by transformers_engine only. Every function here is a function of its arguments; no global random state is read or written.

Suffixes: R = rows decoded together (one row = one sample of one prompt), V = vocabulary, P = distinct prompts, T = padded tokens,
H = key/value heads, C = columns allocated, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from pivotrl.rollouts.engine import GenerationRequest
from pivotrl.types import Completion, FinishReason, RoutedExperts

# A buffer grows by this many columns: a copy every 64 tokens instead of every token, and at most 64 unused columns.
_GROWTH_COLUMNS = 64


@dataclass(slots=True)
class Row:
    """One sample under way: what it was asked for and what it has generated so far."""

    request_index: int
    sample_index: int
    uniforms_T: np.ndarray
    """float64 in [0, 1), the random number of every position, drawn from the sample's own seed."""
    temperature: float
    num_tokens: int
    """Tokens it may generate: max_new_tokens, or less where the context ends first."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason | None = None
    prompt_experts: np.ndarray | None = None
    """[tokens, layers with experts, experts per token] of the prompt, where the engine returns them; shared by the prompt's rows."""
    completion_experts: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """[layers, experts] of every generated token but the last."""

    def append(self, token_id: int, logprob: float, *, stop_token_ids: frozenset[int]) -> None:
        """Takes one sampled token, the stop token included; does nothing once finished."""
        if self.finish_reason is not None:
            return
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) == self.num_tokens:
            self.finish_reason = FinishReason.LENGTH

    def completion(self, policy_version: int, routes: RoutedExperts | None) -> Completion:
        """The finished row as the record the engine returns."""
        assert self.finish_reason is not None, "a row left the loop unfinished"
        return Completion(tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, policy_version, routes)


@dataclass(slots=True)
class PromptRows:
    """All rows of one batch that share a prompt, so that it is prefilled once."""

    prompt_token_ids: tuple[int, ...]
    rows: list[Row]


def uniforms(seed: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the random numbers of one sample, position by position.

    Philox is counter-based and keyed by the seed alone, so number t depends neither on `count` nor on other samples.

    >>> bool((uniforms(7, 3) == uniforms(7, 5)[:3]).all())
    True
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def plan_batches(requests: Sequence[GenerationRequest], *, max_rows: int, max_total_tokens: int) -> list[list[PromptRows]]:
    """Splits requests into batches of at most `max_rows` samples, shortest prompts first to pad little.

    Samples of one prompt (of several requests, too) stay together; only a prompt with more than `max_rows` samples is split.

    Args:
        max_rows: samples decoded together.
        max_total_tokens: context length, prompt and completion together. Every prompt must be shorter.
    """
    rows_of: dict[tuple[int, ...], list[Row]] = {}
    for request_index, request in enumerate(requests):
        num_tokens = min(request.max_new_tokens, max_total_tokens - len(request.prompt_token_ids))
        rows_of.setdefault(request.prompt_token_ids, []).extend(
            Row(request_index, sample_index, uniforms(seed, num_tokens), request.temperature, num_tokens)
            for sample_index, seed in enumerate(request.seeds)
        )
    batches: list[list[PromptRows]] = []
    room = 0
    for prompt, rows in sorted(rows_of.items(), key=lambda item: len(item[0])):
        for start in range(0, len(rows), max_rows):
            part = rows[start : start + max_rows]
            if len(part) > room:
                batches.append([])
                room = max_rows
            batches[-1].append(PromptRows(prompt, part))
            room -= len(part)
    return batches


def sample_tokens(logits_R_V: torch.Tensor, *, temperatures_R: torch.Tensor, uniforms_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability.

    Temperature > 0: inverse CDF, the first token v with sum_{w <= v} p_w > u, where p = softmax(logits / temperature). One uniform per
    token, so a row's result depends on its own seed only. Temperature 0: argmax, with log-probabilities at temperature 1 (under the
    greedy distribution itself they would all be 0), as vLLM reports them.

    Args:
        logits_R_V: any float dtype; everything is computed in float32, the cumulative sum in float64.
        temperatures_R: float32, >= 0.
        uniforms_R: float64 in [0, 1).

    Returns:
        token ids int64 [R] and log-probabilities float32 [R]; a row with non-finite logits has a non-finite log-probability.
    """
    greedy_R = temperatures_R == 0
    logprobs_R_V = torch.log_softmax(logits_R_V.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None], dim=-1)
    if bool(greedy_R.all()):
        tokens_R = logprobs_R_V.argmax(dim=-1)
    else:
        cumulative_R_V = logprobs_R_V.exp().cumsum(dim=-1, dtype=torch.float64)
        # Scaled by the sum, which rounding leaves near 1, so that no uniform falls behind the last token.
        thresholds_R = uniforms_R * cumulative_R_V[:, -1]
        tokens_R = torch.searchsorted(cumulative_R_V, thresholds_R[:, None], right=True)[:, 0].clamp_(max=logits_R_V.shape[1] - 1)
        tokens_R = torch.where(greedy_R, logprobs_R_V.argmax(dim=-1), tokens_R) if bool(greedy_R.any()) else tokens_R
    return tokens_R, logprobs_R_V.gather(1, tokens_R[:, None])[:, 0]


class BufferLayer(DynamicLayer):
    """One layer's keys and values in buffers with spare columns, written in place.

    transformers' own DynamicLayer concatenates, which copies the whole cache for every token. Filled once by `place`, column by
    column by `update`, narrowed by `keep`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys_R_H_C_D = self._values_R_H_C_D = torch.empty(0)
        self._length = 0

    def place(
        self, keys_P_H_T_D: torch.Tensor, values_P_H_T_D: torch.Tensor, *, rows: slice, prompts_R: torch.Tensor, shape: tuple[int, int]
    ) -> None:
        """Copies prefilled prompts to `rows`, right-aligned: row r of the slice gets prompt `prompts_R[r]`.

        Args:
            shape: (rows of the whole batch, columns of its longest prompt); the first call allocates with it.
        """
        num_rows, num_columns = shape
        if not self.is_initialized:
            self.lazy_initialization(keys_P_H_T_D, values_P_H_T_D)
            # Zeros, not empty: attention multiplies masked padding by 0, and 0 * NaN is NaN.
            allocate = lambda like: like.new_zeros(num_rows, like.shape[1], num_columns + _GROWTH_COLUMNS, like.shape[3])  # noqa: E731
            self._keys_R_H_C_D, self._values_R_H_C_D = allocate(keys_P_H_T_D), allocate(values_P_H_T_D)
            self._length = num_columns
        columns = slice(num_columns - keys_P_H_T_D.shape[2], num_columns)
        self._keys_R_H_C_D[rows, :, columns] = keys_P_H_T_D[prompts_R]
        self._values_R_H_C_D[rows, :, columns] = values_P_H_T_D[prompts_R]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends one column per row; returns views of the filled part."""
        start, self._length = self._length, self._length + key_states.shape[2]
        if self._length > self._keys_R_H_C_D.shape[2]:
            self._keys_R_H_C_D, self._values_R_H_C_D = self._grown(self._keys_R_H_C_D), self._grown(self._values_R_H_C_D)
        self._keys_R_H_C_D[:, :, start : self._length] = key_states
        self._values_R_H_C_D[:, :, start : self._length] = value_states
        return self._keys_R_H_C_D[:, :, : self._length], self._values_R_H_C_D[:, :, : self._length]

    def keep(self, rows_R: torch.Tensor) -> None:
        """Drops all rows but these."""
        self._keys_R_H_C_D, self._values_R_H_C_D = self._keys_R_H_C_D[rows_R], self._values_R_H_C_D[rows_R]

    def get_seq_length(self) -> int:
        return self._length

    def _grown(self, buffer_R_H_C_D: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(buffer_R_H_C_D, (0, 0, 0, _GROWTH_COLUMNS))


class StateLayer(LinearAttentionLayer):
    """One layer's recurrent states (Mamba: the convolution's last inputs and the scan's state), a row per sample.

    Filled by `place`, updated in place by the model, narrowed by `keep`. A layer that keeps nothing (experts, MLP) is one of these in
    transformers, and stays empty.
    """

    def place(self, prompts: LinearAttentionLayer, *, rows: slice, prompts_R: torch.Tensor, num_rows: int) -> None:
        """Copies the states after prefilled prompts to `rows`: row r of the slice gets prompt `prompts_R[r]`.

        Args:
            num_rows: rows of the whole batch; the first call allocates with it.
        """
        for held, given in ((self.conv_states, prompts.conv_states), (self.recurrent_states, prompts.recurrent_states)):
            for index, state_P in given.items():
                if state_P is None:
                    continue
                state_R = held[index]
                if state_R is None:
                    state_R = held[index] = state_P.new_zeros(num_rows, *state_P.shape[1:])
                state_R[rows] = state_P[prompts_R]
        self.is_conv_states_initialized = dict(prompts.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(prompts.is_recurrent_states_initialized)
        self.has_previous_state = dict(prompts.has_previous_state)
        self.conv_kernel_size = dict(prompts.conv_kernel_size)

    def keep(self, rows_R: torch.Tensor) -> None:
        """Drops all rows but these."""
        for held in (self.conv_states, self.recurrent_states):
            held.update({index: state_R[rows_R] for index, state_R in held.items() if state_R is not None})


class BufferCache(Cache):
    """The cache of one batch: a layer per layer of the model, all with the same rows; those with keys and values have the same columns."""

    def __init__(self, layers: Sequence[CacheLayerMixin | LinearAttentionCacheLayerMixin]) -> None:
        """Empty; `layers` are those of an empty cache of the model, and say which keep a state instead of keys and values."""
        self._rows = [StateLayer(layer.number_of_states) if isinstance(layer, LinearAttentionLayer) else BufferLayer() for layer in layers]
        super().__init__(layers=list(self._rows))

    def place(self, prompts: Cache, *, rows: slice, prompts_R: torch.Tensor, shape: tuple[int, int]) -> None:
        """Copies a prefilled cache of distinct prompts to the rows of their samples; see `BufferLayer.place` and `StateLayer.place`."""
        for own, layer in zip(self._rows, prompts.layers, strict=True):
            if isinstance(own, StateLayer):
                assert isinstance(layer, LinearAttentionLayer)
                own.place(layer, rows=rows, prompts_R=prompts_R, num_rows=shape[0])
                continue
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            own.place(layer.keys, layer.values, rows=rows, prompts_R=prompts_R, shape=shape)

    def keep(self, rows_R: torch.Tensor) -> None:
        """Drops all rows but these."""
        for layer in self._rows:
            layer.keep(rows_R)
