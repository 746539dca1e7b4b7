"""Clusters of points by density."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

NOISE = -1
"""Label of points of no cluster."""


def dbscan(distances: Tensor, radius: float, min_points: int) -> Tensor:
    """Labels of points by DBSCAN, [n] int64: clusters from 0 in the order of their first core point, or `NOISE`.

    A core point has at least `min_points` points within `radius`, itself included. Core points within the radius of one
    another are of one cluster; so are other points within the radius of one of them, of the nearest if there are
    several. That choice is what DBSCAN leaves to the order of the points, on which nothing depends here.

    Source: Ester et al., A density-based algorithm for discovering clusters, KDD 1996, definitions 1 to 6.

    Args:
        distances: [n, n], symmetric.
        radius: Largest distance of neighbors.
        min_points: Number of points that make a core point.
    """
    num = len(distances)
    is_near = distances <= radius
    is_core = is_near.sum(1) >= min_points
    labels = torch.full((num,), NOISE, dtype=torch.int64, device=distances.device)
    num_found = 0
    for first in is_core.nonzero()[:, 0].tolist():
        if int(labels[first]) != NOISE:
            continue
        reached = torch.zeros_like(is_core)
        reached[first] = True
        size = 0
        while int(reached.sum()) > size:
            size = int(reached.sum())
            reached |= is_near[reached].any(0) & is_core
        labels[reached] = num_found
        num_found += 1
    if num_found:
        to_core = torch.where(is_core[None, :], distances, torch.inf)
        lowest, nearest = to_core.min(1)
        labels = torch.where(~is_core & (lowest <= radius), labels[nearest], labels)
    return labels
