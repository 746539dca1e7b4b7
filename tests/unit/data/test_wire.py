"""Batches as bytes and back."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.buffer.wire import DTYPES, ColumnSchema, Schema, schema_from_json, schema_of, schema_to_json
from leaderless.worker.checkpoint.channel_rows import pack, unpack

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def raw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values of any bit pattern, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def as_bytes(tensor: Tensor) -> list[int]:
    numbers: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return numbers


def assert_same(left: Column, right: Column) -> None:
    """Equal in type, shape and every bit."""
    if isinstance(left, Jagged):
        assert isinstance(right, Jagged)
        assert left.axis == right.axis
        assert torch.equal(left.lengths, right.lengths)
        left, right = left.values, right.values
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert as_bytes(left) == as_bytes(right)
    else:
        assert left == right


def round_trip(batch: Batch) -> Batch:
    message = pack(batch)
    assert message.dtype == torch.uint8
    return unpack(message, schema_from_json(schema_to_json(schema_of(batch))))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows with columns of every kind and type."""
    num_rows = draw(st.integers(0, 5))
    columns: dict[str, Column] = {}
    lengths = {
        axis: torch.tensor(draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows)), dtype=torch.int64)
        for axis in ("tokens", "patches")
    }
    for index in range(draw(st.integers(0, 6))):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        match draw(st.sampled_from(["dense", "jagged", "object"])):
            case "dense":
                columns[f"c{index}"] = raw((num_rows, *shape), dtype, index)
            case "jagged":
                axis = draw(st.sampled_from(sorted(lengths)))
                total = int(lengths[axis].sum())
                columns[f"c{index}"] = Jagged(raw((total, *shape), dtype, index), lengths[axis], axis)
            case _:
                columns[f"c{index}"] = tuple(draw(st.lists(JSON, min_size=num_rows, max_size=num_rows)))
    return Batch(torch.randperm(num_rows), columns)


@given(batches())
def test_every_byte_survives(batch: Batch) -> None:
    there = round_trip(batch)
    assert torch.equal(there.ids, batch.ids)
    assert there.names() == batch.names()
    for name, column in batch.columns.items():
        assert_same(there.columns[name], column)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_survives_dense_and_jagged(dtype: torch.dtype) -> None:
    lengths = torch.tensor([0, 3, 0])
    columns: dict[str, Column] = {
        "dense": raw((3, 2), dtype, 1),
        "jagged": Jagged(raw((3, 5), dtype, 2), lengths, "tokens"),
        "behind": raw((3,), torch.int64, 3),  # still aligned, whatever came before it
    }
    there = round_trip(Batch(torch.tensor([5, 6, 7]), columns))
    for name, column in columns.items():
        assert_same(there.columns[name], column)


def test_tensors_that_are_not_contiguous_survive() -> None:
    column = torch.arange(12).view(3, 4).t()
    assert_same(round_trip(Batch(torch.arange(4), {"x": column})).columns["x"], column)


@pytest.mark.parametrize(
    "value",
    ["", "naïve 🤖 数学", '\x00\n"', "\ud83d alone", {"a": [1, {"b": None}], "": []}, 2**80, -0.0, 1e-320, [], {}],
    ids=str,
)
def test_objects_survive(value: Json) -> None:
    batch = Batch(torch.tensor([1, 2]), {"x": (value, [value])})
    assert round_trip(batch).objects("x") == (value, [value])


def test_a_value_that_json_cannot_hold_is_refused_with_its_column() -> None:
    batch = Batch(torch.tensor([1]), {"picture": (b"bytes",)})
    with pytest.raises(TypeError, match="column 'picture'"):
        pack(batch)


def test_a_tensor_type_that_cannot_travel_is_refused_with_its_column() -> None:
    with pytest.raises(TypeError, match="column 'x' is complex64, which cannot be sent; use one of bool, uint8"):
        schema_of(Batch(torch.tensor([1]), {"x": torch.zeros(1, dtype=torch.complex64)}))


def test_unpacked_tensors_are_views_of_the_message() -> None:
    message = pack(Batch(torch.tensor([1]), {"x": torch.tensor([[1.0, 2.0]])}))
    batch = unpack(message, schema_of(Batch(torch.tensor([1]), {"x": torch.tensor([[0.0, 0.0]])})))
    assert batch.dense("x").untyped_storage().data_ptr() == message.untyped_storage().data_ptr()


def test_a_message_that_ends_early_is_refused() -> None:
    batch = Batch(torch.tensor([1, 2]), {"x": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match="message ends at byte"):
        unpack(pack(batch)[:-8], schema_of(batch))


def test_schemas_are_plain_json() -> None:
    schema: Schema = (
        ColumnSchema("a", "dense", "bfloat16", (2, 3), ""),
        ColumnSchema("b", "jagged", "bool", (), "tokens"),
        ColumnSchema("c", "object", "json", (), ""),
    )
    text = schema_to_json(schema)
    assert json.loads(text)[0] == ["a", "dense", "bfloat16", [2, 3], ""]
    assert schema_from_json(text) == schema
