"""Episodes cut into several samples, as rollouts with tools or environments give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from leaderless.data.batch import SIBLING_BITS, Batch, Column, Jagged, select_rows
from leaderless.planner.workflow import stage
from leaderless.stages.context import StageContext

MAX_PARTS = 16
EPISODES_WORKFLOW = """
name: episodes
nodes:
  rollout: {run: rollout, role: policy}
  play: {run: "tests.episodes:play", after: rollout}
  reward: {run: reward, after: play}
  old: {run: log_probs, role: policy, after: play}
  advantage: {run: advantage, after: [reward, old]}
  policy: {run: update, role: policy, after: advantage}
"""


def cut_into_samples(batch: Batch, cuts: Sequence[Sequence[int]]) -> Batch:
    """The same episodes, each in several samples.

    Each sample continues the tokens of those before it, and trains the tokens up to the next cut. Only the last one of
    an episode that was truncated says so. All sampled tokens together stay in their order.

    Args:
        batch: Rows that are an episode each.
        cuts: Tokens of each row, ascending, before which it is cut; the same token twice gives an empty sample.
    """
    counts = batch.dense("response_lengths").tolist()
    ends = [[*some, count] for some, count in zip(cuts, counts, strict=True)]
    index = torch.tensor([row for row, some in enumerate(ends) for _ in some])
    begins = [begin for some in ends for begin in (0, *some[:-1])]
    flat = [end for some in ends for end in some]
    part = torch.tensor([number for some in ends for number in range(len(some))])
    is_last = torch.tensor([number == len(some) - 1 for some in ends for number in range(len(some))])
    columns: dict[str, Column] = {}
    for name, column in batch.columns.items():
        columns[name] = select_rows(column, index)
        if isinstance(column, Jagged) and column.axis == "response_tokens":
            lengths = torch.tensor([end - begin for begin, end in zip(begins, flat, strict=True)])
            columns[name] = Jagged(column.values, lengths, column.axis)
    tokens = [row[:end] for row, end in zip(select_rows(batch.jagged("tokens"), index).to_lists(), flat, strict=True)]
    mask = [[place >= begin for place in range(end)] for begin, end in zip(begins, flat, strict=True)]
    columns |= {
        "tokens": Jagged.from_lists(tokens, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists(mask, torch.bool, "tokens"),
        "response_lengths": torch.tensor([end - begin for begin, end in zip(begins, flat, strict=True)]),
        "truncated": batch.dense("truncated")[index] & is_last,
        "episode_ids": batch.ids[index],
    }
    prompts = None if batch.prompt_index is None else batch.prompt_index[index]
    return Batch(batch.ids[index] * MAX_PARTS + part, columns, batch.prompts, prompts)


@stage(reads=["tokens", "response_mask", "response_lengths", "truncated"], writes=["episode_ids"], rows="regroup")
def play(batch: Batch, context: StageContext) -> Batch:
    """Groups of one to three episodes, each of one to three samples, whatever number of responses was sampled."""
    sibling, group = batch.ids % (1 << SIBLING_BITS), batch.group_ids
    kept = batch.select(sibling <= group % 3)
    lengths = kept.dense("response_lengths").tolist()
    cuts = [
        [length * part // (row % 3 + 1) for part in range(1, row % 3 + 1)]
        for row, length in zip((kept.ids + kept.group_ids).tolist(), lengths, strict=True)
    ]
    return cut_into_samples(kept, cuts)
