"""Datasets whose rows are read in any order: which of the rows are used, and in which order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

import leaderless
from leaderless.config import Json, Recipe, RecipeError, nearest
from leaderless.config.data import CurriculumConfig, TrainingSetConfig
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.cache import DataCache
from leaderless.data.encode import Encoded, RowEncoder, all_overlong, fits, tokenizer_fingerprint
from leaderless.data.order import Float, Int, RowOrder
from leaderless.data.rows import Row, RowSource

BATCH_ROWS = 1024
"""Rows that are tokenized together when a dataset is opened; progress is reported after each batch."""

Progress = Callable[[int, int], None]
"""Receives how many rows of its share a rank has read, and of how many."""


@dataclass(frozen=True)
class Prompt:
    """A row and its token ids."""

    row: Row
    encoded: Encoded


class Feed(Protocol):
    """The usable rows of a dataset, epoch after epoch without end."""

    def take(self, places: Sequence[int]) -> list[Prompt]:
        """Read rows.

        Args:
            places: Places in the endless sequence, ascending, and none before those of an earlier call.
        """

    def epoch(self, count: int) -> float:
        """Number of times that the dataset has been read through.

        Args:
            count: Number of rows that all ranks together have taken, and that this rank has passed.
        """


class TrainingSet(Protocol):
    """A dataset that may be trained on.

    Attributes:
        encoder: How its rows become tokens.
    """

    encoder: RowEncoder

    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        """Its rows in the order of a run.

        Args:
            seed: Seed of the run.
            number: Number of the dataset in a mixture.
            shuffle: Whether rows are in a random order.
        """

    def summary(self, path: str) -> str:
        """How many rows there are, for people.

        Args:
            path: Path of the dataset, as it is to be shown.
        """


class Dataset(TrainingSet):
    """A source of rows together with how they become tokens, and which of them may be used.

    Attributes:
        source: All rows.
        encoder: How they become tokens.
        rows: [n] numbers of those that may be used, ascending.
        num_overlong: Rows before the last of these that may not.
        levels: [n] what a curriculum sorts them by, small ones first; None without one.
    """

    def __init__(
        self, source: RowSource, encoder: RowEncoder, rows: Int, num_overlong: int, levels: Float | None = None
    ) -> None:
        self.source, self.encoder, self.rows, self.num_overlong = source, encoder, rows, num_overlong
        self.levels = levels

    def read(self, rows: Sequence[int]) -> list[Prompt]:
        """Read and tokenize rows.

        Args:
            rows: Their numbers in the dataset.
        """
        values = [self.source.row(row) for row in rows]
        encoded = self.encoder.encode_all(values, [self.source.describe(row) for row in rows])
        return [Prompt(*pair) for pair in zip(values, encoded, strict=True)]

    @override
    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        return _DatasetFeed(self, RowOrder(self.rows, seed, number, self.levels, shuffle=shuffle))

    @override
    def summary(self, path: str) -> str:
        note = f", {self.num_overlong:,} overlong left out" if self.num_overlong else ""
        return f"{len(self.rows):,} rows of {path}{note}"


class _DatasetFeed(Feed):
    def __init__(self, dataset: Dataset, order: RowOrder) -> None:
        self.dataset, self.order = dataset, order

    @override
    def take(self, places: Sequence[int]) -> list[Prompt]:
        return self.dataset.read([self.order.row_at(place) for place in places])

    @override
    def epoch(self, count: int) -> float:
        return count / len(self.dataset.rows)


def make_batch(group_ids: Sequence[int], prompts: Sequence[Prompt], *, has_responses: bool) -> Batch:
    """Prompts as a batch: `prompt_tokens` and `rows`, and `tokens` and `response_mask` if there are responses.

    Args:
        group_ids: Ascending; the ids of the prompts.
        prompts: Prompt for each id.
        has_responses: Whether there are responses to imitate.
    """
    columns: dict[str, Column] = {
        "prompt_tokens": Jagged.from_lists([p.encoded.prompt for p in prompts], torch.int64, "prompt_tokens"),
        "rows": tuple(p.row for p in prompts),
    }
    if has_responses:
        tokens = Jagged.from_lists([p.encoded.response for p in prompts], torch.int64, "tokens")
        mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
        columns |= {"tokens": tokens, "response_mask": mask}
    return Batch(torch.tensor(group_ids, dtype=torch.int64), columns)


def open_dataset(
    source: RowSource,
    encoder: RowEncoder,
    recipe: Recipe,
    cache: DataCache,
    progress: Progress | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Find the rows that may be used, before any are divided among ranks, so that all ranks agree on them.

    Each rank reads and tokenizes a contiguous share of the dataset once, unless that was done at an earlier start.

    Args:
        source: All rows.
        encoder: How they become tokens.
        recipe: Limits, and what happens to overlong rows.
        cache: Cache of all ranks.
        progress: Receives the progress of this rank's share.
        max_rows: Number of usable rows after which the search ends; None finds all.

    Raises:
        RecipeError: A row lacks a column, is overlong where that is an error, or none is left.
    """
    config = encoder.config
    curriculum = config.curriculum if isinstance(config, TrainingSetConfig) else None
    path = _cache_path(source, encoder, recipe, cache, max_rows)
    found = cache.load(path, ("rows", "levels", "num_overlong"))
    if found is None:
        num_rows = min(len(source), config.limit or len(source))
        rows, levels, num_seen = _Scan(source, encoder, recipe, cache, progress).run(num_rows, max_rows)
        if not len(rows):
            raise all_overlong(f"all {num_rows} rows", config, recipe.data)
        found = {"rows": rows, "levels": levels, "num_overlong": np.array([num_seen - len(rows)])}
        cache.save(path, found)
    levels = found["levels"].astype(np.float64)
    num_overlong = int(found["num_overlong"][0])
    return Dataset(source, encoder, found["rows"].astype(np.int64), num_overlong, levels if curriculum else None)


