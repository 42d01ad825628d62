"""How often the tables' 95 % interval over seeds and tasks holds the truth: python benchmarks/interval_coverage.py

Simulated runs: every (seed, task) is one attempt that succeeds with probability sigmoid(task + seed), both effects normal with mean 0, so
that the true mean over all tasks and seeds is 1/2. Prints coverage and mean width per case.
"""

from __future__ import annotations

import numpy as np

from pivotrl.evaluation.tables.estimates import Resampling, TaskScore, score

NUM_TASKS, NUM_REPETITIONS = 60, 200
# (seeds, standard deviation of the seed effect, of the task effect), in logits.
CASES = ((1, 0.0, 1.5), (3, 0.0, 1.5), (3, 0.5, 1.5), (5, 0.0, 0.0), (5, 0.0, 1.5), (5, 0.5, 1.5))


def coverage(num_seeds: int, seed_std: float, task_std: float) -> tuple[float, float]:
    """Share of intervals that hold 1/2, and their mean width."""
    generator = np.random.default_rng(0)
    held, widths = [], []
    for repetition in range(NUM_REPETITIONS):
        tasks, seeds = generator.normal(0, task_std, NUM_TASKS), generator.normal(0, seed_std, num_seeds)
        solved = generator.random((num_seeds, NUM_TASKS)) < 1 / (1 + np.exp(-(tasks[None, :] + seeds[:, None])))
        rows = {s: [TaskScore(f"t{t}", f"t{t}", "", float(solved[s, t]), 1) for t in range(NUM_TASKS)] for s in range(num_seeds)}
        estimate = score(rows, Resampling(repetition, "seeds", "tasks"))
        assert estimate is not None
        interval = estimate.interval()
        held.append(interval.low <= 0.5 <= interval.high)
        widths.append(interval.high - interval.low)
    return float(np.mean(held)), float(np.mean(widths))


def main() -> None:
    """Prints one line per case."""
    for num_seeds, seed_std, task_std in CASES:
        share, width = coverage(num_seeds, seed_std, task_std)
        print(f"{num_seeds} seeds, seed std {seed_std}, task std {task_std}: coverage {share:.3f}, width {width:.3f} ({NUM_TASKS} tasks)")


if __name__ == "__main__":
    main()
