"""From the samples of one optimizer step to micro-batches, with the denominators fixed before the first forward.

Pure and deterministic; called by training/sources.py. Which samples share a micro-batch, and how they go through the model there
(`batching`), changes memory and speed, never the gradient: the denominators are counted over the whole step, skipped samples included.
Suffixes: B = sequences, T = padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pivotrl.config.training import Batching
from pivotrl.objective.microbatch import MicroBatch
from pivotrl.objective.nesting import hosts
from pivotrl.rollouts.routes import num_routed_tokens
from pivotrl.types import Demonstration, RoutedExperts, TrainBatch, TrainSample

PAD_TOKEN_ID = 0
"""Any id of the vocabulary would do: masks come from spans, never from token ids, and causal attention hides what follows."""


def train_batch(samples: Sequence[TrainSample]) -> TrainBatch:
    """The step's samples with its global denominators.

    Raises:
        ValueError: for an empty step, an empty completion (which no policy can have sampled), or log-probs or routes that do not match it.
    """
    if not samples:
        raise ValueError("a step without samples has no denominator")
    for sample in samples:
        if not sample.completion_token_ids:
            raise ValueError(f"a sample of group {sample.group_id} has no completion token; even an empty answer ends with its stop token")
        if len(sample.behavior_logprobs_T) != len(sample.completion_token_ids):
            raise ValueError(
                f"a sample of group {sample.group_id} has {len(sample.completion_token_ids)} completion tokens "
                f"but {len(sample.behavior_logprobs_T)} log-probs"
            )
        _check_routes(sample)
    return TrainBatch(tuple(samples), num_actions=len(samples), num_action_tokens=sum(len(s.completion_token_ids) for s in samples))


def _check_routes(sample: TrainSample) -> None:
    routes = sample.routed_experts
    if routes is None:
        return
    prompt, completion = len(sample.prompt_token_ids), len(sample.completion_token_ids)
    num_prompt, num_completion = num_routed_tokens(routes)
    if num_completion != completion - 1 or num_prompt > prompt:
        raise ValueError(
            f"a sample of group {sample.group_id} has {prompt} + {completion} tokens but the experts of {num_prompt} + {num_completion}; "
            "an engine returns those of a prompt's last tokens and of all completion tokens but the last"
        )


def samples_to_forward(batch: TrainBatch, *, skip_zero_variance: bool) -> list[TrainSample]:
    """The samples whose gradient can differ from 0, in the order of the batch.

    A sample of loss weight 0 never has one. A group whose advantages are all 0 (zero variance) has one only through the KL
    term, so it is skipped where beta = 0. Where nothing is left, the shortest sample stays: the optimizer then takes the same
    step on a zero gradient (moments decay, the schedule advances) as if nothing had been skipped.
    """
    informative = {sample.group_id for sample in batch.samples if sample.advantage != 0}
    kept = [s for s in batch.samples if s.loss_weight != 0 and (not skip_zero_variance or s.group_id in informative)]
    return kept or [min(batch.samples, key=_num_tokens)]


def train_micro_batches(batch: TrainBatch, *, batching: Batching, micro_batch_tokens: int, skip_zero_variance: bool) -> list[MicroBatch]:
    """Micro-batches of prompt + completion of at most `micro_batch_tokens` tokens unless one sequence alone is longer.

    The tokens are those that go through the model: with their padding where `padded`, those of a sequence that begins another one once where
    `packed`, a group's prompt once where `shared_prefix`; a group too long for one micro-batch is then split, its prompt in each part. Old and
    reference log-probs are None; the loop attaches them where the recipe asks for them.

    Raises:
        ValueError: where prompts are to be shared and two samples of a group have different ones.
    """
    samples = samples_to_forward(batch, skip_zero_variance=skip_zero_variance)
    rows = [
        _Row(
            token_ids=(*s.prompt_token_ids, *s.completion_token_ids),
            loss_mask=(*(0,) * len(s.prompt_token_ids), *(1,) * len(s.completion_token_ids)),
            advantage=s.advantage,
            loss_weight=s.loss_weight,
            behavior_logprobs=s.behavior_logprobs_T,
            group_id=s.group_id,
            prefix_length=len(s.prompt_token_ids),
            routes=s.routed_experts,
        )
        for s in samples
    ]
    parts = _split(rows, micro_batch_tokens, batching)
    return [_pad(part, batching, num_actions=batch.num_actions, num_action_tokens=batch.num_action_tokens) for part in parts]


def demonstration_micro_batches(demonstrations: Sequence[Demonstration], *, batching: Batching, micro_batch_tokens: int) -> list[MicroBatch]:
    """Micro-batches of expert sequences; `num_actions` is their number.

    Raises:
        ValueError: where no token of the step carries loss.
    """
    num_tokens = sum(demonstration.num_loss_tokens for demonstration in demonstrations)
    if num_tokens == 0:
        raise ValueError("no token of the step's demonstrations carries loss")
    rows = [_Row(d.token_ids, d.loss_mask, 0.0, 1.0, None) for d in demonstrations]
    parts = _split(rows, micro_batch_tokens, batching)
    return [_pad(part, batching, num_actions=len(demonstrations), num_action_tokens=num_tokens) for part in parts]


@dataclass(frozen=True, slots=True)
class _Row:
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    advantage: float
    loss_weight: float
    behavior_logprobs: tuple[float, ...] | None
    group_id: str | None = None
    prefix_length: int = 0
    routes: RoutedExperts | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.token_ids[: self.prefix_length]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that go into one micro-batch together."""

    rows: list[_Row]
    num_tokens: int
    """Of the stream they become."""


