"""From candidates to profiles, Eq. 4: render, let the expert pass first, sample K times, count.

The same `LocalSampler` that training uses scores here, so a pivot is profiled exactly as it is trained. A row ends in
quarantine instead of a profile where its prompt cannot be rendered or does not fit, where the verifier rejects the expert's
own action, and where the infrastructure failed more often than it may. Works on one unit; `profile.py` owns the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pivotrl.config.profiling import ProfileConfig
from pivotrl.config.schema import SamplingConfig, SelectConfig
from pivotrl.pivots.candidates import state_of
from pivotrl.pivots.dataset import ProfiledCandidate
from pivotrl.profiling.adaptive import StoppingRule
from pivotrl.rollouts.local import LocalSampler, LocalTask, counted
from pivotrl.rollouts.render import Renderer
from pivotrl.rollouts.render_template import UnrenderableState
from pivotrl.trajectories.store import TrajectoryStore
from pivotrl.types import Candidate, LocalRollout, ParseOutcome, Profile, Verdict, VerdictKind

UNRENDERABLE = "unrenderable state: "
PROMPT_TOO_LONG = "prompt too long"
EXPERT_REJECTED = "expert rejected: "
INFRA = "infra"
NO_COUNTED_SAMPLE = "no counted sample"


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Everything of the recipe that a profile depends on, beside the policy and the verifier."""

    profile: ProfileConfig
    sampling: SamplingConfig
    max_prompt_tokens: int
    run_seed: int
    select: SelectConfig | None = None
    """What the profile is for: the rule that adaptive K must not change the outcome of. Needed there alone."""
    place: tuple[str | int, ...] = ("profile",)
    """Where in the run this is: a policy that is profiled again gets seeds of its own."""
    with_held_out: bool = True
    """Whether the held-out split is profiled too."""


@dataclass(frozen=True, slots=True)
class ProfileSample:
    """One sampled action of a profile."""

    rollout: LocalRollout
    """Its `sample_index` is the place among the K samples that it was drawn for."""
    attempt: int
    """0, or the number of the resampling that an infra verdict made necessary."""
    counted_reward: float | None
    """What entered mean and variance; None where the sample was left out (infra, or truncated and excluded)."""

    @property
    def is_infra(self) -> bool:
        return self.rollout.verdict.kind is VerdictKind.INFRA


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of one candidate, with all its completions."""

    profiled: ProfiledCandidate
    samples: tuple[ProfileSample, ...]
    expert_was_infra: bool
    """Judging the expert's action failed for a reason that is not the action's."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    candidate: Candidate
    task: LocalTask
    quarantine_reason: str | None
    """Why it is not sampled at all."""


