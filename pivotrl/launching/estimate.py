"""GPU-hours of a launched run: what its jobs may use at most before they are started again, and what the planner expects of training.

The first is exact arithmetic over node counts and time limits; the second is the planner's model of the machine (planning/cost.py) and no
better than its stated efficiencies. Called by verbs/launch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pivotrl.config.launch import ClusterFile, seconds
from pivotrl.config.load import LoadedRecipe
from pivotrl.config.planning import ClusterConfig
from pivotrl.config.schema import HuggingFaceModel
from pivotrl.errors import UserError
from pivotrl.launching.jobs import Job, time_limit

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Slot:
    """What one start of a job may use."""

    name: str
    nodes: int
    """Of all jobs of an array together."""
    gpus: int
    time_limit: str
    hours: float
    """The time limit."""

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours


@dataclass(frozen=True, slots=True)
class TrainEstimate:
    """The planner's expectation of the train job."""

    gpu_hours: float
    hours: float
    step_s: float
    fits: bool
    """Whether the layout fits the GPUs' memory."""


def slots(jobs: list[Job], cluster: ClusterFile, gpus_per_node: int) -> list[Slot]:
    """One row per job."""
    rows: list[Slot] = []
    for job in jobs:
        limit, nodes = time_limit(job, cluster), job.all_nodes * job.num_shards
        rows.append(Slot(job.name, nodes, nodes * gpus_per_node if job.is_on_gpu_node(cluster) else 0, limit, hours(limit)))
    return rows


def hours(duration: str) -> float:
    """Hours of a time limit.

    >>> hours("1-02:30:00")
    26.5
    """
    return seconds(duration) / _SECONDS_PER_HOUR


def train_estimate(loaded: LoadedRecipe, hardware: ClusterConfig, run: Path, model: Path | None) -> TrainEstimate | str:
    """The planner's figures for the recipe's layout, or why there are none.

    Args:
        model: describes the model in place of the recipe's checkpoint.
    """
    recipe = loaded.recipe
    if model is None:
        if not isinstance(recipe.model, HuggingFaceModel):
            return f"model.type is {recipe.model.type}; only a Hugging Face checkpoint is planned"
        model = loaded.expand(recipe.model.path, run)
    from pivotrl.planning.inputs import load_model
    from pivotrl.planning.proposals import assess
    from pivotrl.planning.recipe import plan_of

    try:
        _, shape = load_model(model)
        found = assess(shape, recipe.parallel, plan_of(recipe), hardware)
    except UserError as error:
        return str(error)
    return TrainEstimate(found.cost.gpu_hours, found.cost.step_s * recipe.train.num_steps / _SECONDS_PER_HOUR, found.cost.step_s, found.fits)
