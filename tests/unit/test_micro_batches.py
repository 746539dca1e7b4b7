"""A rank's samples in pieces: every token once, within the budget, and targets where they belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import random_samples

from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import Group
from leaderless.training.micro_batches import MicroBatch, make_micro_batches, response_lengths

ALONE = Group((0,), 0)


def batch_of(rows: list[tuple[list[int], list[int], list[bool]]]) -> Batch:
    """Samples of prompt, continuation and which of its tokens the policy sampled."""
    tokens = Jagged.from_lists([row[1] for row in rows], torch.int64, "tokens")
    mask = torch.tensor([sampled for row in rows for sampled in row[2]], dtype=torch.bool)
    prompts = Jagged.from_lists([row[0] for row in rows], torch.int64, "prompt_tokens")
    response_mask = Jagged(mask, tokens.lengths, "tokens")
    return Batch(torch.arange(len(rows)), {"prompt_tokens": prompts, "tokens": tokens, "response_mask": response_mask})


def test_a_micro_batch_by_hand() -> None:
    batch = batch_of(
        [
            ([11, 12], [13, 14, 15], [True, False, True]),  # 14 came from a tool
            ([21], [22], [True]),
            ([31, 32, 33], [], []),
        ]
    )
    (piece,) = make_micro_batches(batch, 100, ALONE)
    assert piece.lengths == [5, 3, 2], "longest first"
    assert piece.tokens.tolist() == [11, 12, 13, 14, 15, 31, 32, 33, 21, 22]
    assert piece.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert piece.targets.tolist() == [13, 15, 22]
    assert piece.select.tolist() == [1, 3, 8], "each is predicted at the token before it"
    assert piece.response_index.tolist() == [0, 1, 2]
    assert response_lengths(batch.jagged("response_mask")).tolist() == [2, 1, 0]


def test_response_index_points_into_the_columns_of_the_whole_batch() -> None:
    batch = batch_of([([1], [2, 3], [True, True]), ([4], [5, 6, 7], [False, True, True]), ([8], [9], [True])])
    pieces = make_micro_batches(batch, 4, ALONE)
    assert [piece.lengths for piece in pieces] == [[4], [3], [2]]
    assert [piece.response_index.tolist() for piece in pieces] == [[2, 3], [0, 1], [4]]
    sampled = torch.tensor([2, 3, 6, 7, 9])
    assert all(torch.equal(sampled[piece.response_index], piece.targets) for piece in pieces)


def test_a_batch_without_rows_gives_no_piece_and_an_empty_one_asks_for_nothing() -> None:
    batch = batch_of([([1], [2], [True])]).select(torch.empty(0, dtype=torch.int64))
    assert make_micro_batches(batch, 4, ALONE) == []
    empty = MicroBatch.empty()
    assert (len(empty.tokens), len(empty.positions), empty.lengths) == (1, 1, [1])
    assert len(empty.select) == len(empty.targets) == len(empty.response_index) == 0


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30)


@given(LENGTHS, st.integers(18, 60))
def test_every_sample_is_in_one_piece_whole_and_no_piece_is_over_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    batch = random_samples(lengths)
    pieces = make_micro_batches(batch, budget, ALONE)
    assert all(sum(piece.lengths) == len(piece.tokens) <= budget for piece in pieces)
    assert sorted(length for piece in pieces for length in piece.lengths) == sorted(sum(pair) for pair in lengths)
    index = torch.cat([piece.response_index for piece in pieces])
    assert sorted(index.tolist()) == list(range(sum(after for _, after in lengths)))
    sampled = batch.jagged("tokens").values
    for piece in pieces:
        assert torch.equal(piece.tokens[piece.select + 1], piece.targets)
        assert torch.equal(sampled[piece.response_index], piece.targets)
    least = -(-sum(sum(pair) for pair in lengths) // budget)
    assert len(pieces) <= 2 * least, "at most half of the budget is wasted"


@pytest.mark.parametrize("budget", [5, 6, 1000])
def test_the_budget_is_the_longest_sample_at_least(budget: int) -> None:
    batch = random_samples([(2, 3), (1, 4), (3, 2)])
    assert len(make_micro_batches(batch, budget, ALONE)) == (1 if budget == 1000 else 3)
