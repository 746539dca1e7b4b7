"""The distributed dataloader: every rank reads its own rows of one order that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaderless.config import Recipe, RecipeError
from leaderless.config.data import DATASET_COLUMN, MixedSetConfig, TrainingSetConfig
from leaderless.data.batch import Batch
from leaderless.data.cache import DataCache
from leaderless.data.dataset import Progress, Prompt, TrainingSet, make_batch, open_dataset
from leaderless.data.encode import RowEncoder, Tokenizer
from leaderless.data.order import Interleaving
from leaderless.data.parquet import unpack
from leaderless.data.read_ahead import ReadAhead
from leaderless.data.sources import open_source, open_stream
from leaderless.data.stream import StreamedDataset


@dataclass(frozen=True)
class LoadedStep:
    """A shard's prompts of a step, and how far into the data it leads.

    Attributes:
        batch: The prompts.
        epochs: Number of epochs by key of the dataset.
    """

    batch: Batch
    epochs: Mapping[str, float]


class Dataloader:
    """Gives one shard its prompts, step by step.

    The stream of prompts and the borders of steps depend on neither the number of shards nor the layout; a shard takes
    a contiguous part of every step. The whole state is `position`. Steps are read ahead in a thread, which changes no
    number: `position` counts what was given.
    """

    def __init__(self, sets: Sequence[TrainingSet], recipe: Recipe, shard: int, num_shards: int) -> None:
        """Take a shard of the training data.

        Args:
            sets: The datasets, in the order of `recipe.data.train_sets()`.
            recipe: Seed, order and prompts per step.
            shard: Number of the part of every step that is given.
            num_shards: Number of parts of a step.
        """
        self.sets, self.recipe = sets, recipe
        self.shard, self.num_shards = shard, num_shards
        self._begin(0)

    def _begin(self, position: int) -> None:
        self._position = position
        self.epochs: Mapping[str, float] = {one.encoder.key: 0.0 for one in self.sets}
        num_ahead, timeout_s = self.recipe.data.prefetch_steps, self.recipe.run.timeout_s
        name = f"the dataloader of shard {self.shard}"
        self._ahead = ReadAhead(_StepReader(self, position).next, num_ahead, name, timeout_s)

    @property
    def position(self) -> int:
        """Prompts that all shards together have been given; may be set, to continue from there."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self.close()
        self._begin(position)

    def next(self) -> Batch:
        """This shard's prompts of the next step.

        Raises:
            RecipeError: A row cannot be used.
            RuntimeError: The data cannot be read, or are others than before.
        """
        step = self._ahead.next()
        self._position += self.recipe.batch.prompts_per_step
        self.epochs = step.epochs
        return step.batch

    def numbers(self) -> dict[str, float]:
        """Where the data are, by name of a metric.

        Returns:
            `data/position`, and `data/epoch`: in a mixture that of the dataset which is behind most, with those of all.
        """
        by_name = {f"data/epoch/{_name(key)}": epoch for key, epoch in self.epochs.items()}
        return {
            "data/position": self.position,
            "data/epoch": min(self.epochs.values()),
            **(by_name if isinstance(self.recipe.data.train, Mapping) else {}),
        }

    def close(self) -> None:
        """End what reads ahead."""
        self._ahead.close()


class _StepReader:
    """Reads the steps of one shard, one after the other. It belongs to the thread that reads ahead."""

    def __init__(self, loader: Dataloader, position: int) -> None:
        self.sets, self.recipe, self.position = loader.sets, loader.recipe, position
        self.shard, self.num_shards = loader.shard, loader.num_shards
        configs = [one.encoder.config for one in self.sets]
        weights = [config.weight if isinstance(config, MixedSetConfig) else 1.0 for config in configs]
        seed, shuffle = self.recipe.seed, self.recipe.data.shuffle
        self.turns = Interleaving(weights, seed)
        self.feeds = [one.feed(seed, number, shuffle=shuffle) for number, one in enumerate(self.sets)]

    def next(self) -> LoadedStep:
        size = self.recipe.batch.prompts_per_step
        begin, self.position = self.position, self.position + size
        mine = range(begin + size * self.shard // self.num_shards, begin + size * (self.shard + 1) // self.num_shards)
        turns = [self.turns.at(position) for position in mine]
        prompts: dict[int, Prompt] = {}
        for number, feed in enumerate(self.feeds):
            positions = [position for position, (turn, _) in zip(mine, turns, strict=True) if turn == number]
            taken = feed.take([place for turn, place in turns if turn == number])
            prompts |= zip(positions, (self._named(prompt, number) for prompt in taken), strict=True)
        batch = make_batch(mine, [prompts[position] for position in mine], has_responses=self.recipe.data.has_responses)
        done = zip(self.sets, self.feeds, self.turns.counts(self.position), strict=True)
        return LoadedStep(batch, {one.encoder.key: feed.epoch(count) for one, feed, count in done})

    def _named(self, prompt: Prompt, number: int) -> Prompt:
        """In a mixture, with the name of the dataset in the row."""
        if isinstance(self.recipe.data.train, TrainingSetConfig):
            return prompt
        key = self.sets[number].encoder.key
        if DATASET_COLUMN in prompt.row:
            raise RecipeError.at(
                key,
                f"rows have a column '{DATASET_COLUMN}', which in a mixture holds the name of the dataset: "
                "rename it, or leave it out of `columns`",
            )
        return Prompt(prompt.row | {DATASET_COLUMN: _name(key)}, prompt.encoded)


def _name(key: str) -> str:
    """The name of a dataset of a mixture."""
    return key.rpartition(".")[2]


def open_training_set(
    config: TrainingSetConfig,
    key: str,
    tokenizer: Tokenizer,
    recipe: Recipe,
    cache: DataCache,
    progress: Progress | None = None,
) -> TrainingSet:
    """Open a dataset to train on. All ranks call it together.

    Args:
        config: The dataset.
        key: The recipe's section, for errors.
        tokenizer: Tokenizer of the model that is trained.
        recipe: Limits, and what happens to overlong rows.
        cache: Cache of all ranks; Parquet is unpacked into its folder.
        progress: Receives the progress of this rank's share.

    Raises:
        RecipeError: It does not exist, cannot be read, or has no row that may be used.
        RuntimeError: Ranks have different datasets of this name.
    """
    encoder = RowEncoder(tokenizer, config, key)
    if config.streaming:
        return StreamedDataset(open_stream(config, key, cache), encoder, config, recipe.data)
    source = unpack(open_source(config, key, cache), config, cache)
    return open_dataset(source, encoder, recipe, cache, progress)
