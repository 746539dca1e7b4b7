"""Datasets whose rows are read in any order: which rows are used, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

import leaderless
from leaderless.config import Json, Recipe, RecipeError, is_finite_number, nearest
from leaderless.config.data import CurriculumConfig, DatasetConfig, TrainingSetConfig
from leaderless.data.background import ReadAhead
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.cache import Arrays, DataCache
from leaderless.data.encode import Encoded, RowEncoder, Written, all_overlong, fits, tokenizer_fingerprint
from leaderless.data.images import PromptImage, pack_images
from leaderless.data.order import Float, RowOrder
from leaderless.data.rows import Row, RowSource
from leaderless.planner.assign.balance import Int
from leaderless.workflow.columns import IMAGES, column_of

BATCH_ROWS = 1024
"""Rows that are tokenized together when a dataset is opened; progress is reported after each batch."""

Progress = Callable[[int, int], None]
"""Receives the number of rows that a rank has read of its share, and the size of the share."""


@dataclass(frozen=True)
class Prompt:
    """A row, its token ids, and the reference's log-probabilities of its two responses, if known."""

    row: Row
    encoded: Encoded
    reference: tuple[float, ...] | None = None


class Feed(Protocol):
    """The usable rows of a dataset, epoch after epoch without end."""

    def take(self, places: Sequence[int]) -> list[Prompt]:
        """Read rows at ascending places in the endless sequence, none before those of an earlier call."""

    def epoch(self, num_rows: int) -> float:
        """Number of passes through the dataset when all ranks together have taken some rows."""


class TrainingSet(Protocol):
    """A dataset for training, and the encoder of its rows."""

    encoder: RowEncoder

    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        """Its rows in the order that follows from the seed of the run and the number of the dataset in a mixture."""

    def summary(self, path: str) -> str:
        """Number of rows, as text; the path is shown as the name of the dataset."""


@dataclass(frozen=True)
class Dataset(TrainingSet):
    """A source of rows, with their encoder, and the usable rows.

    Attributes:
        source: All rows.
        encoder: The encoder.
        rows: [n] numbers of the usable rows, ascending.
        num_overlong: Number of unusable rows before the last usable one.
        levels: [n] values by which a curriculum sorts rows, small ones first; None without a curriculum.
        reference: [n, 2] log-probabilities of both responses of each row under the reference; None without them.
    """

    source: RowSource
    encoder: RowEncoder
    rows: Int
    num_overlong: int
    levels: Float | None = None
    reference: Float | None = None

    def read(self, rows: Sequence[int]) -> list[Prompt]:
        """Read and tokenize rows by their numbers in the dataset."""
        prompts = self._read(rows)
        if self.encoder.config.preferences == "singles":
            others = self._read([self._before(row) for row in rows])
            prompts = [
                replace(prompt, encoded=replace(prompt.encoded, other=other.encoded.response))
                for prompt, other in zip(prompts, others, strict=True)
            ]
        if self.reference is not None:
            places = np.searchsorted(self.rows, rows)
            prompts = [
                replace(prompt, reference=tuple(scores))
                for prompt, scores in zip(prompts, self.reference[places].tolist(), strict=True)
            ]
        return prompts

    def _read(self, rows: Sequence[int]) -> list[Prompt]:
        values = [self.source.row(row) for row in rows]
        encoded = self.encoder.encode_all(values, [self.source.describe(row) for row in rows])
        return [Prompt(self.encoder.kept(row), tokens) for row, tokens in zip(values, encoded, strict=True)]

    def _before(self, row: int) -> int:
        """The usable row before a given one; before the first comes the last. The order of training does not matter."""
        return int(self.rows[np.searchsorted(self.rows, row) - 1])

    @override
    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        return _DatasetFeed(self, RowOrder(self.rows, seed, number, self.levels, shuffle=shuffle))

    @override
    def summary(self, path: str) -> str:
        note = f", {self.num_overlong:,} overlong left out" if self.num_overlong else ""
        return f"{len(self.rows):,} rows of {path}{note}"


