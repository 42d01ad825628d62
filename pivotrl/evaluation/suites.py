"""The suites of a recipe's evaluation, each as a function from one policy to item scores.

A policy is a `LocalSampler`: engine, renderer and verifier as profiling and training use them. Random numbers depend on
item, sample and turn, never on the checkpoint, so two checkpoints are compared on paired draws. Writes no files (`runner.py` does).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pivotrl.identity import content_id, derive_seed
from pivotrl.rollouts.engine import EngineError, GenerationRequest
from pivotrl.rollouts.episodes import EpisodeEnd, EpisodePlayer, Limits, play
from pivotrl.rollouts.local import LocalSampler, LocalTask, counted
from pivotrl.training.episode_groups import judged
from pivotrl.training.groups import check_infra
from pivotrl.types import Action, Message, ParseOutcome, Role, State, ToolOrigin, VerdictKind
from pivotrl.worlds.protocol import World, WorldTask
from pivotrl.worlds.skills import SkillQuestion, exam_questions, is_right

type Truncated = Literal["zero", "exclude", "mask"]


@dataclass(frozen=True, slots=True)
class ItemScore:
    """One attempt at one item.

    >>> ItemScore("task-1#0", "task-1", "", 1.0, num_turns=5).score
    1.0
    """

    item: str
    """Unique in its suite and the same for every checkpoint: scores are paired by it."""
    cluster: str
    """What attempts must share to be resampled together: trajectory, task, or the item itself."""
    facet: str
    """A sub-score this item counts for (a skill, a kind of turn), or empty."""
    score: float
    """In [0, 1]."""
    num_turns: int
    """Assistant turns sampled for it, the cost axis."""
    is_well_formed: bool = True
    """False where one action was judged and could not be read (an invalid verdict)."""

    @property
    def subject(self) -> str:
        """The item without the number of the attempt."""
        return self.item.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class SuiteScores:
    """All items of one suite on one policy, with a few shown in full."""

    items: tuple[ItemScore, ...]
    samples: tuple[Mapping[str, Any], ...]
    """JSON-ready: item, score, messages, and what the suite knows about the end."""


def held_out(
    policy: LocalSampler,
    tasks: Sequence[LocalTask],
    *,
    trajectory_of: Mapping[str, str],
    num_samples: int,
    truncated: Truncated,
    max_infra_frac: float,
    num_shown: int,
) -> SuiteScores:
    """Single-turn reward on held-out candidates under the recipe's own sampling and verifier.

    Infra verdicts leave the scores; so do truncated samples where the recipe excludes them, and the pairing then lacks those items.

    Args:
        trajectory_of: trajectory id by candidate id, the cluster.

    Raises:
        InfraLimitError: where more than `max_infra_frac` of the verdicts are infra.
    """
    items, samples = [], []
    groups = policy.sample(tasks, num_samples=num_samples, place=("eval", "held_out"))
    check_infra(groups, max_infra_frac=max_infra_frac, where="the held_out suite")
    for task, rollouts in zip(tasks, groups, strict=True):
        for rollout in rollouts:
            if not counted(rollout, truncated):
                continue
            name = f"{task.candidate_id}#{rollout.sample_index}"
            is_well_formed = rollout.verdict.kind is not VerdictKind.INVALID
            items.append(ItemScore(name, trajectory_of[task.candidate_id], "", rollout.verdict.reward, 1, is_well_formed))
            if rollout.sample_index == 0 and len(samples) < num_shown:
                messages = [*task.state.messages, rollout.action.as_message()]
                end = {"reason": rollout.verdict.reason, "verdict": rollout.verdict.kind.value}
                samples.append(_shown(name, rollout.verdict.reward, messages, end))
    return SuiteScores(tuple(items), tuple(samples))


def choose_held_out(tasks: Sequence[LocalTask], num_tasks: int) -> list[LocalTask]:
    """The tasks with the smallest hash of their id: the same ones whatever their order, and not those that validation sees first."""
    return sorted(tasks, key=lambda task: held_out_rank(task.candidate_id))[:num_tasks]


def held_out_rank(candidate_id: str) -> str:
    """What held-out turns are ordered by."""
    return content_id("eval", candidate_id)


def world_success[TaskT: WorldTask](
    policy: LocalSampler, world: World[TaskT], tasks: Sequence[TaskT], *, num_samples: int, limits: Limits, run_seed: int, num_shown: int
) -> SuiteScores:
    """Multi-turn success: every episode is played to its end, all live ones generating together. Facets are the families of tasks.

    An episode whose prompt outgrows the limit ends there, a failure.

    Raises:
        EngineError: where the engine failed.
    """
    names = [f"{task.id}#{sample}" for task in tasks for sample in range(num_samples)]
    opened = [world.reset(task) for task in tasks for _ in range(num_samples)]
    seed_of: Callable[[int, int], int] = lambda index, turn: derive_seed(run_seed, "eval", "world", names[index], turn)  # noqa: E731
    played = play(policy.engine, policy.renderer, opened, limits=limits, seed_of=seed_of)
    if failures := [one.failure for one in played if one.end is EpisodeEnd.ENGINE_FAILED]:
        raise EngineError(failures[0])
    episodes = list(zip(names, opened, strict=True))
    families = {task.id: task.family for task in tasks}
    items = [
        ItemScore(name, episode.task_id, families[episode.task_id], float(episode.success), num_turns=episode.num_turns) for name, episode in episodes
    ]
    shown = episodes[:: max(1, len(episodes) // max(1, num_shown))][:num_shown]
    samples = [_shown(name, float(episode.success), episode.state().messages, {"end": dict(episode.outcome())}) for name, episode in shown]
    return SuiteScores(tuple(items), tuple(samples))


def environment_reward[TaskT: WorldTask](
    player: EpisodePlayer[TaskT], tasks: Sequence[TaskT], *, num_samples: int, limits: Limits, max_infra_frac: float, num_shown: int
) -> SuiteScores:
    """Reward of whole episodes that agents play elsewhere, as their environment gives it. Facets are the families of tasks.

    Episodes that failed with engine or environment leave the scores, and the pairing then lacks those items. Unlike in training an episode with
    a cut turn counts with what the environment gives it, as in the benchmark's own harness.

    Raises:
        InfraLimitError: where more than `max_infra_frac` of the episodes failed so.
    """
    played = player.play(tasks, num_samples, limits=limits, place=("eval", "environment"))
    rollouts = [judged(one, index % num_samples) for index, one in enumerate(played)]
    check_infra([rollouts], max_infra_frac=max_infra_frac, where="the environment suite")
    families = {task.id: task.family for task in tasks}
    items, samples = [], []
    for one, rollout in zip(played, rollouts, strict=True):
        if rollout.verdict.kind is VerdictKind.INFRA:
            continue
        name = f"{rollout.task_id}#{rollout.sample_index}"
        items.append(ItemScore(name, rollout.task_id, families[rollout.task_id], one.reward, num_turns=len(one.turns)))
        if rollout.sample_index == 0 and len(samples) < num_shown:
            samples.append(_shown(name, one.reward, one.episode.state().messages, {"end": dict(one.episode.outcome())}))
    return SuiteScores(tuple(items), tuple(samples))


def skills(policy: LocalSampler, suite: str, *, num_examples: int, limits: Limits, run_seed: int, num_shown: int) -> SuiteScores:
    """Greedy, exact accuracy on the out-of-domain skills; facets are the skills."""
    questions = exam_questions(suite, num_examples, random.Random(derive_seed(run_seed, "eval", "skills")))
    states = [State((Message(Role.USER, question.question),), (), ToolOrigin.NONE) for question in questions]
    requests = [GenerationRequest(policy.renderer.render_prompt(state), (0,), 0.0, limits.max_new_tokens) for state in states]
    actions = [policy.renderer.parse(completions[0].token_ids) for completions in policy.engine.generate(requests)]
    items, samples = [], []
    for index, (question, state, action) in enumerate(zip(questions, states, actions, strict=True)):
        score = float(_answers(question, action))
        items.append(ItemScore(f"{question.skill}#{index}", f"{question.skill}#{index}", question.skill, score, num_turns=1))
        if index < num_shown:
            samples.append(_shown(items[-1].item, score, [*state.messages, action.as_message()], {"answer": question.answer}))
    return SuiteScores(tuple(items), tuple(samples))


def _answers(question: SkillQuestion, action: Action) -> bool:
    return action.parse is ParseOutcome.ABSENT and is_right(question, action.content)


def _shown(item: str, score: float, messages: Sequence[Message], end: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "role": message.role.value,
            "content": message.content,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        }
        for message in messages
    ]
    return {"item": item, "score": score, "messages": rows, **end}
