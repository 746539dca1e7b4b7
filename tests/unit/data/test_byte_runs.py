"""Rows of columns as a sequence of bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leaderless.data.buffer import wire
from leaderless.data.buffer.wire import ByteColumn, ByteRuns, copy, write


@st.composite
def streams(draw: st.DrawFn) -> tuple[ByteRuns, list[ByteColumn], bytes]:
    """A sequence, its columns, and the same bytes assembled row by row."""
    columns, parts, expected = [], [], b""
    for _ in range(draw(st.integers(0, 3))):
        lengths = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 40, 300]), max_size=8)), dtype=np.int64)
        dtype, shape = draw(st.sampled_from([(torch.bool, ()), (torch.int16, (3,)), (torch.float64, ())]))
        values = torch.randint(0, 2, (int(lengths.sum()), *shape)).to(dtype)
        rows = np.array(draw(st.lists(st.integers(0, len(lengths) - 1))) if len(lengths) else [], dtype=np.int64)
        column = ByteColumn.of(values, lengths)
        ends = lengths.cumsum()
        expected += b"".join(values[ends[row] - lengths[row] : ends[row]].numpy().tobytes() for row in rows)
        columns.append(column)
        parts.append((column, rows))
    return ByteRuns(parts), columns, expected


@given(streams(), st.integers(1, 700))
def test_pieces_are_the_bytes_of_the_rows_one_behind_the_other(
    stream: tuple[ByteRuns, list[ByteColumn], bytes], size: int
) -> None:
    runs, _, expected = stream
    assert runs.size == len(expected)
    for begin in range(0, runs.size, size):
        end = min(begin + size, runs.size)
        assert runs.read(begin, end).tobytes() == expected[begin:end]


@given(st.data(), st.integers(1, 700))
def test_what_is_written_piece_by_piece_is_read_again_and_nothing_else_is_touched(
    data: st.DataObject, size: int
) -> None:
    sizes = np.array(data.draw(st.lists(st.sampled_from([0, 1, 8, 200]), min_size=1, max_size=9)), dtype=np.int64)
    values = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    rows = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True)), dtype=np.int64)
    runs = ByteRuns([(ByteColumn.of(values, sizes), rows)])
    content = np.random.default_rng(0).integers(1, 255, runs.size).astype(np.uint8)
    for begin in range(0, runs.size, size):
        end = min(begin + size, runs.size)
        write(runs.parts(begin, end), content[begin:end])
    assert not runs.size or np.array_equal(runs.read(0, runs.size), content)
    assert int((values != 0).sum()) == runs.size


def test_neighbours_are_sent_from_where_they_lie() -> None:
    values = torch.arange(10)
    runs = ByteRuns([(ByteColumn.of(values, np.full(10, 1)), np.array([2, 3, 4, 5, 8]))])
    lying = runs.read(8, 32)
    assert lying.view(np.int64).tolist() == [3, 4, 5]
    lying[:8] = 0
    assert values[3] == 0  # the same memory, not a copy
    runs.read(24, 40)[:8] = 1
    assert values[5] == 5  # those do not lie together


def test_rows_are_copied_to_other_places_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "COPY_BYTES", 20)
    every_byte = 0x0101010101010101
    values, target = torch.arange(1, 13) * every_byte, torch.zeros(12, dtype=torch.int64)
    lengths = np.array([3, 1, 5, 3])
    source = ByteRuns([(ByteColumn.of(values, lengths), np.array([0, 2]))])
    copy(source, ByteRuns([(ByteColumn.of(target, np.array([3, 4, 5])), np.array([0, 2]))]))
    assert (target // every_byte).tolist() == [1, 2, 3, 0, 0, 0, 0, 5, 6, 7, 8, 9]
    assert not (target % every_byte).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int32])
def test_memory_of_any_type_is_taken_as_it_is(dtype: torch.dtype) -> None:
    values = torch.ones(4, 2, dtype=dtype)
    column = ByteColumn.of(values, np.array([1, 3]))
    assert column.data.nbytes == values.numel() * values.element_size()
    assert column.sizes.tolist() == [2 * values.element_size(), 6 * values.element_size()]
