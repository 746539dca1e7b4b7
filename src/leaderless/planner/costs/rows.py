"""The rows of a simulated step: how long they are, and how many bytes their columns take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from leaderless.config import Recipe
from leaderless.data.balance import is_repeated, sequence_cost
from leaderless.planner.costs.cluster import WorkloadConfig
from leaderless.planner.make_plan import UNKNOWN_COLUMN_BYTES
from leaderless.workflow import COLUMNS
from leaderless.workflow.columns import Axis, Column

Int = NDArray[np.int64]

ID_BYTES = 8
"""Of a row, and of its prompt, in memory. They do not travel: all ranks know them."""
LENGTH_BYTES = 4
"""A length as it travels: one for all columns of an axis, and one for each object's text."""
HELD_LENGTH_BYTES = 8
"""A length in memory."""


@dataclass(frozen=True)
class Rows:
    """Lengths of some rows, in the order of their ids.

    Attributes:
        groups: [n] place of each row's prompt, ascending.
        prompt_tokens: [n] length of each row's prompt.
        response_tokens: [n] length of what follows it; 0 before there is a response.
        are_samples: Rows point to prompts; else they are prompts.
    """

    groups: Int
    prompt_tokens: Int
    response_tokens: Int
    are_samples: bool

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.groups)

    @cached_property
    def tokens(self) -> Int:
        """[n] length of each row, prompt and response."""
        return self.prompt_tokens + self.response_tokens

    def shared_tokens(self, shards: Int) -> Int:
        """[n] tokens that are computed with another row: of the prompt, where a row before on its shard has it too.

        Args:
            shards: [n] shard of each row.
        """
        if not self.are_samples or not len(self):
            return np.zeros(len(self), dtype=np.int64)
        return self.prompt_tokens * is_repeated(shards * (int(self.groups[-1]) + 1) + self.groups)

    def costs(self, columns: Iterable[str], shards: Int) -> Int:
        """[n] cost of each row in the databuffer's assignment: that of its length, where it travels.

        Args:
            columns: Columns that travel.
            shards: [n] shard that holds each row.
        """
        chosen, nothing = frozenset(columns), np.zeros(len(self), dtype=np.int64)
        responses = self.response_tokens if "tokens" in chosen else nothing
        if "prompt_tokens" not in chosen:
            return np.maximum(sequence_cost(responses), 1)
        return np.maximum(sequence_cost(self.prompt_tokens + responses, self.shared_tokens(shards)), 1)

    def row_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of the values of rows, as they are in memory and as they travel.

        Args:
            columns: Columns of the rows; those of the prompt are not counted here.
        """
        return self._values(column for column in map(column_of, columns) if not self._is_of_prompt(column))

    def prompt_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of the values of each row's prompt; 0 where rows are prompts.

        Args:
            columns: Columns of the rows; only those of the prompt are counted.
        """
        return self._values(column for column in map(column_of, columns) if self._is_of_prompt(column))

    def num_lengths(self, columns: Iterable[str]) -> tuple[int, int]:
        """Lengths that travel with a row, and with a prompt that rows point to.

        Args:
            columns: Columns that travel.
        """
        ragged: tuple[set[str], set[str]] = (set(), set())
        for name in columns:
            column = column_of(name)
            if column.kind != "dense":
                ragged[self._is_of_prompt(column)].add(column.axis or name)
        return len(ragged[0]), len(ragged[1])

    def held_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of rows in memory: the id, that of the prompt, lengths, and the rows' own columns.

        Args:
            columns: Columns that are held; those of the prompt are not counted here.
        """
        chosen = tuple(columns)
        return self.row_bytes(chosen) + 2 * ID_BYTES + HELD_LENGTH_BYTES * self.num_lengths(chosen)[0]

    def _is_of_prompt(self, column: Column) -> bool:
        return column.is_prompt and self.are_samples

    def _values(self, columns: Iterable[Column]) -> Int:
        sizes = np.zeros(len(self), dtype=np.int64)
        for column in columns:
            sizes += column.item_bytes * (1 if column.axis is None else self.lengths_along(column.axis))
        return sizes

    def lengths_along(self, axis: Axis) -> Int:
        """[n] length of each row along an axis."""
        return self.prompt_tokens if axis == "prompt_tokens" else self.response_tokens


def column_of(name: str) -> Column:
    """The column of a name, as the planner sizes it; a user's own column is a number for each row.

    Args:
        name: Name of a column.
    """
    known = COLUMNS["old_log_probs"] if name.endswith("_log_probs") else COLUMNS.get(name)
    if known is None:
        assert COLUMNS["response_lengths"].item_bytes == UNKNOWN_COLUMN_BYTES
        return COLUMNS["response_lengths"]
    return known


@dataclass(frozen=True)
class Workload:
    """The sequences of one step.

    Attributes:
        prompts: The rows of the data.
        samples: The rows behind a rollout.
    """

    prompts: Rows
    samples: Rows


def sample_workload(recipe: Recipe, config: WorkloadConfig) -> Workload:
    """Draw the lengths of a step's sequences; the recipe's seed decides, and the number of ranks does not matter.

    Args:
        recipe: Batch sizes, limits and seed.
        config: The distributions.
    """
    generator = np.random.default_rng(recipe.seed)
    num_prompts, num_siblings = recipe.batch.prompts_per_step, recipe.batch.responses_per_prompt
    limit = recipe.data.max_prompt_tokens
    prompts = _lengths(generator, num_prompts, config.prompt_median_tokens, config.prompt_sigma, limit)
    groups = np.arange(num_prompts)
    is_given = recipe.data.has_responses
    limit = recipe.data.max_response_tokens if is_given else recipe.rollout.max_response_tokens
    count = num_prompts * num_siblings
    responses = _lengths(generator, count, config.response_median_share * limit, config.response_sigma, limit)
    given = responses[::num_siblings] if is_given else np.zeros(num_prompts, dtype=np.int64)
    return Workload(
        prompts=Rows(groups, prompts, given, are_samples=False),
        samples=Rows(np.repeat(groups, num_siblings), np.repeat(prompts, num_siblings), responses, are_samples=True),
    )


def _lengths(generator: np.random.Generator, count: int, median: float, sigma: float, limit: int) -> Int:
    """[count] lognormal lengths, at least 1 and at most the limit."""
    drawn = median * np.exp(sigma * generator.standard_normal(count))
    return np.clip(np.rint(drawn), 1, limit).astype(np.int64)