@dataclass(frozen=True)
class _DatasetFeed(Feed):
    dataset: Dataset
    order: RowOrder

    @override
    def take(self, places: Sequence[int]) -> list[Prompt]:
        return self.dataset.read([self.order.row_at(place) for place in places])

    @override
    def epoch(self, num_rows: int) -> float:
        return num_rows / len(self.dataset.rows)


def image_column(images: Sequence[Sequence[PromptImage]], name: str) -> Jagged:
    """A column of images: those of each row."""
    packed = [pack_images(some) for some in images]
    values = torch.from_numpy(np.frombuffer(b"".join(packed), dtype=np.uint8).copy())
    return Jagged(values, torch.tensor([len(one) for one in packed], dtype=torch.int64), column_of(name).axis or name)


def make_batch(
    group_ids: Sequence[int],
    prompts: Sequence[Prompt],
    *,
    has_responses: bool,
    has_images: bool = False,
    has_preferences: bool = False,
) -> Batch:
    """Prompts as a batch: `prompt_tokens` and `rows`, and other columns that the data have.

    These are `images`, `tokens` and `response_mask` if there are responses, and those of preferences.
    """
    columns: dict[str, Column] = {
        "prompt_tokens": Jagged.from_lists([p.encoded.prompt for p in prompts], torch.int64, "prompt_tokens"),
        "rows": tuple(p.row for p in prompts),
    }
    if has_images:
        columns[IMAGES] = image_column([p.encoded.images for p in prompts], IMAGES)
    if has_responses:
        tokens = Jagged.from_lists([p.encoded.response for p in prompts], torch.int64, "tokens")
        mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
        columns |= {"tokens": tokens, "response_mask": mask}
    if has_preferences:
        columns |= _preference_columns(prompts)
    return Batch(torch.tensor(group_ids, dtype=torch.int64), columns)


def _preference_columns(prompts: Sequence[Prompt]) -> dict[str, Column]:
    """Two responses to each prompt, and their known columns."""
    encoded = [prompt.encoded for prompt in prompts]
    columns: dict[str, Column] = {
        "first_tokens": Jagged.from_lists([one.response for one in encoded], torch.int64, "first_tokens"),
        "second_tokens": Jagged.from_lists([one.other for one in encoded], torch.int64, "second_tokens"),
        "desirable": torch.tensor([one.is_desirable for one in encoded], dtype=torch.bool),
        "margins": torch.tensor([one.margin for one in encoded], dtype=torch.float32),
    }
    scores = [prompt.reference for prompt in prompts if prompt.reference is not None]
    if len(scores) == len(prompts):
        columns["reference_scores"] = torch.tensor(scores, dtype=torch.float32).view(-1, 2)
    return columns


