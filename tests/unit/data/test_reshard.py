"""Facts about rows that ranks exchange, and the resulting assignment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.buffer.reshard import agree_on_routes
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout, Reshard
from leaderless.planner.entries import QUADRATIC_TOKENS

SIBLINGS = 4


@dataclass
class FirstOfThree(ProcessGroup):
    """The only rank that has rows."""

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:  # noqa: ARG002
        return [rows, rows[:0], rows[:0]]


def samples(prompts: list[int], responses: list[int]) -> Batch:
    """Groups of a prompt and siblings of one length."""
    groups = torch.arange(len(prompts)).repeat_interleave(SIBLINGS)
    lengths = torch.tensor(responses).repeat_interleave(SIBLINGS)
    tokens = Jagged(torch.zeros(sum(prompts), dtype=torch.int64), torch.tensor(prompts), "prompt_tokens")
    return Batch(
        make_sample_ids(groups, torch.arange(SIBLINGS).repeat(len(prompts))),
        {"tokens": Jagged(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, "tokens")},
        Batch(torch.arange(len(prompts)), {"prompt_tokens": tokens}),
        groups,
    )


def groups_of_shards(batch: Batch, quadratic_tokens: int = QUADRATIC_TOKENS) -> list[list[int]]:
    """Groups sent to each of two ranks."""
    columns, layouts = ("prompt_tokens", "tokens"), (Layout((0,), 1), Layout((1, 2), 2))
    action = Reshard("rollout", "rollout", columns, *layouts, keep_groups=True, quadratic_tokens=quadratic_tokens)
    routes = agree_on_routes(action, FirstOfThree((0, 1, 2), 0), batch, None)
    return [sorted(set(batch.group_ids[torch.from_numpy(routes.owners == shard)].tolist())) for shard in (0, 1)]


def test_a_long_prompt_weighs_as_much_as_it_is_computed_which_is_once() -> None:
    # 1,400 tokens, and three times 780. If its prompt counted with each sibling, the first had a shard of its own.
    shards = groups_of_shards(samples([1000, 20, 20, 20], [100, 190, 190, 190]))
    assert sorted(map(len, shards)) == [2, 2]


def test_rows_with_prompts_of_their_own_weigh_all_of_them() -> None:
    batch = samples([1000, 20, 20, 20], [100, 190, 190, 190])
    assert batch.prompts is not None
    assert batch.prompt_index is not None
    own = batch.with_columns(prompt_tokens=batch.prompts.jagged("prompt_tokens").select(batch.prompt_index))
    assert sorted(map(len, groups_of_shards(own))) == [1, 3]


def test_long_rows_weigh_what_attention_takes_in_the_model_that_reads_them() -> None:
    # The last group is as long as two others, and takes as long as three of them where attention is most of the work.
    batch = samples([0, 0, 0, 0], [1000, 1000, 1000, 2000])
    assert sorted(map(len, groups_of_shards(batch, 10**9))) == [2, 2]
    assert sorted(map(len, groups_of_shards(batch, 500))) == [1, 3]
