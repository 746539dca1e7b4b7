"""How a model orders held-out pairs, on all ranks of the model at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.data.batch import Batch
from leaderless.data.dataset import Dataset, make_batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.metrics import Metrics, Share
from leaderless.planner import Layout
from leaderless.stages.context import ModelRole
from leaderless.stages.preferences import evaluate_preferences, score_sides
from leaderless.stages.reward_model import evaluate_reward_model, score_pairs
from leaderless.training.engine import ValueEngine

ROWS_PER_PASS = 256
"""Rows that a rank reads and scores together."""


@dataclass(frozen=True)
class PreferenceEvaluator:
    """Scores both responses of held-out rows, divided among the ranks of the model that is trained."""

    recipe: Recipe
    dataset: Dataset
    model: ModelRole | ValueEngine
    layout: Layout
    process_group: ProcessGroup

    def run(
        self,
        progress: Callable[[float], None],
        record: object = None,  # noqa: ARG002
        journal: object = None,  # noqa: ARG002
        step: int = 0,  # noqa: ARG002
    ) -> dict[str, float]:
        """Evaluate. All ranks of the layout call it together.

        Args:
            progress: Function that receives the finished fraction, between 0 and 1.
            record: Receiver of samples, of which there are none.
            journal: Receiver of episodes, of which there are none.
            step: Step of training whose weights the model has.

        Returns:
            `evaluation/loss`, `evaluation/margin` and, of pairs, `evaluation/accuracy`.
        """
        rank, layout = self.process_group.rank, self.layout
        rows = self.dataset.rows[: self.recipe.evaluation.max_prompts].tolist()
        shard, dp = layout.shard_of(rank), layout.dp
        mine = rows[len(rows) * shard // dp : len(rows) * (shard + 1) // dp]
        parts, scores = [], [torch.zeros(0, 2)]
        for first in range(0, -(-len(rows) // dp), ROWS_PER_PASS):  # as many passes on every rank
            some = mine[first : first + ROWS_PER_PASS]
            parts.append(self._batch(some))
            scores.append(self._score(parts[-1]))
            progress(min(1.0, (first + ROWS_PER_PASS) * dp / len(rows)))
        metrics = Metrics()  # of means alone: that some ranks have the same rows changes nothing
        metrics.add(self._shares(Batch.concat(parts), torch.cat(scores)))
        return {f"evaluation/{name}": value for name, value in metrics.reduce(self.process_group).items()}

    def _batch(self, rows: list[int]) -> Batch:
        prompts, has_images = self.dataset.read(rows), self.dataset.encoder.images is not None
        return make_batch(rows, prompts, has_responses=False, has_images=has_images, has_preferences=True)

    def _score(self, batch: Batch) -> Tensor:
        """[n, 2] score of each response."""
        if not isinstance(self.model, ModelRole):
            return score_pairs(self.model, batch)
        return score_sides(self.model.train_engine, batch)

    def _shares(self, rows: Batch, scores: Tensor) -> Mapping[str, Share]:
        if not isinstance(self.model, ModelRole):
            return evaluate_reward_model(rows, scores, self.recipe.algorithm.reward_model.centering)
        return evaluate_preferences(self.recipe.algorithm.preference_loss, rows, scores, self.process_group)
