"""SRPO: failed episodes are worth more, the more they look like successful ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.advantages.grpo import grpo_advantages
from leaderless.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.base.values import Json


MIN_POINTS = 2
"""Successful episodes that make a cluster."""
NOISE = -1
"""Label of points of no cluster."""
EXACT = "donot_use_mm_for_euclid_dist"
"""Way to compute distances by which equal points have distance 0."""


class SrpoAdvantage(Advantage):
    """Relative rewards of episodes of a body, where a failed one is worth more the nearer it came to a successful one.

    What an episode looked like is a vector; see `body.encoder`. Success alone counts, not the rewards of the
    environment. A failed episode is compared with the successful ones of its task in the whole batch; see `task`.
    Without any of these, all are worth 0. A single failed episode, or several at the same distance, are worth
    `scale` / 2. Successful ones that form no cluster are centers of their own.

    Formula: g = 1 for success, else scale * sigmoid(-(d - mean(d)) / std(d)), with d the distance to the nearest center
    of the clusters of successful ones, and mean and deviation (1/n) over the failed ones of the task; then
    (g - mean) / (std + epsilon) over the group, whose episodes begin in the same state.

    Source: SRPO, arXiv 2511.15605, which clusters by DBSCAN without giving its radius: here it is a share of the mean
    distance between the successful episodes of the task.
    """

    type: Literal["srpo"] = "srpo"
    task: str | None = Field(default=None, min_length=1)
    """Column of the dataset whose value names the task of a row, so that failed episodes are compared with successful
    ones of the same task from any start, on all ranks. Without it, each row is a task of its own."""
    scale: float = Field(default=0.8, gt=0, lt=1)
    """Alpha: what a failed episode could be worth at most, where success is worth 1."""
    radius: float = Field(default=1.0, gt=0)
    """Distance of neighbors in a cluster, as a share of the mean distance between successful episodes of the task."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to the group's standard deviation."""

    compares_siblings: ClassVar[bool] = True
    judges: ClassVar[str] = "asks whether an episode is a success"
    reads: ClassVar[tuple[str, ...]] = ("embeddings", "success", "rows")
    metrics: ClassVar[Mapping[str, str]] = {"srpo/reward": "worth of an episode: 1 for success, less for failure"}

    @property
    @override
    def row_columns(self) -> Mapping[str, str]:
        return {} if self.task is None else {"task": self.task}

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        rewards = self_referential_rewards(
            inputs.column("embeddings"),
            inputs.column("success"),
            inputs.is_valid,
            inputs.group_ids if self.task is None else task_numbers(inputs.columns["rows"], self.task),
            scale=self.scale,
            radius=self.radius,
            episode_ids=inputs.episode_ids,
            gather=None if self.task is None else inputs.gather_over_ranks,
        )
        advantages = grpo_advantages(rewards, inputs.is_valid, inputs.group_ids, self.epsilon)
        return AdvantageOutput(advantages, metrics={"srpo/reward": rewards})


def task_numbers(rows: Sequence[Tensor] | Sequence[Json] | Tensor, column: str) -> Tensor:
    """[n] int64: a number for each row, the same for those with the same value in a column."""
    numbers: list[int] = []
    for row in rows:
        assert isinstance(row, Mapping), "rows without the column are refused when the dataset is opened"
        text = json.dumps(row[column], sort_keys=True, ensure_ascii=False)
        numbers.append(int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little"))
    return torch.tensor(numbers, dtype=torch.int64)


def self_referential_rewards(
    embeddings: Tensor,
    success: Tensor,
    is_valid: Tensor,
    task_ids: Tensor,
    *,
    scale: float,
    radius: float,
    episode_ids: Tensor | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Values of episodes; see `SrpoAdvantage`. Invalid ones have the value 0, and nothing depends on them.

    Args:
        embeddings: [n, size].
        success: [n] bool.
        is_valid: [n] bool.
        task_ids: [n] int64, number of the task.
        scale: Alpha.
        radius: Share of the mean distance of successful episodes of a task.
        episode_ids: [n] int64, numbers from which the order of sums follows; needed with `gather`.
        gather: Function that returns the rows of all ranks, which call it equally often; None if the episodes of a task
            are all on this rank.

    Returns:
        [n] float64.
    """
    rewards = (success & is_valid).double()
    is_done, is_failed = success & is_valid, ~success & is_valid
    done, done_tasks = embeddings[is_done], task_ids[is_done]
    if gather is not None:
        assert episode_ids is not None, "the order of what is gathered must not depend on ranks"
        done, done_tasks = _in_order(gather, episode_ids[is_done], done, done_tasks)
    distances = torch.full((len(embeddings),), torch.nan, dtype=torch.float64)
    for task in torch.unique(task_ids[is_failed]).tolist():
        found, mine = done[done_tasks == task], is_failed & (task_ids == task)
        if len(found):
            centers = centers_of(found.double(), radius)
            distances[mine] = torch.cdist(embeddings[mine].double(), centers, compute_mode=EXACT).min(1).values
    is_compared = ~distances.isnan()
    all_distances, all_tasks = distances[is_compared], task_ids[is_compared]
    if gather is not None:
        assert episode_ids is not None
        all_distances, all_tasks = _in_order(gather, episode_ids[is_compared], all_distances, all_tasks)
    for task in torch.unique(task_ids[is_compared]).tolist():
        among, mine = all_distances[all_tasks == task], is_compared & (task_ids == task)
        mean, spread = among.mean(), among.std(correction=0)
        # Equal distances differ by rounding.
        is_even = spread <= 1e-9 * mean
        scores = torch.where(is_even, 0.0, (distances[mine] - mean) / torch.where(is_even, 1.0, spread))
        rewards[mine] = scale * torch.sigmoid(-scores)
    return rewards


def _in_order(gather: Callable[[Tensor], Tensor], ids: Tensor, values: Tensor, tasks: Tensor) -> tuple[Tensor, Tensor]:
    """Values and tasks of all ranks, in the order of their numbers."""
    order = gather(ids).argsort()
    return gather(values)[order], gather(tasks)[order]


def centers_of(points: Tensor, radius: float) -> Tensor:
    """Means of the clusters of points, [k, size]; all points, [n, size], if they form no cluster.

    `radius` is a share of the mean distance of two points.
    """
    distances = torch.cdist(points, points, compute_mode=EXACT)
    num = len(points)
    mean = float(distances.sum()) / max(1, num * (num - 1))
    # Of two points, each is at the mean distance of the other: rounding must not part them.
    labels = dbscan(distances, radius * mean * (1 + 1e-9), MIN_POINTS)
    clusters = [points[labels == label].mean(0) for label in range(int(labels.max()) + 1)]
    return torch.stack(clusters) if clusters else points


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
