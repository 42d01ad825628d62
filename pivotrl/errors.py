"""The errors a user can cause. The command line prints them on one line and exits 2; everything else is our bug and keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


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
    """A training stage was asked to stop (a file RUN/stop, or SIGTERM), has saved a checkpoint and ends; the same command goes on from there."""


@contextmanager
def user_errors_end(program: str) -> Iterator[None]:
    """The boundary of a command: what a user can cause, a UserError or a path that cannot be used, ends it with one line and EXIT_USER."""
    try:
        yield
    except UserError as error:
        fail(program, str(error), EXIT_USER)
    except OSError as error:
        # A path the user named that cannot be read or written; an OSError without a file name is ours and keeps its traceback.
        if error.filename is None:
            raise
        rule = "the path must be readable and its directory writable; check the path and its permissions"
        fail(program, f"{error.filename}: {error.strerror}; {rule}", EXIT_USER)


def fail(program: str, message: str, code: int) -> NoReturn:
    """Ends the process with one line on standard error."""
    sys.stderr.write(f"{program}: error: {' '.join(message.split())}\n")
    sys.exit(code)
