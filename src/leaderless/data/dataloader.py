"""The distributed dataloader: every rank reads its own rows of one order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from leaderless.config import Recipe, RecipeError
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.encode import Encoded, RowEncoder
from leaderless.data.order import Int, RowOrder
from leaderless.data.sources import RowSource
from leaderless.data.transport import Group
from leaderless.planner import format_ranks


class Dataset:
    """A source of rows together with how they become tokens, and which of them may be used.

    Attributes:
        source: All rows.
        encoder: How they become tokens.
        rows: [n] numbers of those that may be used, ascending.
        num_overlong: Rows before the last of these that may not.
    """

    def __init__(self, source: RowSource, encoder: RowEncoder, rows: Int, num_overlong: int) -> None:
        self.source, self.encoder, self.rows, self.num_overlong = source, encoder, rows, num_overlong

    def batch(self, group_ids: Sequence[int], rows: Sequence[int]) -> Batch:
        """Prompts as a batch: `prompt_tokens` and `rows`, and `tokens` and `response_mask` if there are responses.

        Args:
            group_ids: Ascending; the ids of the prompts.
            rows: Their numbers in the dataset.
        """
        values = [self.source.row(row) for row in rows]
        encoded = [
            self.encoder.encode(value, self.source.describe(row)) for value, row in zip(values, rows, strict=True)
        ]
        columns: dict[str, Column] = {
            "prompt_tokens": Jagged.from_lists([e.prompt for e in encoded], torch.int64, "prompt_tokens"),
            "rows": tuple(values),
        }
        if self.encoder.config.response is not None:
            tokens = Jagged.from_lists([e.response for e in encoded], torch.int64, "tokens")
            mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
            columns |= {"tokens": tokens, "response_mask": mask}
        return Batch(torch.tensor(group_ids, dtype=torch.int64), columns)


class Dataloader:
    """Gives one shard its prompts, step by step.

    The stream of prompts and the borders of steps depend on neither the number of shards nor the layout; a shard takes
    a contiguous part of every step. The whole state is `position`.
    """

    def __init__(self, dataset: Dataset, recipe: Recipe, shard: int, num_shards: int) -> None:
        """Take a shard of the training data.

        Args:
            dataset: The rows.
            recipe: Seed, order and prompts per step.
            shard: Which part of every step is given.
            num_shards: Into how many a step is divided.
        """
        self.dataset = dataset
        self.order = RowOrder(dataset.rows, recipe.seed, shuffle=recipe.data.shuffle)
        self.prompts_per_step = recipe.batch.prompts_per_step
        self.shard, self.num_shards = shard, num_shards
        self.position = 0

    @property
    def epoch(self) -> float:
        """How often the data has been gone through."""
        return self.position / len(self.dataset.rows)

    def next(self) -> Batch:
        """This shard's prompts of the next step."""
        first = self.position + self.prompts_per_step * self.shard // self.num_shards
        last = self.position + self.prompts_per_step * (self.shard + 1) // self.num_shards
        self.position += self.prompts_per_step
        places = range(first, last)
        return self.dataset.batch(places, [self.order.row_at(place) for place in places])


def open_dataset(
    source: RowSource,
    encoder: RowEncoder,
    recipe: Recipe,
    group: Group,
    progress: Callable[[int], None] | None = None,
    max_rows: int | None = None,
) -> Dataset:
    """Find the rows that may be used, before any are divided among ranks, so that all ranks agree on them.

    Each rank reads and tokenises a contiguous share of the dataset once.

    Args:
        source: All rows.
        encoder: How they become tokens.
        recipe: What is overlong, and what happens then.
        group: All ranks.
        progress: Told how many rows of its share this rank has looked at.
        max_rows: Look no further when so many rows that may be used are found; None takes all.

    Raises:
        RecipeError: A row lacks a column, is overlong where that is an error, or none is left.
        RuntimeError: Ranks have different datasets of this name.
    """
    config, key = encoder.config, encoder.key
    _compare_sources(source, encoder, group)
    num_rows = min(len(source), config.limit or len(source))
    wanted = num_rows if max_rows is None else max_rows
    rows, num_seen, num_mine, patience = torch.zeros(0, dtype=torch.int64), 0, 0, 1
    while len(rows) < wanted and num_seen < num_rows:
        window = range(num_seen, min(num_rows, num_seen + patience * (wanted - len(rows))))
        num_seen, patience = window.stop, 2 * patience
        place = group.ranks.index(group.rank)
        mine = window[len(window) * place // group.size : len(window) * (place + 1) // group.size]
        kept: list[int] = []
        for index in mine:
            where = source.describe(index)
            if _fits(encoder.encode(source.row(index), where), where, recipe, key):
                kept.append(index)
            num_mine += 1
            if progress is not None and (num_mine % 256 == 0 or index == mine[-1]):
                progress(num_mine)
        found = group.gather(torch.tensor(kept, dtype=torch.int64), f"the usable rows of {key}")
        rows = torch.cat([rows, *found])[:wanted]
    if not len(rows):
        limits = f"data.max_prompt_tokens (now {recipe.data.max_prompt_tokens})"
        if config.response is not None:
            limits += f" or data.max_response_tokens (now {recipe.data.max_response_tokens})"
        raise RecipeError.at("data", f"all {num_rows} rows of {config.path} are overlong: raise {limits}")
    num_used = num_seen if len(rows) < wanted else int(rows[-1]) + 1
    return Dataset(source, encoder, rows.numpy(), num_used - len(rows))


def _compare_sources(source: RowSource, encoder: RowEncoder, group: Group) -> None:
    """Stop on all ranks when some have other rows: each row is read by whoever needs it."""
    text = f"{len(source)} {source.fingerprint()}"
    others = group.unlike_first(text, f"the datasets of all workers for {encoder.key}")
    if others:
        raise RuntimeError(
            f"rank {group.rank}: ranks {format_ranks(others)} have other data for {encoder.key} than rank "
            f"{group.ranks[0]} (here {encoder.config.path} has {len(source)} rows): give all machines the same files"
        )


def _fits(encoded: Encoded, place: str, recipe: Recipe, key: str) -> bool:
    """Whether a row is short enough to use."""
    data = recipe.data
    if not encoded.prompt:
        raise RecipeError.at(key, f"{place} has an empty prompt")
    for what, length, limit in (
        ("prompt", len(encoded.prompt), data.max_prompt_tokens),
        ("response", len(encoded.response), data.max_response_tokens),
    ):
        if length > limit:
            if data.overlong == "error":
                raise RecipeError.at(
                    f"data.max_{what}_tokens",
                    f"{place} has a {what} of {length} tokens, more than {limit}: raise it, or set data.overlong=drop",
                )
            return False
    return True
