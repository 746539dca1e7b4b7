"""Episodes of several samples: put together for statistics, and counted where their samples are on several ranks.

An episode is one run of the policy. Its samples are training sequences of one prompt; put in the order of their ids,
their sampled tokens are the tokens of the episode. Without the column `episode_ids` each sample is an episode, and
nothing here costs anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms import EpisodeParts
from leaderless.data.batch import Batch, Column, Jagged, select_rows
from leaderless.planner.workflow import EPISODE_IDS
from leaderless.stages.context import StageContext
from leaderless.training.micro_batches import response_lengths


@dataclass(frozen=True)
class Episodes:
    """Episodes as one row each, and the way back to their samples.

    Attributes:
        rows: One row for each episode, with the id of the episode. Columns of sampled tokens hold the tokens of all of
            its samples, one after the other, `response_lengths` their number, and `truncated` whether any sample was
            cut. Every other column comes from its last sample.
    """

    rows: Batch
    _samples: _Samples | None  # None if each sample is an episode

    @classmethod
    def of(cls, batch: Batch) -> Episodes:
        """Put the samples of each episode together; all of them are here.

        Raises:
            ValueError: The samples of an episode belong to several prompts, or have different rewards.
        """
        if EPISODE_IDS not in batch:
            return cls(batch, None)
        by_id = torch.argsort(batch.ids)
        order = by_id[torch.argsort(batch.episode_ids[by_id], stable=True)]
        ids, index, sizes = torch.unique_consecutive(batch.episode_ids[order], return_inverse=True, return_counts=True)
        last = order[sizes.cumsum(0) - 1]
        _check_agreement(batch, order, last[index])
        whole = batch.select(last)
        columns: dict[str, Column] = dict(whole.columns)
        for name, column in batch.columns.items():
            if isinstance(column, Jagged) and column.axis == "response_tokens":
                lengths = _sum(column.lengths[order], index, len(ids))
                columns[name] = Jagged(column.select(order).values, lengths, column.axis)
            elif isinstance(column, Tensor) and name in {"response_lengths", "truncated"}:
                columns[name] = _sum(column[order].long(), index, len(ids)).to(column.dtype)
        sampled = batch.dense("response_lengths")[order] if "response_lengths" in batch else None
        rows = Batch(ids, columns, whole.prompts, whole.prompt_index)
        return cls(rows, _Samples(torch.argsort(order), index, sampled))

    def samples(self) -> list[list[int]]:
        """For each episode, the rows of its samples, in order."""
        if self._samples is None:
            return [[row] for row in range(len(self.rows))]
        sizes = torch.bincount(self._samples.index, minlength=len(self.rows)).tolist()
        return [rows.tolist() for rows in torch.split(torch.argsort(self._samples.place), sizes)]

    def of_samples(self, column: Column) -> Column:
        """A column of the episodes as one of their samples; sampled tokens go back to the samples they came from."""
        samples = self._samples
        if samples is None:
            return column
        if not (isinstance(column, Jagged) and column.axis == "response_tokens"):
            return select_rows(column, samples.index[samples.place])
        assert samples.lengths is not None, "the column response_lengths says where each sample ends"
        return Jagged(column.values, samples.lengths, column.axis).select(samples.place)


@dataclass(frozen=True)
class _Samples:
    """The samples, episode after episode."""

    place: Tensor  # [n] int64, place of each row of the batch among them
    index: Tensor  # [n] int64, the episode of each
    lengths: Tensor | None  # [n] int64, sampled tokens of each


def _sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add_(0, index, values)


def _check_agreement(batch: Batch, rows: Tensor, last: Tensor) -> None:
    """Compare rows with the last of their episodes."""
    episode = batch.episode_ids

    def check(is_wrong: Tensor, column: Tensor, what: str, remedy: str) -> None:
        for place in is_wrong.nonzero().squeeze(1)[:1].tolist():
            row, other = int(rows[place]), int(last[place])
            raise ValueError(
                f"samples {int(batch.ids[row])} and {int(batch.ids[other])} of episode {int(episode[row])} {what} "
                f"{column[row].item()} and {column[other].item()}: {remedy}"
            )

    groups = batch.group_ids
    check(groups[rows] != groups[last], groups, "belong to the prompts", "give the episodes of each prompt other ids")
    if "rewards" not in batch:
        return
    rewards, is_valid = batch.dense("rewards"), batch.dense("reward_valid")
    remedy = "an episode has one reward; write it for each of its samples"
    check(is_valid[rows] != is_valid[last], is_valid, "have as reward_valid", remedy)
    check(is_valid[rows] & (rewards[rows] != rewards[last]), rewards, "have the rewards", remedy)


@dataclass(frozen=True)
class Counted:
    """Which samples carry a gradient, and what each has to know of its episode to be weighted.

    Attributes:
        is_counted: [n] bool, the same for all samples of an episode.
        episodes: Length of each sample's episode, and one sample that stands for it.
    """

    is_counted: Tensor
    episodes: EpisodeParts

    @classmethod
    def of(cls, batch: Batch, is_counted: Tensor, context: StageContext) -> Counted:
        """Count the episodes of all ranks of the node, which call it together.

        An episode is counted if all of its samples are, [n] bool. Sums are of whole numbers, so that they do not depend
        on which rank has which samples.
        """
        lengths = response_lengths(batch.jagged("response_mask"))
        if EPISODE_IDS not in batch:
            return cls(is_counted, EpisodeParts.whole(lengths))
        mine = torch.stack([batch.episode_ids, batch.ids, lengths, is_counted.long()], dim=1)
        names, ids, tokens, counts = context.gather(mine).unbind(1)
        episodes, index = torch.unique(names, return_inverse=True)
        is_left_out = _sum(1 - counts, index, len(episodes)) > 0
        first = ids.new_zeros(len(episodes)).scatter_reduce(0, index, ids, "amin", include_self=False)
        here = torch.searchsorted(episodes, batch.episode_ids)
        parts = EpisodeParts(_sum(tokens, index, len(episodes))[here], batch.ids == first[here])
        return cls(~is_left_out[here], parts)

    def select(self, rows: Tensor) -> Counted:
        """Some samples, [n] bool, among them whole episodes of all ranks."""
        parts = EpisodeParts(self.episodes.lengths[rows], self.episodes.is_first[rows])
        return Counted(self.is_counted[rows], parts)


def count_failures(batch: Batch, context: StageContext) -> tuple[int, int]:
    """This rank's share of the episodes without a valid reward, and of all episodes.

    An episode counts once on all ranks of the node, which call it together. Where its samples may be on several ranks,
    the first of these counts all episodes.
    """
    is_valid, ids = batch.dense("reward_valid"), batch.episode_ids
    if EPISODE_IDS in batch and not context.node.needs_whole_groups:
        rows = context.gather(torch.stack([ids, is_valid.long()], dim=1))
        if context.process_group.rank != context.node.layout.ranks[0]:
            return 0, 0
        ids, is_valid = rows[:, 0], rows[:, 1].bool()
    return len(torch.unique(ids[~is_valid])), len(torch.unique(ids))