class Measurer:
    """Profiles units of candidates with one sampler."""

    def __init__(self, trajectories: TrajectoryStore, sampler: LocalSampler, renderer: Renderer, settings: ProfileSettings) -> None:
        self._trajectories, self._sampler, self._renderer, self._settings = trajectories, sampler, renderer, settings

    def measure(self, candidates: Sequence[Candidate], rule: StoppingRule | None = None) -> list[Measured]:
        """Profiles of one unit, in the order given. Candidates that are quarantined before sampling cost no turn.

        Args:
            rule: where sampling may stop early; None draws exactly K samples each.
        """
        prepared = self._prepare(candidates)
        samples = self._sample([one.task for one in prepared if one.quarantine_reason is None], rule)
        return [self._measured(one, samples) for one in prepared]

    def accepted(self, candidates: Sequence[Candidate]) -> list[LocalTask]:
        """Those that would be sampled, in the order given; asks the verifier and no engine."""
        return [one.task for one in self._prepare(candidates) if one.quarantine_reason is None]

    def _measured(self, prepared: _Prepared, samples_of: Mapping[str, tuple[ProfileSample, ...]]) -> Measured:
        samples = samples_of.get(prepared.candidate.id, ())
        profile = profile_of(prepared.candidate, prepared.task, samples)
        if prepared.quarantine_reason is not None:
            profile = replace(profile, quarantine_reason=prepared.quarantine_reason)
        return Measured(ProfiledCandidate(prepared.candidate, profile), samples, expert_was_infra=prepared.quarantine_reason == INFRA)

    def _prepare(self, candidates: Sequence[Candidate]) -> list[_Prepared]:
        """The tasks of one unit with the reason of those that are not sampled; the verifier judges all experts in one call."""
        tasks, reasons = [], list[str | None]()
        for candidate in candidates:
            state = state_of(self._trajectories.get(candidate.trajectory_id), candidate)
            try:
                prompt_token_ids, reason = self._renderer.render_prompt(state), None
            except UnrenderableState as error:
                prompt_token_ids, reason = (), f"{UNRENDERABLE}{error}"
            is_too_long = len(prompt_token_ids) > self._settings.max_prompt_tokens
            tasks.append(LocalTask(candidate.id, prompt_token_ids, state, candidate.expert_action))
            reasons.append(PROMPT_TOO_LONG if is_too_long else reason)
        fitting = [task for task, reason in zip(tasks, reasons, strict=True) if reason is None]
        verdicts = iter(self._expert_verdicts(fitting))
        return [
            _Prepared(candidate, task, reason or _quarantine_reason(next(verdicts)))
            for candidate, task, reason in zip(candidates, tasks, reasons, strict=True)
        ]

    def _expert_verdicts(self, tasks: Sequence[LocalTask]) -> list[Verdict]:
        """The verdicts on the experts; infra ones are asked for again as often as a sample would be."""
        verdicts = self._sampler.accept_experts(tasks)
        for _ in range(self._settings.profile.max_resamples):
            spoiled = [index for index, verdict in enumerate(verdicts) if verdict.kind is VerdictKind.INFRA]
            if not spoiled:
                break
            for index, verdict in zip(spoiled, self._sampler.accept_experts([tasks[index] for index in spoiled]), strict=True):
                verdicts[index] = verdict
        return verdicts

    def _sample(self, tasks: Sequence[LocalTask], rule: StoppingRule | None) -> dict[str, tuple[ProfileSample, ...]]:
        """The samples of each task: K, or as many as the rule asks for, the same first ones of the same K."""
        samples: dict[str, list[ProfileSample]] = {task.candidate_id: [] for task in tasks}
        num_samples, first, active = self._settings.profile.num_samples, 0, list(tasks)
        while active:
            size = num_samples if rule is None else rule.round_samples if first else rule.min_samples
            size = min(size, num_samples - first)
            self._draw(active, range(first, first + size), samples)
            first += size
            if first == num_samples or rule is None:
                break
            active = [task for task in active if not _is_done(samples[task.candidate_id], rule)]
        return {
            candidate_id: tuple(sorted(drawn, key=lambda one: (one.rollout.sample_index, one.attempt))) for candidate_id, drawn in samples.items()
        }

    def _draw(self, tasks: Sequence[LocalTask], places: range, samples: dict[str, list[ProfileSample]]) -> None:
        """One sample per task and place; places whose verdict was infra are drawn again with a new seed, `max_resamples` times at most."""
        open_places = {task.candidate_id: tuple(places) for task in tasks}
        for attempt in range(self._settings.profile.max_resamples + 1):
            for batch in _by_num_open(tasks, open_places):
                num_open = len(open_places[batch[0].candidate_id])
                drawn = self._sampler.sample(batch, num_samples=num_open, place=(*self._settings.place, attempt), first_index=places.start)
                for task, rollouts in zip(batch, drawn, strict=True):
                    placed = zip(open_places[task.candidate_id], rollouts, strict=True)
                    new = [self._sample_of(replace(rollout, sample_index=place), attempt) for place, rollout in placed]
                    samples[task.candidate_id] += new
                    open_places[task.candidate_id] = tuple(one.rollout.sample_index for one in new if one.is_infra)

    def _sample_of(self, rollout: LocalRollout, attempt: int) -> ProfileSample:
        is_counted = counted(rollout, self._settings.sampling.truncated)
        return ProfileSample(rollout, attempt, rollout.verdict.reward if is_counted else None)


def _quarantine_reason(expert_verdict: Verdict) -> str | None:
    if expert_verdict.kind is VerdictKind.INFRA:
        return INFRA
    is_accepted = expert_verdict.kind is VerdictKind.OK and expert_verdict.reward == 1
    return None if is_accepted else EXPERT_REJECTED + expert_verdict.reason


def _is_done(samples: Sequence[ProfileSample], rule: StoppingRule) -> bool:
    """Whether a task needs no further sample: the rule says so, or it is lost anyway because a place was never judged.

    Rewards between 0 and 1 are no coin tosses: with one of them a task gets all K samples.
    """
    judged = [one for one in samples if not one.is_infra]
    rewards = [one.counted_reward for one in judged if one.counted_reward is not None]
    if len(judged) < len({one.rollout.sample_index for one in samples}):
        return True
    return all(reward in (0, 1) for reward in rewards) and rule.stops(len(rewards), int(sum(rewards)))


def profile_of(candidate: Candidate, task: LocalTask, samples: Sequence[ProfileSample]) -> Profile:
    """Eq. 4 over the counted samples; quarantined where a place that was drawn was never judged, or nothing was counted."""
    judged = [one for one in samples if not one.is_infra]
    rewards_K = tuple(one.counted_reward for one in judged if one.counted_reward is not None)
    num_places = len({one.rollout.sample_index for one in samples})
    reason = INFRA if len(judged) < num_places else None if rewards_K else NO_COUNTED_SAMPLE
    return Profile(
        candidate_id=candidate.id,
        prompt_token_ids=task.prompt_token_ids,
        rewards_K=rewards_K,
        successes=sum(reward == 1 for reward in rewards_K),
        num_truncated=sum(one.rollout.is_truncated for one in judged),
        num_malformed=sum(one.rollout.action.parse is ParseOutcome.MALFORMED for one in judged),
        quarantine_reason=reason,
    )


def _by_num_open(tasks: Sequence[LocalTask], open_places: Mapping[str, tuple[int, ...]]) -> list[list[LocalTask]]:
    """Tasks with open places, grouped by how many, since one call of the sampler draws equally many for all."""
    groups: dict[int, list[LocalTask]] = {}
    for task in tasks:
        if num_open := len(open_places[task.candidate_id]):
            groups.setdefault(num_open, []).append(task)
    return [groups[num_open] for num_open in sorted(groups, reverse=True)]