def _cache_path(
    source: RowSource, encoder: RowEncoder, recipe: Recipe, cache: DataCache, max_rows: int | None
) -> Path | None:
    """Where the usable rows are kept; None when they are not."""
    if cache.folder is None:
        return None
    data = recipe.data
    tokenizer = tokenizer_fingerprint(encoder.tokenizer) if cache.is_first else ""  # the first rank names the file
    limits: list[Json] = [data.max_prompt_tokens, data.max_response_tokens, data.overlong, max_rows]
    settings = encoder.config.model_dump(mode="json")
    return cache.path("usable", [leaderless.__version__, source.version(), tokenizer, settings, limits], ".npz")


@dataclass(frozen=True)
class _Scan:
    """Looks at every row once."""

    source: RowSource
    encoder: RowEncoder
    recipe: Recipe
    cache: DataCache
    progress: Progress | None

    def run(self, num_rows: int, max_rows: int | None) -> tuple[Int, NDArray[np.float64], int]:
        """The rows that may be used, what they are sorted by, and how many rows were looked at to find them."""
        wanted = num_rows if max_rows is None else max_rows
        what = f"the usable rows of {self.encoder.key}"
        rows, levels = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        num_seen, num_mine, patience = 0, 0, 1
        while len(rows) < wanted and num_seen < num_rows:
            window = range(num_seen, min(num_rows, num_seen + patience * (wanted - len(rows))))
            num_seen, patience = window.stop, 2 * patience
            share = self.cache.share(len(window))
            kept, kept_levels = self._look(window[share.start : share.stop], num_mine)
            num_mine += len(share)
            process_group = self.cache.process_group
            rows = torch.cat([rows, *process_group.gather(torch.tensor(kept, dtype=torch.int64), what)])[:wanted]
            levels = torch.cat([levels, *process_group.gather(torch.tensor(kept_levels, dtype=torch.float64), what)])[
                :wanted
            ]
        num_used = num_seen if len(rows) < wanted or not len(rows) else int(rows[-1]) + 1
        return rows.numpy(), levels.numpy(), num_used

    def _look(self, rows: range, num_before: int) -> tuple[list[int], list[float]]:
        """Those of some rows that may be used."""
        key, config = self.encoder.key, self.encoder.config
        curriculum = config.curriculum if isinstance(config, TrainingSetConfig) else None
        kept: list[int] = []
        levels: list[float] = []
        batches = [rows[first : first + BATCH_ROWS] for first in range(0, len(rows), BATCH_ROWS)]
        # A fast tokenizer runs outside Python, so that the texts of the next batch are made meanwhile.
        with ThreadPoolExecutor(1) as pool:
            coming = deque(pool.submit(self._read, batch) for batch in batches[:1])
            for number, batch in enumerate(batches, start=1):
                values, places, texts = coming.popleft().result()
                coming.extend(pool.submit(self._read, following) for following in batches[number : number + 1])
                encoded = self.encoder.encode_texts(texts)
                for index, row, place, tokens in zip(batch, values, places, encoded, strict=True):
                    if fits(tokens, place, self.recipe.data, key):
                        kept.append(index)
                        levels.append(_level(row, curriculum, place, key) if curriculum else 0.0)
                if self.progress is not None:
                    self.progress(num_before + batch.stop - rows.start, num_before + len(rows))
        return kept, levels

    def _read(self, batch: range) -> tuple[list[Row], list[str], list[tuple[str, str]]]:
        """Some rows, their places, and their prompts and responses."""
        values = [self.source.row(index) for index in batch]
        places = [self.source.describe(index) for index in batch]
        return values, places, list(map(self.encoder.texts, values, places))


def _level(row: Row, curriculum: CurriculumConfig, place: str, key: str) -> float:
    """What a curriculum sorts a row by, small ones first."""
    column = curriculum.column
    if column not in row:
        raise RecipeError.at(f"{key}.curriculum", f"{place} has no column '{column}'{nearest(column, row)}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecipeError.at(
            f"{key}.curriculum",
            f"{place}: column '{column}' holds {value!r:.50}; rows are sorted by finite numbers: write one into each "
            "row, or name another column",
        )
    return -float(value) if curriculum.order == "descending" else float(value)
