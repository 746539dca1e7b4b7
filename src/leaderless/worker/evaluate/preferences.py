"""Scores of pairs of responses: how a model orders held-out ones, and the reference's of a dataset, found once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leaderless.base.devices import release_memory
from leaderless.base.values import Json
from leaderless.base.versions import VERSION
from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.data.dataset import Dataset, Progress, make_batch
from leaderless.data.prompts.encode import tokenizer_fingerprint
from leaderless.data.sources.disk_cache import Arrays, DataCache
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.observability.metrics import Metrics
from leaderless.planner import Layout, Plan, trained_instance
from leaderless.planner.workflow.reward_stages import REFERENCE_SCORES, scored_before
from leaderless.stages.context import ModelRole
from leaderless.stages.preferences import evaluate_preferences, evaluate_reward_model, score_pairs, score_sides
from leaderless.training.engine import EngineSetup, TrainEngine, ValueEngine, make_train_engine

if TYPE_CHECKING:
    from leaderless.worker.evaluate.evaluator import EvaluationStep

ROWS_PER_PASS = 256
"""Rows that a rank reads and scores together."""


def passes(num_rows: int, layout: Layout, rank: int) -> Iterator[range]:
    """The places of a rank's rows among all, in as many passes on every rank, the last ones without any."""
    shard, dp = layout.shard_of(rank), layout.dp
    mine = range(num_rows * shard // dp, num_rows * (shard + 1) // dp)
    for first in range(0, -(-num_rows // dp), ROWS_PER_PASS):
        yield mine[first : first + ROWS_PER_PASS]


def batch_of(dataset: Dataset, rows: Sequence[int]) -> Batch:
    """Rows of a dataset with both responses."""
    has_images = dataset.encoder.images is not None
    return make_batch(rows, dataset.read(rows), has_responses=False, has_images=has_images, has_preferences=True)


@dataclass(frozen=True)
class PreferenceEvaluator:
    """Scores both responses of held-out rows, divided among the ranks of the model that is trained."""

    recipe: Recipe
    dataset: Dataset
    model: ModelRole | ValueEngine
    layout: Layout
    process_group: ProcessGroup

    def run(self, at: EvaluationStep) -> dict[str, float]:
        """Evaluate. All ranks of the layout call it together.

        Returns:
            `evaluation/loss`, `evaluation/margin` and, of pairs, `evaluation/accuracy`.
        """
        rows, model, metrics = self.dataset.rows[: self.recipe.evaluation.max_prompts].tolist(), self.model, Metrics()
        parts, scores, num_done = [], [torch.zeros(0, 2)], 0  # scores [n, 2] of each response
        for places in passes(len(rows), self.layout, self.process_group.rank):
            part = batch_of(self.dataset, [rows[place] for place in places])
            parts.append(part)
            scores.append(
                score_sides(model.train_engine, part) if isinstance(model, ModelRole) else score_pairs(model, part)
            )
            num_done += ROWS_PER_PASS * self.layout.dp
            at.progress(min(1.0, num_done / len(rows)))
        batch, scored, algorithm = Batch.concat(parts), torch.cat(scores), self.recipe.algorithm
        if isinstance(model, ModelRole):
            shares = evaluate_preferences(algorithm.preference_loss, batch, scored, self.process_group)
        else:
            shares = evaluate_reward_model(batch, scored, algorithm.reward_model.centering)
        metrics.add(shares)  # of means alone: that some ranks have the same rows changes nothing
        return {f"evaluation/{name}": value for name, value in metrics.reduce(self.process_group).items()}


@dataclass(frozen=True)
class Scorer:
    """Scores datasets by the reference of a trained role, on the ranks and in the layout of that role.

    Its model is loaded when it is first asked for scores that no earlier start has kept, and `close` lets go of it.
    """

    recipe: Recipe
    role: str
    layout: Layout
    transport: Transport
    device: torch.device
    cache: DataCache
    micro_batch_tokens: int
    say: Callable[[str], None]

    def scored(self, dataset: Dataset, progress: Progress) -> Dataset:
        """A dataset with the reference's scores of all of its usable rows. All ranks of the world call it together."""
        arrays = self.cache.kept("reference", self._origin(dataset), lambda: self._find_out(dataset, progress))
        return replace(dataset, reference=arrays["scores"].astype(np.float64))

    def close(self) -> None:
        """Let go of the model."""
        self.__dict__.pop("_engine", None)
        gc.collect()
        release_memory(self.device)

    def _origin(self, dataset: Dataset) -> list[Json]:
        """All that scores follow from, as the first rank sees it."""
        if not self.cache.is_first or not self.cache.folder:
            return []
        config, encoder = self._model, dataset.encoder
        data: list[Json] = [dataset.source.version(), encoder.config.model_dump(mode="json"), dataset.rows.tolist()]
        folder = Path(config.path)  # not of a model on the hub, which has a revision
        stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())] if folder.is_dir() else []
        files: list[Json] = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        model: list[Json] = [config.model_dump(mode="json"), files]
        return [VERSION, *data, tokenizer_fingerprint(encoder.tokenizer), *model]

    @cached_property
    def _model(self) -> ModelConfig:
        config = self.recipe.model_of(self.role)
        assert config is not None, "checked by the planner"
        return config

    @cached_property
    def _engine(self) -> TrainEngine:
        self.say(f"scoring the dataset by models.{self.role} [bold]{self._model.name}[/], once")
        recipe = self.recipe.as_seen_by(self.role)
        setup = EngineSetup(
            role=self.role,
            model=self._model,
            is_critic=False,
            layout=self.layout,
            process_group=self.transport.process_group(self.layout.ranks),
            axis_groups=self.transport.axis_groups(self.layout),
            device=self.device,
            optimizer=None,
            num_updates=0,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        return make_train_engine(recipe.training.backend, setup)

    def _find_out(self, dataset: Dataset, progress: Progress) -> Arrays:
        world, count = self.transport.world, len(dataset.rows)
        mine = self._score(dataset, progress) if world.rank in self.layout else torch.zeros(0, 3, dtype=torch.float64)
        found = torch.cat(world.gather(mine, f"the reference's scores of {dataset.encoder.key}"))
        scores = np.zeros((count, 2))
        scores[found[:, 0].long().numpy()] = found[:, 1:].numpy()
        wrong = np.flatnonzero(~np.isfinite(scores).all(axis=1))
        if len(wrong):  # before they are kept; all ranks have the same
            place = dataset.source.describe(int(dataset.rows[wrong[0]]))
            raise RecipeError.at(
                f"models.{self.role}",
                f"{self._model.name} gives responses of {len(wrong)} of {count} rows of {dataset.encoder.key} no "
                f"finite log-probability, such as that of {place}: look at its weights, or set compute_dtype=float32",
            )
        return {"scores": scores}

    def _score(self, dataset: Dataset, progress: Progress) -> Tensor:
        """[m, 3] float64: the places of this rank's rows among the usable ones, and the scores of both responses."""
        rank, parts = self.transport.rank, [torch.zeros(0, 3, dtype=torch.float64)]
        shard, dp, count = self.layout.shard_of(rank), self.layout.dp, len(dataset.rows)
        num_mine, unscored = count * (shard + 1) // dp - count * shard // dp, replace(dataset, reference=None)
        for number, places in enumerate(passes(count, self.layout, rank)):
            batch = batch_of(unscored, dataset.rows[list(places)].tolist())
            scores = score_sides(self._engine, batch).double()
            parts.append(torch.cat([torch.tensor(list(places)).double()[:, None], scores], 1))
            progress(min((number + 1) * ROWS_PER_PASS, num_mine), num_mine)
        whole = torch.cat(parts)
        return whole if self.layout.represents(rank) else whole[:0]


def make_scorer(
    recipe: Recipe, plan: Plan, transport: Transport, device: torch.device, folder: Path, say: Callable[[str], None]
) -> Scorer | None:
    """The scorer of a plan whose nodes read scores of the reference; None if none does."""
    node = next((one for one in plan.nodes if REFERENCE_SCORES in one.reads), None)
    if node is None:
        return None
    role = scored_before(recipe, node.node)
    assert role is not None
    assert node.node.role is not None
    trained = trained_instance(plan, node.node.role)
    assert trained is not None
    cache = DataCache(transport.world, folder)
    bound = plan.batch.micro_batch_tokens
    return Scorer(recipe, role, trained.layout, transport, device, cache, bound, say)


def all_datasets(sets: Sequence[object]) -> list[Dataset]:
    """Datasets whose rows can be scored: no stream, as the recipe's check has made sure."""
    found = [one for one in sets if isinstance(one, Dataset)]
    assert len(found) == len(sets)
    return found