def open_dataset(
    source: RowSource,
    encoder: RowEncoder,
    recipe: Recipe,
    cache: DataCache,
    progress: Progress | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Find the usable rows before any are divided among ranks, so that all ranks agree on them.

    Each rank of the cache reads and tokenizes a contiguous share of the dataset once, unless an earlier start did. The
    search ends after `max_rows` usable rows, if that is given.

    Raises:
        RecipeError: A row lacks a column, is overlong where that is an error, or none is left.
    """
    config, data = encoder.config, recipe.data
    # The first rank names the file.
    tokenizer = tokenizer_fingerprint(encoder.tokenizer) if cache.is_first and cache.folder else ""
    limits: list[Json] = [data.max_prompt_tokens, data.max_response_tokens, data.overlong, max_rows]
    limits += [encoder.images.reader.fingerprint] if encoder.images else []
    limits += [dict(encoder.needed)] if encoder.needed else []
    limits += [True] * (
        recipe.environment is not None or recipe.body is not None
    )  # tasks have no prompts that could be too long
    origin: list[Json] = [leaderless.__version__, source.version(), tokenizer, config.model_dump(mode="json"), limits]
    scan = _Scan(source, encoder, recipe, cache, progress)
    found = cache.kept("usable", origin, partial(scan.run, max_rows))
    levels = found["levels"].astype(np.float64) if _curriculum(config) else None
    if config.preferences == "singles" and len(found["rows"]) < 2:
        raise RecipeError.at(
            encoder.key,
            f"has one row of {config.path} that can be used, but each response is compared with that of another row: "
            "give more rows" + (", or raise evaluation.max_prompts" if max_rows == 1 else ""),
        )
    return Dataset(source, encoder, found["rows"].astype(np.int64), int(found["num_overlong"][0]), levels)


@dataclass(frozen=True)
class _Scan:
    """A search that reads and tokenizes every row once."""

    source: RowSource
    encoder: RowEncoder
    recipe: Recipe
    cache: DataCache
    progress: Progress | None

    def run(self, max_rows: int | None) -> Arrays:
        """The rows that may be used, their levels, and the number of others before the last of them."""
        num_rows = min(len(self.source), self.encoder.config.limit or len(self.source))
        wanted = num_rows if max_rows is None else max_rows
        what = f"the usable rows of {self.encoder.key}"
        found = torch.zeros(0, 2, dtype=torch.float64)
        num_seen, num_mine, patience = 0, 0, 1
        while len(found) < wanted and num_seen < num_rows:
            window = range(num_seen, min(num_rows, num_seen + patience * (wanted - len(found))))
            num_seen, patience = window.stop, 2 * patience
            share = self.cache.share(len(window))
            kept = torch.tensor(self._look(window[share.start : share.stop], num_mine), dtype=torch.float64).view(-1, 2)
            num_mine += len(share)
            found = torch.cat([found, *self.cache.process_group.gather(kept, what)])
        rows, levels = found[:wanted, 0].long().numpy(), found[:wanted, 1].numpy()
        num_used = num_seen if len(rows) < wanted else int(rows[-1]) + 1
        if not len(rows):
            raise all_overlong(f"all {num_rows} rows", self.encoder.config, self.recipe.data)
        return {"rows": rows, "levels": levels, "num_overlong": np.array([num_used - len(rows)])}

    def _look(self, rows: range, num_before: int) -> list[tuple[int, float]]:
        """Those of some rows that may be used, and their levels."""
        key, curriculum = self.encoder.key, _curriculum(self.encoder.config)
        kept: list[tuple[int, float]] = []
        batches = [rows[first : first + BATCH_ROWS] for first in range(0, len(rows), BATCH_ROWS)]
        # A fast tokenizer runs outside Python, so the texts of the next batch are made at the same time.
        read = partial(next, map(self._read, batches))
        with closing(ReadAhead(read, 1, f"the reader of {key}", self.recipe.run.timeout_s)) as ahead:
            for batch in batches:
                values, places, texts = ahead.next()
                encoded = self.encoder.encode_texts(texts)
                for index, row, place, tokens in zip(batch, values, places, encoded, strict=True):
                    if fits(tokens, place, self.recipe.data, key):
                        kept.append((index, _level(row, curriculum, place, key) if curriculum else 0.0))
                if self.progress is not None:
                    self.progress(num_before + batch.stop - rows.start, num_before + len(rows))
        return kept

    def _read(self, batch: range) -> tuple[list[Row], list[str], list[Written]]:
        """Some rows, their places, and their prompts and responses. Damaged images are found here."""
        values = [self.source.row(index) for index in batch]
        places = [self.source.describe(index) for index in batch]
        texts = self.encoder.texts
        return (
            values,
            places,
            list(map(partial(texts, are_decoded=True) if self.encoder.images else texts, values, places)),
        )


def _curriculum(config: DatasetConfig) -> CurriculumConfig | None:
    return config.curriculum if isinstance(config, TrainingSetConfig) else None


def _level(row: Row, curriculum: CurriculumConfig, place: str, key: str) -> float:
    """The value by which a curriculum sorts a row, small ones first."""
    column = curriculum.column
    if column not in row:
        raise RecipeError.at(f"{key}.curriculum", f"{place} has no column '{column}'{nearest(column, row)}")
    value = row[column]
    if not is_finite_number(value):
        raise RecipeError.at(
            f"{key}.curriculum",
            f"{place}: column '{column}' holds {value!r:.50}; rows are sorted by finite numbers: write one into each "
            "row, or name another column",
        )
    return -float(value) if curriculum.order == "descending" else float(value)
