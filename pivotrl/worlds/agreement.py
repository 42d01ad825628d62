"""How often a verifier's verdict on one action is the world's own: the same consequence as the expert's action, yes or no.

A state is reached by the expert; alternatives are other ways of the expert to write its action, and actions of agents that are mistaken.
Each goes through the action format (rendered and read back) to the verifier, and into the world. The consequence is the outcome (all that can
change) and what the world answers. Called by tests and by benchmarks/world_agreement.py; the tables in docs/worlds.md are its output.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pivotrl.actions.registry import action_format
from pivotrl.identity import derive_seed
from pivotrl.types import Action, VerdictKind
from pivotrl.verifiers.protocol import Verifier
from pivotrl.worlds.protocol import Episode, ScriptedWorld, WorldTask

# Writings of the expert and of mistaken agents that are tried in each state; repeated ones count once.
_NUM_WAYS, _NUM_MISTAKES = 6, 6


@dataclass(frozen=True, slots=True)
class Agreement:
    """Alternatives counted by (verdict is 1, consequence is the same), and examples of the two disagreements."""

    counts: Counter[tuple[bool, bool]]
    rejected_though_same: tuple[str, ...]
    """expert -> action, with the verifier's reason; in order, each once."""
    accepted_though_different: tuple[str, ...]

    @property
    def num_cases(self) -> int:
        return sum(self.counts.values())

    @property
    def frac(self) -> float:
        """Share of alternatives on which verifier and world say the same."""
        return (self.counts[True, True] + self.counts[False, False]) / self.num_cases


def measure_agreement(scripted: ScriptedWorld, verifier: Verifier, tasks: Sequence[WorldTask], *, seed: int) -> Agreement:
    """Compares verifier and world at every turn of the expert's episodes of `tasks`.

    Raises:
        AssertionError: where the verifier rejects an expert's own action.
    """
    form = action_format(scripted.world.action_format)
    counts: Counter[tuple[bool, bool]] = Counter()
    examples: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for task in tasks:
        agent = scripted.expert(random.Random(derive_seed(seed, task.id)))
        episode, taken = scripted.world.reset(task), list[Action]()
        while not episode.is_done:
            own, state = agent(episode), episode.state()
            text, wanted = form.render(own, state.tools), _consequence(scripted, task, taken, own)
            assert verifier.verify(state, own, form.parse(text, state.tools)).reward == 1, f"the expert's own action is rejected: {text}"
            for other in _alternatives(scripted, task, episode, seed):
                written = form.render(other, state.tools)
                verdict = verifier.verify(state, own, form.parse(written, state.tools))
                assert verdict.kind is VerdictKind.OK
                is_same = _consequence(scripted, task, taken, other) == wanted
                counts[verdict.reward == 1, is_same] += 1
                if (verdict.reward == 1) != is_same:
                    examples[is_same][f"{text} -> {written} ({verdict.reason})"] = None
            episode.act(own)
            taken.append(own)
    return Agreement(counts, tuple(examples[True]), tuple(examples[False]))


def _alternatives(scripted: ScriptedWorld, task: WorldTask, episode: Episode, seed: int) -> Iterator[Action]:
    ways = [scripted.expert(random.Random(derive_seed(seed, task.id, "way", index)))(episode) for index in range(_NUM_WAYS)]
    mistaken = [
        scripted.noisy_agent(task, 1.0, random.Random(derive_seed(seed, task.id, "mistake", index)))(episode) for index in range(_NUM_MISTAKES)
    ]
    yield from dict.fromkeys((*ways, *mistaken))


def _consequence(scripted: ScriptedWorld, task: WorldTask, taken: Sequence[Action], action: Action) -> str:
    """The world after `taken` and then `action`: its outcome and its answer, as JSON."""
    episode = scripted.world.reset(task)
    for earlier in taken:
        episode.act(earlier)
    num_before = len(episode.state().messages)
    episode.act(action)
    answers = [message.content for message in episode.state().messages[num_before + 1 :]]
    return json.dumps([episode.outcome(), answers], sort_keys=True)
