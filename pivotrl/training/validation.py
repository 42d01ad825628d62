"""Mean reward on held-out candidates: the single-turn score of a policy, for validation in training and for the held-out suite.

The same candidates and, place being constant, the same random numbers each time, so two policies are compared on paired draws.
Single-turn reward does not predict multi-turn success; it picks a checkpoint and stops a run, and evaluation says the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pivotrl.config.schema import ValidationConfig
from pivotrl.errors import UserError
from pivotrl.identity import content_id, derive_seed
from pivotrl.pivots.statistics import Interval, cluster_bootstrap_interval
from pivotrl.rollouts.local import LocalSampler, LocalTask
from pivotrl.training.groups import Truncated, check_infra, counted_rollouts


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One policy on the held-out candidates.

    >>> HeldOutScore(Interval(0.5, 0.25, 0.75, 16), num_candidates=4, num_infra=0).as_dict()["n"]
    16
    """

    mean: Interval
    """Over counted samples, with a 95 % interval from resampling whole candidates: samples of one state share its difficulty."""
    num_candidates: int
    num_infra: int
    """Samples left out because the infrastructure failed."""

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON-ready row: value, low, high, n, num_candidates, num_infra."""
        return {**self.mean.as_dict(), "num_candidates": self.num_candidates, "num_infra": self.num_infra}


def choose_tasks(tasks: Sequence[LocalTask], num_tasks: int) -> list[LocalTask]:
    """The `num_tasks` tasks (all, where there are fewer) with the smallest hash of their id: the same ones whatever their order.

    Raises:
        UserError: where there is no held-out task at all.
    """
    if not tasks:
        raise UserError(
            "there is no held-out candidate", rule="validation needs at least one", fix="raise ingest.held_out_frac or remove train.validation"
        )
    return sorted(tasks, key=lambda task: content_id(task.candidate_id))[:num_tasks]


def score_held_out(
    sampler: LocalSampler,
    tasks: Sequence[LocalTask],
    *,
    num_samples: int,
    truncated: Truncated,
    max_infra_frac: float,
    place: tuple[str | int, ...],
    seed: int,
) -> HeldOutScore:
    """Samples every task and scores the policy that the sampler's engine holds.

    Args:
        place: where the random numbers come from (`LocalSampler.sample`).
        seed: the run's seed, for the interval's resampling.

    Raises:
        InfraLimitError: where more than `max_infra_frac` of the verdicts were the infrastructure's fault.
        UserError: where no sample counts, because all were truncated and the recipe excludes those.
    """
    groups = sampler.sample(tasks, num_samples=num_samples, place=place)
    num_infra = check_infra(groups, max_infra_frac=max_infra_frac, where=f"validation {place}")
    rows = [(group[0].candidate_id, r.verdict.reward) for group in groups for r in counted_rollouts(group, truncated)]
    if not rows:
        raise UserError(
            f"none of {len(tasks)} x {num_samples} held-out samples counts",
            rule="sampling.truncated is `exclude` and every sample was cut",
            fix="raise sampling.max_new_tokens, or count truncated samples as `zero`",
        )
    rewards, candidates = [reward for _, reward in rows], [candidate for candidate, _ in rows]
    mean = cluster_bootstrap_interval(rewards, candidates, seed=derive_seed(seed, *place, "interval"))
    return HeldOutScore(mean, num_candidates=len(tasks), num_infra=num_infra)


class Validation:
    """The validation of one training run."""

    def __init__(
        self, sampler: LocalSampler, tasks: Sequence[LocalTask], config: ValidationConfig, *, truncated: Truncated, max_infra_frac: float, seed: int
    ) -> None:
        self._sampler, self._config, self._seed = sampler, config, seed
        self._truncated: Truncated = truncated
        self._max_infra_frac = max_infra_frac
        self._tasks = choose_tasks(tasks, config.num_pivots)
        self.every_steps, self.patience = config.every_steps, config.patience

    def score(self) -> HeldOutScore:
        """The current policy's score."""
        return score_held_out(
            self._sampler,
            self._tasks,
            num_samples=self._config.num_samples,
            truncated=self._truncated,
            max_infra_frac=self._max_infra_frac,
            place=("validation",),
            seed=self._seed,
        )
