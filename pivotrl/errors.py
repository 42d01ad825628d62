"""The errors a user can cause. The command line prints them on one line and exits 2; everything else is our bug and keeps its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave is wrong: the message names the thing, its value, the rule and the fix.

    Args:
        problem: what is wrong, with the offending value, for example ``profile.num_samples is 1``.
        rule: what must hold, for example ``K must be at least 2``.
        fix: what to do about it.
    """

    def __init__(self, problem: str, *, rule: str, fix: str) -> None:
        super().__init__(f"{problem}; {rule}; {fix}")
        self.problem, self.rule, self.fix = problem, rule, fix


# Exit codes that a process which started pivotrl looks at. A stage that saved and stopped because it was asked to: EX_TEMPFAIL of sysexits.h.
EXIT_USER, EXIT_INFRA, EXIT_STOPPED = 2, 3, 75


class InfraLimitError(RuntimeError):
    """Too many verdicts of one stage were the infrastructure's fault (judge down, engine dead), so its numbers would mean nothing."""


class StopRequestedError(RuntimeError):
    """A training stage found a file RUN/stop after a step, has saved a checkpoint and ends; the same command goes on from there."""
