"""The distributed dataloader: every rank reads its own rows of one order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from leaderless.config import Recipe, RecipeError
from leaderless.config.data import DATASET_COLUMN, MixedSetConfig, TrainingSetConfig
from leaderless.config.environment import ONLINE
from leaderless.data.batch import Batch
from leaderless.data.dataset import Interleaving, Progress, Prompt, TrainingSet, make_batch, open_dataset
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import ImageReader
from leaderless.data.prompts.preferences import make_encoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.open_source import open_source, open_stream
from leaderless.data.sources.parquet import unpack
from leaderless.data.streamed_dataset import RequestSet, StreamedDataset
from leaderless.distributed.background import ReadAhead
from leaderless.planner.layout import places_of_shard

LoadedStep = tuple[Batch, Mapping[str, float]]
"""A shard's prompts of a step, and the number of epochs then, by key of the dataset."""


class Dataloader:
    """Gives one shard its prompts, step by step.

    The stream of prompts and the boundaries of steps do not depend on the number of shards or the layout; a shard takes
    a contiguous part of every step, or the shards take prompts in turns. The whole state is `position`. Steps are read
    ahead in a thread, which changes no number: `position` counts what was given.
    """

    def __init__(
        self,
        sets: Sequence[TrainingSet],
        recipe: Recipe,
        shard: int,
        num_shards: int,
        portions: Sequence[int] = (),
        *,
        in_turns: bool = False,
    ) -> None:
        """Take a shard of the training data; the datasets are in the order of `recipe.data.train_sets()`.

        Shards have equal parts of a step, or parts in the proportion of some portions, or take prompts in turns.
        """
        self.sets, self.recipe = sets, recipe
        self.shard, self.portions = shard, [*portions] or [1] * num_shards
        size = recipe.batch.prompts_per_step
        self._mine = range(shard, size, num_shards) if in_turns else places_of_shard(shard, self.portions, size)
        data = recipe.data
        self._is_mixture = not isinstance(data.train, TrainingSetConfig)
        self._make_batch = partial(
            make_batch,
            has_responses=data.has_responses,
            has_images=data.has_images,
            has_preferences=data.preferences is not None,
        )
        self._begin(0)

    def _begin(self, position: int) -> None:
        self._position = position
        self.epochs: Mapping[str, float] = {one.encoder.key: 0.0 for one in self.sets}
        name = f"the dataloader of shard {self.shard}"
        num_ahead, timeout_s = self.recipe.data.prefetch_steps, self.recipe.run.timeout_s
        self._ahead: ReadAhead[LoadedStep] = ReadAhead(partial(next, self._steps(position)), num_ahead, name, timeout_s)

    @property
    def position(self) -> int:
        """Number of prompts that all shards together have received; set it to continue from there."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self.close()
        self._begin(position)

    @property
    def num_mine(self) -> int:
        """Number of this shard's prompts in a step."""
        return len(self._mine)

    def next(self) -> Batch:
        """This shard's prompts of the next step."""
        batch, self.epochs = self._ahead.next()
        self._position += self.recipe.batch.prompts_per_step
        return batch

    def _steps(self, position: int) -> Iterator[LoadedStep]:
        """The steps of this shard from a position; read by the thread that reads ahead."""
        configs = [one.encoder.config for one in self.sets]
        weights = [config.weight if isinstance(config, MixedSetConfig) else 1.0 for config in configs]
        seed, size = self.recipe.seed, self.recipe.batch.prompts_per_step
        turns = Interleaving(weights, seed)
        feeds = [one.feed(seed, number, shuffle=self.recipe.data.shuffle) for number, one in enumerate(self.sets)]
        for begin in count(position, size):
            mine = [begin + place for place in self._mine]
            places = {position: turns.at(position) for position in mine}
            prompts: dict[int, Prompt] = {}
            for number, feed in enumerate(feeds):
                chosen = {position: place for position, (turn, place) in places.items() if turn == number}
                taken = feed.take(list(chosen.values()))
                if self._is_mixture:
                    taken = [self._named(prompt, self.sets[number].encoder.key) for prompt in taken]
                prompts |= zip(chosen, taken, strict=True)
            done = zip(self.sets, feeds, turns.counts(begin + size), strict=True)
            epochs = {one.encoder.key: feed.epoch(passed) for one, feed, passed in done}
            yield self._make_batch(mine, [prompts[position] for position in mine]), epochs

    @staticmethod
    def _named(prompt: Prompt, key: str) -> Prompt:
        """A prompt of a mixture with the name of its dataset in the row."""
        if DATASET_COLUMN in prompt.row:
            raise RecipeError.at(
                key,
                f"rows have a column '{DATASET_COLUMN}', which in a mixture holds the name of the dataset: "
                "rename it, or leave it out of `columns`",
            )
        return replace(prompt, row=prompt.row | {DATASET_COLUMN: _name(key)})

    def numbers(self) -> dict[str, float]:
        """Metrics `data/position` and `data/epoch`: in a mixture the lowest epoch, and the epoch of each dataset."""
        numbers = {"data/position": self._position, "data/epoch": min(self.epochs.values())}
        if self._is_mixture:
            numbers |= {f"data/epoch/{_name(key)}": epoch for key, epoch in self.epochs.items()}
        return numbers

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()


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
    reader: Callable[[], ImageReader] | None = None,
) -> TrainingSet:
    """Open a dataset to train on; errors as of `open_source` and `open_dataset`. All ranks of the cache call it."""
    encoder = make_encoder(tokenizer, config, key, is_task=recipe.has_tasks, reader=reader, needed=recipe.row_columns)
    if config.path == ONLINE:
        return RequestSet(encoder)
    if config.streaming:
        return StreamedDataset(open_stream(config, key, cache), encoder, config, recipe.data)
    source = unpack(open_source(config, key, cache), config, cache)
    return open_dataset(source, encoder, recipe, cache, progress)
