"""Hashes of rows: the same wherever rows lie, another one for anything that changes in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.tiny import random_samples

from leaderless.data.batch import Batch, Jagged
from leaderless.data.row_hashes import HashedRows, RecordedRow
from leaderless.observability.proof_log import RowSum


def rows() -> Batch:
    batch = random_samples([(3, 5), (3, 1), (4, 2), (4, 7)], siblings=2)
    lengths = batch.jagged("tokens").lengths
    scores = Jagged(torch.linspace(-3, 0, int(lengths.sum())), lengths, "response_tokens")
    columns = {"rewards": torch.tensor([0.0, 1.0, 0.5, 1.0]), "reward_valid": torch.ones(4, dtype=torch.bool)}
    return batch.with_columns(columns, rollout_log_probs=scores, reward_details=({}, {}, {}, {}))


def hashes(batch: Batch) -> list[int]:
    return HashedRows(batch, batch.names()).hashes


def test_a_sum_depends_neither_on_order_nor_on_the_rank_that_has_a_row() -> None:
    whole, parts = rows(), [torch.tensor([3, 1]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 2])]
    summed = RowSum()
    for part in parts:
        summed += RowSum.of(hashes(whole.select(part)))
    assert summed == RowSum.of(hashes(whole))
    assert summed.count == 4
    assert len({*hashes(whole)}) == 4
    twice = whole.select(torch.tensor([0, 0, 1, 2]))
    assert RowSum.of(hashes(twice)) != summed


def changed(name: str) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        column = batch[name]
        if isinstance(column, Jagged):
            values = column.values.clone()
            values[0] = ~values[0] if values.dtype == torch.bool else values[0] + 1
            return batch.with_columns({name: Jagged(values, column.lengths, column.axis)})
        assert isinstance(column, torch.Tensor)
        values = column.clone()
        values[0] = ~values[0] if values.dtype == torch.bool else values[0] + 1
        return batch.with_columns({name: values})

    return change


def prompt_changed(batch: Batch) -> Batch:
    assert batch.prompts is not None
    return Batch(batch.ids, batch.columns, changed("prompt_tokens")(batch.prompts), batch.prompt_index)


def regrouped(batch: Batch) -> Batch:
    assert batch.prompts is not None
    prompts = Batch(torch.tensor([5, 1]), batch.prompts.columns)
    return Batch(batch.ids, batch.columns, prompts, batch.prompt_index)


CHANGES: dict[str, Callable[[Batch], Batch]] = {
    **{name: changed(name) for name in ("tokens", "response_mask", "rewards", "reward_valid", "rollout_log_probs")},
    "prompt": prompt_changed,
    "group": regrouped,
    "id": lambda batch: Batch(batch.ids + 9 * (batch.ids == 0), batch.columns, batch.prompts, batch.prompt_index),
    "type": lambda batch: batch.with_columns(rewards=batch.dense("rewards").view(torch.int32)),
    "name": lambda batch: batch.with_columns(scores=batch.dense("rewards")).only(
        {*batch.names(), "scores"} - {"rewards"}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_in_a_row_changes_its_hash(name: str) -> None:
    batch = rows()
    assert hashes(CHANGES[name](batch))[0] != hashes(batch)[0]


def test_a_token_cannot_move_from_one_row_to_another() -> None:
    batch = rows()
    lengths = torch.tensor([4, 2, 2, 7])
    moved = {
        name: Jagged(batch.jagged(name).values, lengths, batch.jagged(name).axis)
        for name in ("tokens", "response_mask", "rollout_log_probs")
    }
    assert RowSum.of(hashes(batch.with_columns(moved))) != RowSum.of(hashes(batch))


def test_a_recorded_row_has_the_hash_of_the_row() -> None:
    batch = rows()
    hashed = HashedRows(batch, batch.names())
    for place in range(len(batch)):
        row = RecordedRow.from_json(hashed.row(place).to_json())
        assert row.hash(int(batch.ids[place]), int(batch.group_ids[place])) == hashed.hashes[place]
        assert row.values("tokens") == batch.jagged("tokens").to_lists()[place]
        assert row.values("rewards") == [batch.dense("rewards")[place]]
        assert row.values("prompt_tokens") == batch.jagged("prompt_tokens").to_lists()[place]
        assert row.values("unknown") is None
    empty = HashedRows(batch.select(torch.tensor([], dtype=torch.int64)), batch.names())
    assert empty.hashes == []


@pytest.mark.parametrize("value", [None, {}, {"columns": 3, "prompt": None}, {"columns": {"a": ["x"]}, "prompt": None}])
def test_what_is_no_recorded_row_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"row|unpack"):
        RecordedRow.from_json(value)  # type: ignore[arg-type]