def _num_tokens(sample: TrainSample) -> int:
    return len(sample.prompt_token_ids) + len(sample.completion_token_ids)


def _split(rows: Sequence[_Row], micro_batch_tokens: int, batching: Batching) -> list[list[_Row]]:
    """The rows of every micro-batch. Longest first: a step that does not fit into memory fails at its first forward. Sorts are stable."""
    if batching == "packed":
        return _first_fit(_nested(rows), micro_batch_tokens)
    if batching == "shared_prefix":
        return _first_fit(_shared(rows, micro_batch_tokens), micro_batch_tokens)
    parts: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if parts and len(parts[-1][0].token_ids) * (len(parts[-1]) + 1) <= micro_batch_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _nested(rows: Sequence[_Row]) -> list[_Unit]:
    """Every row with those that begin it: the turns of an episode, as long as each turn's prompt holds the turns before as they were sampled."""
    units: dict[int, list[_Row]] = {}
    for row, host in zip(rows, hosts([row.token_ids for row in rows]), strict=True):
        units.setdefault(host, []).append(row)
    return [_Unit(found, len(rows[host].token_ids)) for host, found in units.items()]


def _stream_tokens(rows: Sequence[_Row]) -> int:
    """Tokens of rows that share one prefix, which counts once."""
    return rows[0].prefix_length + sum(len(row.token_ids) - row.prefix_length for row in rows)


def _shared(rows: Sequence[_Row], micro_batch_tokens: int) -> list[_Unit]:
    """Groups, in parts where one is longer than a micro-batch."""
    groups: dict[str | None, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    parts: list[list[_Row]] = []
    for group_id, members in groups.items():
        if any(row.prefix != members[0].prefix for row in members):
            raise ValueError(f"two samples of group {group_id} have different prompts")
        part: list[_Row] = []
        for row in members:
            if part and _stream_tokens([*part, row]) > micro_batch_tokens:
                parts.append(part)
                part = []
            part.append(row)
        parts.append(part)
    return [_Unit(part, _stream_tokens(part)) for part in parts]


def _first_fit(units: Sequence[_Unit], micro_batch_tokens: int) -> list[list[_Row]]:
    """First-fit decreasing: every unit, longest first, into the first micro-batch with room for it (at most 11/9 of the fewest possible)."""
    bins: list[list[_Row]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.num_tokens):
        index = next((i for i, left in enumerate(room) if left >= unit.num_tokens), None)
        if index is None:
            bins.append(list(unit.rows))
            room.append(micro_batch_tokens - unit.num_tokens)
        else:
            bins[index].extend(unit.rows)
            room[index] -= unit.num_tokens
    return bins


def _pad(rows: Sequence[_Row], batching: Batching, *, num_actions: int, num_action_tokens: int) -> MicroBatch:
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    token_ids_B_T = torch.full(shape, PAD_TOKEN_ID, dtype=torch.int64)
    action_mask_B_T = torch.zeros(shape, dtype=torch.float32)
    behavior_B_T = torch.zeros(shape, dtype=torch.float32)
    for i, row in enumerate(rows):
        token_ids_B_T[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
        action_mask_B_T[i, : len(row.loss_mask)] = torch.tensor(row.loss_mask, dtype=torch.float32)
        if row.behavior_logprobs is not None:
            start = len(row.token_ids) - len(row.behavior_logprobs)
            behavior_B_T[i, start : len(row.token_ids)] = torch.tensor(row.behavior_logprobs, dtype=torch.float32)
    numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(row.group_id for row in rows))}
    is_grouped = None not in numbers
    return MicroBatch(
        token_ids_B_T=token_ids_B_T,
        lengths_B=torch.tensor([len(row.token_ids) for row in rows]),
        action_mask_B_T=action_mask_B_T,
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        loss_weights_B=torch.tensor([row.loss_weight for row in rows], dtype=torch.float32),
        behavior_logprobs_B_T=None if any(row.behavior_logprobs is None for row in rows) else behavior_B_T,
        old_logprobs_B_T=None,
        reference_logprobs_B_T=None,
        num_actions=num_actions,
        num_action_tokens=num_action_tokens,
        batching=batching,
        group_ids_B=torch.tensor([numbers[row.group_id] for row in rows]) if is_grouped else None,
        prefix_lengths_B=torch.tensor([row.prefix_length for row in rows]) if is_grouped else None,
        routes_B=tuple(row.routes for row in rows) if any(row.routes is not None for row in rows) else None,
    )
