"""Curves whose points list their attempts: resampled over tasks and seeds as every other score, both arms on the same draws.

Pure. Suffixes: S = seeds, T = points of the curve, C = clusters of tasks, R = resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pivotrl.evaluation.tables.estimates import Resampling, drawn_seeds, drawn_tasks

type Matrix = npt.NDArray[np.float64]
type PointItems = Sequence[Mapping[str, Any]]
"""The attempts of one point: rows {item, cluster, score}."""


def resampled_curves(arms: Sequence[Sequence[Sequence[PointItems]]], resampling: Resampling) -> list[tuple[Matrix, Matrix]]:
    """Per arm the resampled mean curve [R, T] and the weights of its seeds [R, S].

    Arms with equally many seeds draw the same ones, and a cluster of tasks is drawn for all arms at once: differences stay paired.

    Args:
        arms: items by arm, seed and point; every arm's seeds in the same order.
    """
    clusters = sorted({str(item["cluster"]) for arm in arms for points in arm for items in points for item in items})
    place = {cluster: index for index, cluster in enumerate(clusters)}
    drawn_R_C = drawn_tasks(resampling, len(clusters))
    found: list[tuple[Matrix, Matrix]] = []
    for arm in arms:
        drawn_R_S = drawn_seeds(resampling, len(arm))
        sums_R_T, sizes_R_T = (np.zeros((len(drawn_R_C), len(arm[0]))) for _ in range(2))
        for seed, points in enumerate(arm):
            sums_T_C, sizes_T_C = (np.zeros((len(points), len(clusters))) for _ in range(2))
            for step, items in enumerate(points):
                for item in items:
                    sums_T_C[step, place[str(item["cluster"])]] += float(item["score"])
                    sizes_T_C[step, place[str(item["cluster"])]] += 1
            sums_R_T += drawn_R_S[:, seed, None] * (drawn_R_C @ sums_T_C.T)
            sizes_R_T += drawn_R_S[:, seed, None] * (drawn_R_C @ sizes_T_C.T)
        with np.errstate(invalid="ignore"):
            found.append((sums_R_T / sizes_R_T, drawn_R_S / len(arm)))
    return found
