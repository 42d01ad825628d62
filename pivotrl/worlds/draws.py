"""How a world draws its tasks: without repetition, its cases in turn, each split a set of task ids of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pivotrl.errors import UserError
from pivotrl.identity import bytes_id, derive_seed
from pivotrl.worlds.protocol import TaskSplit, WorldTask

# Shares of the splits in tenths of the task space: most of it is pretraining's.
_SPLIT_TENTHS = {TaskSplit.TRAIN: range(2), TaskSplit.TEST: range(2, 4), TaskSplit.PRETRAINING: range(4, 10)}


def draw_tasks[TaskT: WorldTask, CaseT](
    world: str,
    cases: Sequence[CaseT],
    draw: Callable[[CaseT, random.Random], TaskT],
    *,
    split: TaskSplit,
    num_tasks: int,
    max_tasks: int,
    seed: int,
) -> tuple[TaskT, ...]:
    """Tasks of one split, the cases in turn, so that every split covers them evenly.

    Args:
        world: its name, part of the seed.
        cases: what a task can be about; each must have far more than `max_tasks` / len(cases) tasks in every split.
        draw: one task of a case.

    Raises:
        UserError: where more than `max_tasks` are asked for.
    """
    if num_tasks > max_tasks:
        name = world.replace("_", " ")
        raise UserError(f"the world is asked for {num_tasks} {split} tasks", rule=f"the {name} gives {max_tasks} at most", fix="ask for fewer")
    rng = random.Random(derive_seed(seed, world, "tasks", split))
    found = dict[str, TaskT]()
    while len(found) < num_tasks:
        task = draw(cases[len(found) % len(cases)], rng)
        if split_of(task.id) is split:
            found.setdefault(task.id, task)
    return tuple(found.values())


def split_of(task_id: str) -> TaskSplit:
    """The split of a task by hash of its id, so that splits are disjoint whatever the seed and the sizes."""
    tenth = int(bytes_id(task_id.encode()), 16) % 10
    return next(split for split, tenths in _SPLIT_TENTHS.items() if tenth in tenths)
