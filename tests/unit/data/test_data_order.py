"""The order of rows: curricula, and the turns of a mixture."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import mixed_recipe, open_sets, recipe_of, shards_of, take, write_jsonl

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.dataset import Interleaving, RowOrder

weights = st.one_of(
    st.integers(1, 40).map(float),
    st.sampled_from([0.1, 0.25, 0.333, 0.5, 0.7, 1e-3]),
    st.floats(1e-3, 1e3, allow_subnormal=False),
)
mixtures = st.lists(weights, min_size=1, max_size=7)


@given(mixtures, st.integers(0, 100), st.integers(1, 400))
def test_any_beginning_of_a_mixture_is_true_to_the_weights(parts: list[float], seed: int, length: int) -> None:
    turns = Interleaving(parts, seed)
    shares = [Fraction(str(part)) for part in parts]
    counts = [0] * len(parts)
    for position in range(length):
        dataset, place = turns.at(position)
        assert place == counts[dataset]
        counts[dataset] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - (position + 1) * share / sum(shares)) < 1
    assert turns.counts(length) == counts


@given(mixtures, st.integers(0, 3), st.integers(0, 3000))
def test_a_place_in_a_mixture_is_found_without_those_before(parts: list[float], seed: int, position: int) -> None:
    walked, found = Interleaving(parts, seed), Interleaving(parts, seed)
    for before in range(position):
        walked.at(before)
    assert found.at(position) == walked.at(position)
    assert found.counts(position) == walked.counts(position)


def test_a_mixture_of_whole_shares_repeats_itself() -> None:
    turns = Interleaving([0.7, 0.2, 0.1], 3)
    first = [turns.at(position)[0] for position in range(10)]
    assert sorted(first) == [0] * 7 + [1] * 2 + [2]
    far = 10**15
    assert [turns.at(far + position)[0] for position in range(10)] == first
    assert turns.at(far) == (first[0], far * 7 // 10 if first[0] == 0 else turns.at(far)[1])
    assert turns.counts(far) == [far * 7 // 10, far * 2 // 10, far // 10]


def test_the_seed_decides_between_equals() -> None:
    first = {Interleaving([1.0, 1.0, 1.0], seed).at(0)[0] for seed in range(20)}
    assert first == {0, 1, 2}


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    st.integers(0, 5),
    st.integers(0, 4),
    st.booleans(),
)
def test_an_epoch_of_a_curriculum_is_sorted_and_complete(
    values: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    count = len(values)
    rows, levels = np.arange(100, 100 + count), np.array(values, dtype=np.float64)
    order = RowOrder(rows, seed, levels=levels, shuffle=shuffle)
    taken = [order.row_at(epoch * count + place) - 100 for place in range(count)]
    assert sorted(taken) == list(range(count))
    assert [values[row] for row in taken] == sorted(values)
    if not shuffle:  # rows with equal values are in file order
        assert taken == sorted(taken, key=lambda row: values[row])


def test_equal_rows_of_a_curriculum_are_shuffled_anew_in_every_epoch() -> None:
    order = RowOrder(np.arange(16), 1, levels=np.repeat([0.0, 1.0], 8), shuffle=True)
    epochs = [tuple(order.row_at(16 * epoch + place) for place in range(16)) for epoch in range(4)]
    assert len(set(epochs)) == 4
    assert all(set(epoch[:8]) == set(range(8)) for epoch in epochs)


@pytest.mark.parametrize(("order", "expected"), [("ascending", "bdca"), ("descending", "adcb")])
def test_a_curriculum_sorts_by_its_column(tmp_path: Path, order: str, expected: str) -> None:
    levels = {"a": 3, "b": -1.5, "c": 0, "d": 0}
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": name, "level": levels[name]} for name in "adcb"])
    curriculum: Json = {"column": "level", "order": order}
    recipe = recipe_of(path, {"curriculum": curriculum, "shuffle": False}, batch={"prompts_per_step": 4})
    assert [prompt for _, prompt in take(shards_of(recipe, 2), 2)] == list(expected * 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"levels": 1}, r"data.train.curriculum: .*a.jsonl:2 has no column 'level' \(did you mean 'levels'\?\)"),
        ({"level": "hard"}, r"a.jsonl:2: column 'level' holds 'hard'; rows are sorted by finite numbers: write one"),
        ({"level": None}, r"a.jsonl:2: column 'level' holds None"),
        ({"level": True}, r"a.jsonl:2: column 'level' holds True"),
        ({"level": float("nan")}, r"a.jsonl:2: column 'level' holds nan"),
    ],
)
def test_a_row_that_cannot_be_sorted_is_named(tmp_path: Path, row: dict[str, Json], message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "level": 1}, {"prompt": "b", **row}])
    with pytest.raises(RecipeError, match=message):
        open_sets(recipe_of(path, {"curriculum": "level"}))


def test_each_dataset_of_a_mixture_has_epochs_of_its_own(tmp_path: Path) -> None:
    for name, count in (("small", 3), ("large", 50)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{index}"} for index in range(count)])
    train: Json = {
        "small": {"path": str(tmp_path / "small.jsonl"), "weight": 0.25},
        "large": {"path": str(tmp_path / "large.jsonl"), "weight": 0.75},
    }
    recipe = mixed_recipe(train, batch={"prompts_per_step": 8})
    (loader,) = shards_of(recipe, 1)
    taken = [str(prompt) for _, prompt in take([loader], 6)]
    small = [prompt for prompt in taken if prompt.startswith("small")]
    large = [prompt for prompt in taken if prompt.startswith("large")]
    assert (len(small), len(large)) == (12, 36)
    for epoch in range(4):
        assert sorted(small[3 * epoch : 3 * epoch + 3]) == ["small0", "small1", "small2"]
    assert len({tuple(small[3 * epoch : 3 * epoch + 3]) for epoch in range(4)}) > 1
    assert len(set(large)) == 36, "none comes twice within an epoch"
    assert loader.numbers() == {
        "data/position": 48,
        "data/epoch": 36 / 50,
        "data/epoch/large": 36 / 50,
        "data/epoch/small": 4.0,
    }


def test_rows_of_a_mixture_know_their_dataset(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [{f"prompt_{name}": name, "kind": 7}])
    train: Json = {
        "b": {"path": str(tmp_path / "b.jsonl"), "prompt": "prompt_b", "source": "kind"},
        "a": {"path": str(tmp_path / "a.jsonl"), "prompt": "prompt_a"},
    }
    recipe = mixed_recipe(train, batch={"prompts_per_step": 2})
    rows = {str(row["_dataset"]): row for row in shards_of(recipe, 1)[0].next().objects("rows")}
    assert rows == {
        "a": {"prompt_a": "a", "kind": 7, "_dataset": "a"},
        "b": {"prompt_b": "b", "kind": 7, "_dataset": "b"},
    }
    assert {name: recipe.data.train_set_of(row).prompt for name, row in rows.items()} == {
        "a": "prompt_a",
        "b": "prompt_b",
    }
    assert {name: recipe.data.source_of(row) for name, row in rows.items()} == {"a": "a", "b": "7"}
    single = recipe_of(tmp_path / "a.jsonl")
    assert single.data.source_of({"prompt": "a"}) is None


def test_a_column_that_a_mixture_needs_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "_dataset": "x"}])
    recipe = mixed_recipe({"one": {"path": str(path)}}, batch={"prompts_per_step": 1})
    with pytest.raises(RecipeError, match=r"data.train.one: rows have a column '_dataset'.*rename it"):
        shards_of(recipe, 1)[0].next()
    kept = mixed_recipe({"one": {"path": str(path), "columns": []}}, batch={"prompts_per_step": 1})
    assert shards_of(kept, 1)[0].next().objects("rows")[0] == {"prompt": "a", "_dataset": "one"}


def test_an_empty_dataset_of_a_mixture_is_named(tmp_path: Path) -> None:
    full, empty = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}]), write_jsonl(tmp_path / "b.jsonl", [])
    for more in ({}, {"streaming": True}):
        recipe = mixed_recipe({"full": {"path": str(full)}, "empty": {"path": str(empty), **more}})
        with pytest.raises(RecipeError, match=r"data.train.empty.path: .*b.jsonl has no rows"):
            open_sets(recipe)
