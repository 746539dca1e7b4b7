"""Rows and columns: selection, concatenation, the prompt table, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, concat_columns, ragged_index, select_rows


def jagged(*rows: list[int], axis: str = "tokens") -> Jagged:
    return Jagged.from_lists(rows, torch.int64, axis)


def prompts() -> Batch:
    """Three prompts."""
    columns = {"prompt_tokens": jagged([1], [2, 2], [3, 3, 3], axis="prompt_tokens"), "rows": ("a", "b", "c")}
    return Batch(torch.tensor([10, 20, 30]), columns)


def samples() -> Batch:
    """Five samples of them, in no particular order."""
    columns = {"tokens": jagged([5], [], [7, 7], [8], [9]), "reward": torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5])}
    return Batch(torch.tensor([203, 101, 102, 301, 201]), columns, prompts(), torch.tensor([1, 0, 0, 2, 1]))


def assert_equal(left: Batch, right: Batch) -> None:
    """Check that two batches have the same rows in the same order with the same columns, prompts included."""
    assert torch.equal(left.ids, right.ids)
    assert torch.equal(left.group_ids, right.group_ids)
    assert left.names() == right.names()
    for name in left.names():
        a, b = left[name], right[name]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            assert torch.equal(a, b)
        elif isinstance(a, Jagged) and isinstance(b, Jagged):
            assert a.to_lists() == b.to_lists()
            assert a.axis == b.axis
        else:
            assert a == b


def test_ragged_index_lists_runs_one_behind_the_other() -> None:
    assert ragged_index(torch.tensor([4, 0, 9]), torch.tensor([2, 0, 3])).tolist() == [4, 5, 9, 10, 11]
    assert ragged_index(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_jagged_knows_its_rows() -> None:
    column = jagged([1, 2], [], [3])
    assert len(column) == 3
    assert column.offsets.tolist() == [0, 2, 2, 3]
    assert column.to_lists() == [[1, 2], [], [3]]
    assert column.select(torch.tensor([2, 0, 0, 1])).to_lists() == [[3], [1, 2], [1, 2], []]


def test_jagged_rows_may_have_more_dimensions() -> None:
    values = torch.arange(12).view(3, 2, 2)
    column = Jagged(values, torch.tensor([1, 0, 2]), "patches")
    assert torch.equal(column.select(torch.tensor([2, 0])).values, values[[1, 2, 0]])


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (torch.zeros(3), torch.tensor([1, 1]), r"lengths on axis 'tokens' sum to 2.*float32 \[3\]"),
        (torch.zeros(2), torch.tensor([1, 1], dtype=torch.int32), r"must be int64 \[n\], not int32 \[2\]"),
        (torch.zeros(2), torch.tensor([[1, 1]]), r"must be int64 \[n\], not int64 \[1, 2\]"),
        (torch.zeros(()), torch.tensor([], dtype=torch.int64), r"sum to 0"),
        (torch.zeros(1), torch.tensor([2, -1]), r"negative"),
    ],
)
def test_jagged_refuses_lengths_that_do_not_fit(values: Tensor, lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Jagged(values, lengths, "tokens")


def test_columns_of_prompts_are_repeated_for_their_samples() -> None:
    batch = samples()
    assert batch.jagged("prompt_tokens").to_lists() == [[2, 2], [1], [1], [3, 3, 3], [2, 2]]
    assert batch.objects("rows") == ("b", "a", "a", "c", "b")
    assert batch.group_ids.tolist() == [20, 10, 10, 30, 20]
    assert "rows" in batch
    assert "missing" not in batch
    assert batch.names() == ["prompt_tokens", "reward", "rows", "tokens"]


def test_columns_are_given_as_what_they_are() -> None:
    batch = samples()
    assert batch.dense("reward").shape == (5,)
    for wrong, name in ((batch.dense, "tokens"), (batch.jagged, "reward"), (batch.objects, "tokens")):
        with pytest.raises(TypeError, match=name):
            wrong(name)
    with pytest.raises(KeyError, match="no column 'rewards' here; there are: prompt_tokens, reward"):
        batch["rewards"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Batch(torch.tensor([1.0])), "ids must be int64"),
        (lambda: Batch(torch.tensor([1, 2]), {"x": torch.zeros(3)}), "column 'x' has 3 rows, the batch has 2"),
        (lambda: Batch(torch.tensor([1]), {"x": ("a", "b")}), "column 'x' has 2 rows"),
        (lambda: Batch(torch.tensor([1]), {"x": jagged([1]), "y": jagged([1, 2])}), "'x' and 'y' differ in length"),
        (lambda: Batch(torch.tensor([1]), {}, prompts()), "go together"),
        (lambda: Batch(torch.tensor([1]), {}, prompts(), torch.tensor([0, 1])), r"prompt_index must be \[1\]"),
    ],
)
def test_a_batch_refuses_columns_that_do_not_fit(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()


def test_columns_on_different_axes_may_differ_in_length() -> None:
    Batch(torch.tensor([1]), {"x": jagged([1]), "y": jagged([1, 2], axis="response_tokens")})


def test_select_keeps_exactly_the_prompts_that_are_needed() -> None:
    batch = samples()
    index = torch.tensor([4, 0, 3])
    some = batch.select(index)
    assert some.ids.tolist() == [201, 203, 301]
    assert some.prompts is not None
    assert some.prompts.ids.tolist() == [20, 30]
    assert some.objects("rows") == ("b", "b", "c")
    assert some.jagged("tokens").to_lists() == [[9], [5], [8]]
    mask = torch.tensor([False, True, False, False, True])
    assert_equal(batch.select(mask), batch.select(torch.tensor([1, 4])))


def test_only_leaves_the_columns_asked_for_and_all_rows() -> None:
    some = samples().only(["reward", "rows"])
    assert some.names() == ["reward", "rows"]
    assert some.group_ids.tolist() == samples().group_ids.tolist()
    with pytest.raises(KeyError, match="no column 'values' here"):
        samples().only(["reward", "values"])


def test_a_column_of_rows_hides_the_prompts_column_of_that_name() -> None:
    batch = samples().with_columns(rows=("1", "2", "3", "4", "5"))
    assert batch.objects("rows") == ("1", "2", "3", "4", "5")
    some = batch.only(["rows"])
    assert some.objects("rows") == ("1", "2", "3", "4", "5")
    assert some.prompts is not None
    assert some.prompts.names() == []


@pytest.mark.parametrize("cut", range(6))
def test_concat_undoes_a_division(cut: int) -> None:
    batch = samples()
    parts = [batch.select(torch.arange(cut)), batch.select(torch.arange(cut, 5))]
    whole = Batch.concat(parts)
    assert_equal(whole, batch)
    assert whole.prompts is not None
    assert sorted(whole.prompts.ids.tolist()) == [10, 20, 30]  # each once, although samples of some are in both parts


def test_concat_of_prompts_and_of_one() -> None:
    batch = prompts()
    assert_equal(Batch.concat([batch.select(torch.tensor([0])), batch.select(torch.tensor([1, 2]))]), batch)
    assert Batch.concat([batch]) is batch


def test_a_batch_without_rows_keeps_all_its_columns() -> None:
    nothing = samples().select(torch.tensor([], dtype=torch.int64))
    assert len(nothing) == 0
    assert nothing.names() == samples().names()
    assert "prompt_tokens" in nothing
    assert nothing.only(["rows", "tokens"]).names() == ["rows", "tokens"]
    assert nothing.only(["tokens"]).names() == ["tokens"]
    assert nothing.objects("rows") == ()
    assert nothing.jagged("prompt_tokens").values.dtype == torch.int64
    assert_equal(Batch.concat([nothing, samples(), nothing]), samples())
    assert_equal(Batch.concat([nothing, nothing]), nothing)


def test_columns_of_each_kind_are_selected_and_joined() -> None:
    index = torch.tensor([1, 0])
    first, second = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])
    assert torch.equal(select_rows(first, index), torch.tensor([[3, 4], [1, 2]]))
    assert select_rows(("a", "b"), index) == ("b", "a")
    assert torch.equal(concat_columns([first, second]), torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert concat_columns([("a",), ("b", None)]) == ("a", "b", None)
    joined = concat_columns([jagged([1], []), jagged([2, 3])])
    assert isinstance(joined, Jagged)
    assert joined.to_lists() == [[1], [], [2, 3]]
