"""A rank's samples in parts: every token once, within the bound, and targets in their places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import random_samples

from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.images import PromptImage, pack_images
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.shared_prompts import Family
from leaderless.training.micro_batches import EMPTY_TOKENS, MicroBatch, make_micro_batches, response_lengths

ALONE = ProcessGroup((0,), 0)


def batch_of(rows: list[tuple[list[int], list[int], list[bool]]]) -> Batch:
    """Samples of prompt, continuation, and which of its tokens the policy sampled."""
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
    assert piece.families == [Family(2, (2,)), Family(3, ()), Family(1, ())], "longest first"
    assert piece.tokens.tolist() == [11, 12, 13, 14, 31, 32, 33, 21], "without what nothing is predicted from"
    assert piece.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert piece.targets.tolist() == [13, 15, 22]
    assert piece.select.tolist() == [1, 3, 7], "each is predicted at the token before it"
    assert piece.response_index.tolist() == [0, 1, 2]
    assert response_lengths(batch.jagged("response_mask")).tolist() == [2, 1, 0]


def test_images_behind_the_last_sampled_token_are_in_no_pass() -> None:
    batch = batch_of(
        [
            ([11, 12], [7, 7, 13, 7, 7], [False, False, True, False, False]),  # a picture, an answer, a picture
            ([21], [22, 7, 23], [True, False, True]),
            ([31, 32], [7, 33], [False, False]),  # nothing was sampled
        ]
    )
    first, last = PromptImage(2, 1, 2, b"first"), PromptImage(5, 1, 2, b"last")
    rows = [[first, last], [PromptImage(2, 1, 1, b"other")], [PromptImage(2, 1, 1, b"none")]]
    packed = Jagged.from_lists([list(pack_images(images)) for images in rows], torch.uint8, "later_image_bytes")
    (piece,) = make_micro_batches(batch.with_columns(later_images=packed), 100, ALONE)
    assert piece.tokens.tolist() == [11, 12, 7, 7, 21, 22, 7, 31, 32]
    assert piece.images == (first, PromptImage(6, 1, 1, b"other"))


def test_response_index_points_into_the_columns_of_the_whole_batch() -> None:
    batch = batch_of([([1], [2, 3], [True, True]), ([4], [5, 6, 7], [False, True, True]), ([8], [9], [True])])
    pieces = make_micro_batches(batch, 4, ALONE)
    assert [piece.families for piece in pieces] == [[Family(1, (2,)), Family(1, ())], [Family(1, (1,))]]
    assert [piece.response_index.tolist() for piece in pieces] == [[2, 3, 4], [0, 1]]
    sampled = torch.tensor([2, 3, 6, 7, 9])
    assert all(torch.equal(sampled[piece.response_index], piece.targets) for piece in pieces)


def test_a_batch_without_rows_gives_no_piece_and_an_empty_one_asks_for_nothing() -> None:
    batch = batch_of([([1], [2], [True])]).select(torch.empty(0, dtype=torch.int64))
    assert make_micro_batches(batch, 4, ALONE) == []
    empty = MicroBatch.empty()
    count = EMPTY_TOKENS
    assert (len(empty.tokens), len(empty.positions), empty.families) == (count, count, [Family(count, ())])
    assert len(empty.select) == len(empty.targets) == len(empty.response_index) == 0


def test_siblings_share_their_prompt_by_hand() -> None:
    own = batch_of(
        [
            ([1, 2], [11, 12, 13], [True, True, True]),
            ([3], [21, 22], [True, True]),
            ([1, 2], [31], [True]),
            ([1, 2], [41, 42, 43, 44], [False, True, True, False]),  # 41 and 44 came from a tool
        ]
    )
    prompts = Batch(torch.arange(2), {"prompt_tokens": Jagged.from_lists([[1, 2], [3]], torch.int64, "prompt_tokens")})
    columns = {name: own.jagged(name) for name in ("tokens", "response_mask")}
    batch = Batch(own.ids, columns, prompts, torch.tensor([0, 1, 0, 0]))
    (piece,) = make_micro_batches(batch, 100, ALONE)
    assert piece.families == [Family(2, (2, 2)), Family(1, (1,))]
    assert piece.tokens.tolist() == [1, 2, 11, 12, 41, 42, 3, 21], "the prompt once, before all that follows it"
    assert piece.positions.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    assert piece.targets.tolist() == [11, 12, 13, 42, 43, 31, 21, 22]
    assert piece.select.tolist() == [1, 2, 3, 4, 5, 1, 6, 7], "first tokens are predicted at the prompt's last"
    assert piece.response_index.tolist() == [0, 1, 2, 6, 7, 5, 3, 4]
    assert piece.response_lengths.tolist() == [3, 2, 1, 2]


def test_siblings_that_do_not_fit_together_are_parted_and_bring_their_prompt() -> None:
    batch = random_samples([(10, 6)] * 4 + [(3, 4)], siblings=4)
    pieces = make_micro_batches(batch, 21, ALONE)
    assert [piece.families for piece in pieces] == [[Family(10, (5, 5))], [Family(10, (5, 5))], [Family(3, (3,))]]
    assert [len(piece.families) for piece in make_micro_batches(batch, 30, ALONE)] == [1, 1]
    assert len(make_micro_batches(batch, 36, ALONE)) == 1


def test_prompts_are_put_together_up_to_what_is_enough_but_siblings_beyond_it() -> None:
    batch = random_samples([(10, 6)] * 4 + [(3, 4)] * 2 + [(4, 4)] * 2, siblings=2)
    pieces = make_micro_batches(batch, 40, ALONE, enough_tokens=19)
    assert [len(piece.tokens) for piece in pieces] == [20, 20, 19]


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30)


@given(LENGTHS, st.integers(18, 60), st.integers(1, 5))
def test_every_sample_is_in_one_piece_whole_and_no_piece_is_over_the_budget(
    lengths: list[tuple[int, int]], budget: int, siblings: int
) -> None:
    batch = random_samples(lengths, siblings=siblings)
    pieces = make_micro_batches(batch, budget, ALONE)
    index = torch.cat([piece.response_index for piece in pieces])
    assert sorted(index.tolist()) == list(range(sum(after for _, after in lengths)))
    sampled = batch.jagged("tokens").values
    prompts = batch.jagged("prompt_tokens").rows()
    rows = [row for row, (_, after) in enumerate(lengths) for _ in range(after)]
    for piece in pieces:
        assert sum(family.num_tokens for family in piece.families) == len(piece.tokens) <= budget
        assert torch.equal(sampled[piece.response_index], piece.targets)
        for place, target in zip(piece.select.tolist(), piece.response_index.tolist(), strict=True):
            row = rows[target]
            begin = target - rows.index(row)
            before = torch.cat([prompts[row], sampled[target - begin : target]])
            assert piece.tokens[place] == before[-1]
            assert piece.positions[place] == len(before) - 1
    least = -(-sum(len(piece.tokens) for piece in pieces) // budget)
    assert len(pieces) <= 2 * least, "at most half of the budget is wasted"


@pytest.mark.parametrize("budget", [4, 5, 1000])
def test_the_budget_is_the_longest_sample_at_least(budget: int) -> None:
    batch = random_samples([(2, 3), (1, 4), (3, 2)])
    assert len(make_micro_batches(batch, budget, ALONE)) == (1 if budget == 1000 else 3)
