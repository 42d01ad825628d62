"""Demonstrations: a conversation as token sequences with loss on what the expert wrote (Eq. 1).

Private to rendering (`render.py`), which supplies each expert turn's prompt text and completion ids.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pivotrl.rollouts.render_probe import TurnMarks
from pivotrl.rollouts.render_template import ChatTemplate
from pivotrl.types import Demonstration


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What one conversation gave."""

    sequences: tuple[Demonstration, ...]
    num_dropped_turns: int
    """Expert turns that carry loss in no sequence: too long for the limit, or inexpressible in the action format."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One expert turn in the one-sequence rendering, in tokens: ``ids[start:end]`` is the completion with its end-of-turn token."""

    start: int
    end: int
    next_start: int
    """First token of the message after it."""


@dataclass(frozen=True, slots=True)
class _OneSequence:
    ids: tuple[int, ...]
    turns: tuple[_Turn, ...]
    head: int
    """Number of tokens before the first turn's header."""


class DemonstrationBuilder:
    """Builds the sequences of one conversation.

    One sequence holds all turns where each turn's prompt and completion are the first tokens of the next turn's prompt; that is checked for
    the conversation at hand, token by token, and where it fails every turn becomes a sequence of its own, rendered as it is sampled.

    A sequence longer than the limit is cut into windows that end at an expert turn. Windows after the first begin with the conversation's head
    (system prompt, tools, first request), then go on after the last turn of the window before: the task stays in view. No turn carries loss
    twice. A turn that does not fit even so is dropped and counted.
    """

    def __init__(self, template: ChatTemplate, turn: TurnMarks, *, max_tokens: int) -> None:
        self._template, self._turn, self._max_tokens = template, turn, max_tokens

    def build(self, prompt_texts: Mapping[int, str], completions: Mapping[int, tuple[int, ...]], *, one_sequence: bool) -> Demonstrations:
        """The sequences of a conversation.

        Args:
            prompt_texts: text before each expert turn, generation prompt included, by message index.
            completions: token ids of each expert turn, end-of-turn token included, by message index.
            one_sequence: whether to try one sequence for all turns.
        """
        if not completions:
            return Demonstrations((), 0)
        whole = self._join(list(prompt_texts.values()), list(completions.values())) if one_sequence else None
        return self._per_turn(prompt_texts, completions) if whole is None else self._windows(whole)

    def _per_turn(self, prompt_texts: Mapping[int, str], completions: Mapping[int, tuple[int, ...]]) -> Demonstrations:
        kept: list[Demonstration] = []
        for index, completion in completions.items():
            prompt = self._template.encode(prompt_texts[index])
            if len(prompt) + len(completion) <= self._max_tokens:
                kept.append(Demonstration(prompt + completion, (0,) * len(prompt) + (1,) * len(completion)))
        return Demonstrations(tuple(kept), len(completions) - len(kept))

    def _join(self, prompts: Sequence[str], completions: Sequence[tuple[int, ...]]) -> _OneSequence | None:
        """All turns in the last turn's prompt, or None where some turn is not found there exactly as it is rendered alone."""
        last = prompts[-1]
        if not all(last.startswith(prompt) for prompt in prompts):
            return None
        encoding = self._template.encode_with_offsets(last)
        ids, starts = tuple(encoding.ids), [start for start, _ in encoding.offsets]
        header, tail = self._template.encode(self._turn.generation_prompt), self._template.encode(self._turn.tail)
        ids += completions[-1]
        turns: list[_Turn] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            start = bisect.bisect_left(starts, len(prompt))
            end = start + len(completion)
            if ids[start:end] != completion or ids[start - len(header) : start] != header:
                return None
            follows = ids[end : end + len(tail)] == tail
            turns.append(_Turn(start, end, end + len(tail) if follows else end))
        return _OneSequence(ids, tuple(turns), turns[0].start - len(header))

    def _windows(self, whole: _OneSequence) -> Demonstrations:
        sequences: list[Demonstration] = []
        num_dropped = 0
        head, begin = 0, 0
        pending: list[_Turn] = []
        for turn in whole.turns:
            if head + turn.end - begin > self._max_tokens:
                if pending:
                    sequences.append(_window(whole, head, begin, pending))
                    head, begin, pending = whole.head, pending[-1].next_start, []
                if head + turn.end - begin > self._max_tokens:
                    num_dropped += 1
                    head, begin = whole.head, turn.next_start
                    continue
            pending.append(turn)
        if pending:
            sequences.append(_window(whole, head, begin, pending))
        return Demonstrations(tuple(sequences), num_dropped)


def _window(whole: _OneSequence, head: int, begin: int, turns: Sequence[_Turn]) -> Demonstration:
    """Head tokens, then the tokens from `begin` to the end of the last turn, with loss on `turns`."""
    end = turns[-1].end
    mask = [0] * (head + end - begin)
    for turn in turns:
        mask[head + turn.start - begin : head + turn.end - begin] = [1] * (turn.end - turn.start)
    return Demonstration(whole.ids[:head] + whole.ids[begin:end], tuple(mask))
