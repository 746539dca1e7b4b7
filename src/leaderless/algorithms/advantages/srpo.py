"""SRPO: failed episodes are worth more, the more they look like successful ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.advantages.grpo import grpo_advantages
from leaderless.algorithms.clusters import dbscan
from leaderless.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MIN_POINTS = 2
"""Successful episodes that make a cluster."""


class SrpoAdvantage(Advantage):
    """Relative rewards of episodes of a body, where a failed one is worth more the nearer it came to a successful one.

    What an episode looked like is a vector; see `body.encoder`. Success alone counts, not the rewards of the
    environment. A failed episode is compared with the successful ones of its group, which began in the same state, so
    that no rank has to ask another. Without any of these, all of the group are worth 0. A single failed episode, or
    several at the same distance, are worth `scale` / 2. Successful ones that form no cluster are centers of their own.

    Formula: g = 1 for success, else scale * sigmoid(-(d - mean(d)) / std(d)), with d the distance to the nearest center
    of the clusters of successful ones, and mean and deviation (1/n) over the failed ones of the group; then
    (g - mean) / (std + epsilon) over the group.

    Source: SRPO, arXiv 2511.15605, which clusters by DBSCAN without giving its radius: here it is a share of the mean
    distance between the group's successful episodes. It compares episodes of a task in a batch; here, of a start.
    """

    type: Literal["srpo"] = "srpo"
    scale: float = Field(default=0.8, gt=0, lt=1)
    """Alpha: what a failed episode could be worth at most, where success is worth 1."""
    radius: float = Field(default=1.0, gt=0)
    """Distance of neighbors in a cluster, as a share of the mean distance between successful episodes of the group."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to the group's standard deviation."""

    compares_siblings: ClassVar[bool] = True
    judges: ClassVar[str] = "asks whether an episode is a success"
    reads: ClassVar[tuple[str, ...]] = ("embeddings", "success")
    metrics: ClassVar[Mapping[str, str]] = {"srpo/reward": "worth of an episode: 1 for success, less for failure"}

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's episodes."""
        rewards = self_referential_rewards(
            inputs.column("embeddings"),
            inputs.column("success"),
            inputs.is_valid,
            inputs.group_ids,
            scale=self.scale,
            radius=self.radius,
        )
        advantages = grpo_advantages(
            rewards, inputs.is_valid, inputs.group_ids, normalize_by_std=True, epsilon=self.epsilon
        )
        return AdvantageOutput(advantages, metrics={"srpo/reward": rewards})


def self_referential_rewards(
    embeddings: Tensor, success: Tensor, is_valid: Tensor, group_ids: Tensor, *, scale: float, radius: float
) -> Tensor:
    """What episodes are worth, [n] float64; see `SrpoAdvantage`. Invalid ones are worth 0, and nothing depends on them.

    `embeddings` are [n, size], `success` and `is_valid` [n] bool, `group_ids` [n] int64; `scale` is alpha, `radius` a
    share of the mean distance of successful episodes.
    """
    rewards = (success & is_valid).double()
    for group in torch.unique(group_ids[is_valid & ~success]).tolist():
        is_here = (group_ids == group) & is_valid
        failed, done = is_here & ~success, is_here & success
        if not bool(done.any()):
            continue
        centers = centers_of(embeddings[done].double(), radius)
        distances = torch.cdist(embeddings[failed].double(), centers, compute_mode=EXACT).min(1).values
        spread = distances.std(correction=0)
        # Equal distances differ by rounding.
        is_even = spread <= 1e-9 * distances.mean()
        scores = torch.where(is_even, 0.0, (distances - distances.mean()) / torch.where(is_even, 1.0, spread))
        rewards[failed] = scale * torch.sigmoid(-scores)
    return rewards


EXACT = "donot_use_mm_for_euclid_dist"
"""Way to compute distances by which equal points have distance 0."""


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
