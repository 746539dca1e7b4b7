"""Datasets whose rows are read in any order: which rows are used, and in which order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd, lcm
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json, is_finite_number
from leaderless.base.versions import VERSION
from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.data import CurriculumConfig, DatasetConfig, TrainingSetConfig
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.prompts.encode import Encoded, RowEncoder, Written, all_overlong, fits, tokenizer_fingerprint
from leaderless.data.prompts.images import PromptImage, pack_images
from leaderless.data.sources.disk_cache import Arrays, DataCache
from leaderless.data.sources.row_sources import Row, RowSource, first_rows
from leaderless.distributed.background import ReadAhead
from leaderless.planner.assign.balance import Int
from leaderless.planner.workflow.columns import IMAGES, column_of

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
        """Read rows at ascending places in the endless sequence, none before the places of an earlier call."""

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
        places = [self.source.describe(row) for row in rows]
        encoded = self.encoder.encode_texts(list(map(self.encoder.texts, values, places)))
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
    """A column with the images of each row."""
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

    These are `images`, `tokens` and `response_mask` if there are responses, and the columns of preferences.
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
    limits += [True] * encoder.is_task  # tasks have no prompts that could be too long
    origin: list[Json] = [VERSION, source.version(), tokenizer, config.model_dump(mode="json"), limits]
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
        num_rows = first_rows(self.source, self.encoder.config)
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
        """Rows among some that may be used, and their levels."""
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


Float = NDArray[np.float64]


def generator(seed: int, *keys: int) -> np.random.Generator:
    """Random numbers that follow from the seed of the run and from keys, such as the epoch."""
    return np.random.Generator(np.random.PCG64([seed, *keys]))


class RowOrder:
    """An endless sequence of rows, epoch after epoch, each in a different order."""

    def __init__(self, rows: Int, seed: int, dataset: int = 0, levels: Float | None = None, *, shuffle: bool) -> None:
        """Take the numbers [n] of the rows that may be used, ascending; `dataset` is its number in a mixture.

        Rows are sorted by their levels [n], small ones first, where there are any; equal ones keep their order. Without
        shuffling they come as they are in the dataset.
        """
        self.rows, self.seed, self.dataset, self.levels, self.shuffle = rows, seed, dataset, levels, shuffle
        self._epoch = -1
        self._ordered = rows

    def row_at(self, place: int) -> int:
        """The row at a place in the sequence, from 0."""
        epoch, index = divmod(place, len(self.rows))
        if epoch != self._epoch and (self.shuffle or self._epoch < 0):
            count = len(self.rows)
            order = generator(self.seed, epoch, self.dataset).permutation(count) if self.shuffle else np.arange(count)
            if self.levels is not None:
                order = order[np.argsort(self.levels[order], kind="stable")]
            self._ordered = self.rows[order]
        self._epoch = epoch
        return int(self._ordered[index])


class Interleaving:
    """An endless sequence of turns, true to the weights from its beginning to any point within less than one turn.

    Turns are given by earliest deadline, as to periodic tasks that fill one processor: the turn number `k` of a dataset
    of weight `w` lies between `floor(k / w)` and `ceil((k + 1) / w)` (Baruah, Cohen, Plaxton and Varvel, 1996,
    Proportionate progress, section 2). The seed decides between equal deadlines. Weights are taken as the decimal
    fractions that they were written as, so that the sequence repeats itself when all shares are whole numbers.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Take the weight of each dataset, above 0, and the seed of the order between equals; only ratios count."""
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        self._shares = [share // gcd(*whole) for share in whole]
        self._period = sum(self._shares)
        self._rank = generator(seed, 0).permutation(len(weights)).tolist()
        self._turns, self._places = array("H"), array("q")
        self._taken = [0] * len(weights)
        self._release = [0] * len(weights)
        self._deadline = [self._last_turn(dataset) for dataset in range(len(weights))]

    def at(self, position: int) -> tuple[int, int]:
        """The dataset whose turn it is at a position from 0, and the number of its turns before: its place."""
        cycle, offset = divmod(position, self._period)
        self._extend(offset + 1)
        dataset = self._turns[offset]
        return dataset, cycle * self._shares[dataset] + self._places[offset]

    def counts(self, position: int) -> list[int]:
        """How many turns each dataset has had before a position."""
        cycle, offset = divmod(position, self._period)
        self._extend(offset)
        turns = np.array(self._turns[:offset], dtype=np.int64)
        begun = np.bincount(turns, minlength=len(self._shares)).tolist()
        return [cycle * share + count for share, count in zip(self._shares, begun, strict=True)]

    def _last_turn(self, dataset: int) -> int:
        return -(-(self._taken[dataset] + 1) * self._period // self._shares[dataset])

    def _extend(self, length: int) -> None:
        """Extend the sequence of turns to a length."""
        for turn in range(len(self._turns), length):
            ready = (dataset for dataset, release in enumerate(self._release) if release <= turn)
            chosen = min(ready, key=lambda dataset: (self._deadline[dataset], self._rank[dataset]))
            self._turns.append(chosen)
            self._places.append(self._taken[chosen])
            self._taken[chosen] += 1
            self._release[chosen] = self._taken[chosen] * self._period // self._shares[chosen]
            self._deadline[chosen] = self._last_turn(chosen)
