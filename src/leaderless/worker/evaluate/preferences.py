"""Scores of pairs of responses: how a model orders held-out ones, and the reference's of a dataset, found once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leaderless.base.devices import release_memory
from leaderless.base.values import Json
from leaderless.base.versions import VERSION
from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.data.dataset import Dataset, Float, Progress, make_batch
from leaderless.data.prompts.encode import tokenizer_fingerprint
from leaderless.data.sources.disk_cache import Arrays, DataCache
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.observability.metrics import Metrics, Share
from leaderless.planner import Layout, Plan, trained_instance
from leaderless.planner.workflow.reward_stages import REFERENCE_SCORES, scored_before
from leaderless.stages.context import ModelRole
from leaderless.stages.preferences import evaluate_preferences, evaluate_reward_model, score_pairs, score_sides
from leaderless.training.engine import EngineSetup, TrainEngine, ValueEngine, make_train_engine


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


ROWS_PER_PASS = 256
"""Rows that a rank reads and scores together."""


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
        model: list[Json] = [config.model_dump(mode="json"), _files_of(Path(config.path))]
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
        self._check_finite(dataset, scores)
        return {"scores": scores}

    def _check_finite(self, dataset: Dataset, scores: Float) -> None:
        """Refuse scores that are no numbers, before they are kept; all ranks have the same."""
        wrong = np.flatnonzero(~np.isfinite(scores).all(axis=1))
        if len(wrong):
            place = dataset.source.describe(int(dataset.rows[wrong[0]]))
            raise RecipeError.at(
                f"models.{self.role}",
                f"{self._model.name} gives responses of {len(wrong)} of {len(scores)} rows of {dataset.encoder.key} no "
                f"finite log-probability, such as that of {place}: look at its weights, or set compute_dtype=float32",
            )

    def _score(self, dataset: Dataset, progress: Progress) -> Tensor:
        """[m, 3] float64: the places of this rank's rows among the usable ones, and the scores of both responses."""
        count, layout, rank = len(dataset.rows), self.layout, self.transport.rank
        shard, dp = layout.shard_of(rank), layout.dp
        mine = range(count * shard // dp, count * (shard + 1) // dp)
        most, parts = -(-count // dp), [torch.zeros(0, 3, dtype=torch.float64)]
        for first in range(0, most, ROWS_PER_PASS):  # as many passes on every rank, the last ones without rows
            places = mine[first : first + ROWS_PER_PASS]
            rows = dataset.rows[list(places)].tolist()
            has_images = dataset.encoder.images is not None
            prompts = replace(dataset, reference=None).read(rows)
            batch = make_batch(rows, prompts, has_responses=False, has_images=has_images, has_preferences=True)
            scores = score_sides(self._engine, batch).double()
            parts.append(torch.cat([torch.tensor(list(places)).double()[:, None], scores], 1))
            progress(min(first + ROWS_PER_PASS, len(mine)), len(mine))
        whole = torch.cat(parts)
        return whole if layout.represents(rank) else whole[:0]


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


def _files_of(folder: Path) -> list[Json]:
    """Names, sizes and times of the files of a model; empty for one on the hub, which has a revision."""
    if not folder.is_dir():
        return []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.iterdir())]


def all_datasets(sets: Sequence[object]) -> list[Dataset]:
    """Datasets whose rows can be scored: no stream, as the recipe's check has made sure."""
    found = [one for one in sets if isinstance(one, Dataset)]
    assert len(found) == len(sets)
    return found
