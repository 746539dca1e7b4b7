"""Reads lines of metrics as columns: many lines at once where they are plain, else one by one.

A run of 100,000 steps has millions of numbers. Arrow reads them several times as fast as Python's JSON, but differs
from it in a few texts. So Arrow gets only lines that mean the same to both, and Python reads all others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from leaderless.observability.line_file import parse_line
from leaderless.observability.report.curves import Numbers, Steps
from leaderless.observability.report.unchecked_values import as_mapping, as_number

MISSING = np.nan
"""Value of a metric that was not logged at a step."""
NOT_FINITE = np.inf
"""Value of a metric that was logged, but not as a finite number."""
PIECE_BYTES = 2 << 20
"""Size of the pieces of a text that are read at the same time."""
MAX_SLOW_BYTES = 1 << 14
"""Size up to which a text is read line by line if one of its lines has to be; a larger one is divided first."""
MAX_THREADS = 8
"""Largest number of threads that read pieces."""
_NO_METRICS = frozenset({"step", "time_s"})
_NULL = "1.6180339887498949e308"
"""Number that stands for `null` while Arrow reads, as Arrow would take a null for a metric that was not logged."""


class MetricRows(NamedTuple):
    """Some lines of metrics, in their order.

    Attributes:
        steps: [n] steps.
        seconds: [n] values of `time_s`, `MISSING` where there is none.
        columns: [n] values of each metric, in the order in which they first appear; `MISSING` where it was not logged.
    """

    steps: Steps
    seconds: Numbers
    columns: Mapping[str, Numbers]


def read_rows(text: bytes) -> Iterator[MetricRows]:
    """Read complete lines; those that are not JSON objects with a whole number `step` are left out."""
    pieces = list(_pieces(text, PIECE_BYTES))
    if len(pieces) < 2:
        return chain.from_iterable(map(_read_piece, pieces))
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1, MAX_THREADS)) as pool:
        return chain.from_iterable(list(pool.map(_read_piece, pieces)))


def read_many(text: bytes) -> MetricRows | None:
    """Read complete lines at once; None if Python's JSON may differ about some of them."""
    characters = np.frombuffer(text, dtype=np.uint8)
    begins = np.append(0, np.flatnonzero(characters == ord("\n")) + 1)
    num_lines = len(begins) - 1
    # One object a line, without others in it: a deep one could exhaust the stack.
    is_flat = text.endswith(b"\n") and (characters[begins[:-1]] == ord("{")).all() and text.count(b"{") == num_lines
    if not is_flat or b"[" in text or not text.isascii():
        return None
    has_nulls = b"null" in text
    if has_nulls and b"null" in (text := text.replace(b'": null', b'": ' + _NULL.encode())):
        return None
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = arrow_json.read_json(pa.BufferReader(text), read_options=options)
    except pa.ArrowException:
        return None
    found = {name: table.column(name) for name in table.column_names}
    step = found.pop("step", None)
    if step is None or step.type != pa.int64() or step.null_count or len(step) != num_lines:
        return None
    columns: dict[str, Numbers] = {}
    for name, column in found.items():
        if column.type not in {pa.int64(), pa.float64(), pa.bool_()}:
            continue
        values = _numbers(column, has_nulls=has_nulls)
        # JSON has no NaN and no infinity, and Arrow knows more of their names than Python does.
        if values is None or _NULL in name:
            return None
        columns[name] = values
    seconds = columns.pop("time_s", np.full(num_lines, MISSING))
    seconds[np.isinf(seconds)] = MISSING
    whole = step.combine_chunks()
    steps = np.frombuffer(whole.buffers()[1], dtype=np.int64)[whole.offset :][:num_lines]
    return MetricRows(steps, seconds, columns)


def read_each(text: bytes) -> MetricRows:
    """Read complete lines one by one."""
    steps: list[int] = []
    seconds: list[float] = []
    values: dict[str, dict[int, float]] = {}
    for line in text.split(b"\n"):
        record = as_mapping(parse_line(line))
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not -(2**63) <= step < 2**63:
            continue
        for name, value in record.items():
            if name not in _NO_METRICS and (value is None or isinstance(value, int | float)):
                number = as_number(value)
                values.setdefault(name, {})[len(steps)] = NOT_FINITE if number is None else number
        time_s = as_number(record.get("time_s"))
        seconds.append(MISSING if time_s is None else time_s)
        steps.append(step)
    columns = {}
    for name, of_rows in values.items():
        columns[name] = np.full(len(steps), MISSING)
        columns[name][list(of_rows)] = list(of_rows.values())
    return MetricRows(np.array(steps, dtype=np.int64), np.array(seconds, dtype=np.float64), columns)


def _read_piece(text: bytes) -> list[MetricRows]:
    rows = read_many(text) if len(text) > MAX_SLOW_BYTES else read_each(text)
    if rows is not None:
        return [rows]
    halves = list(_pieces(text, len(text) // 2 + 1))
    return [read_each(text)] if len(halves) < 2 else [rows for half in halves for rows in _read_piece(half)]


def _pieces(text: bytes, size: int) -> Iterator[bytes]:
    """Complete lines in pieces of about a size."""
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin + size - 1) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _numbers(column: pa.ChunkedArray, *, has_nulls: bool) -> Numbers | None:
    """The values of a column; None if some are NaN or infinite."""
    numbers = column.combine_chunks()
    known, content = numbers.buffers()
    # By the buffers, as Arrow's `to_numpy` imports pandas and its `cast` other functions: half the time of a file.
    if numbers.type == pa.bool_():
        values = _bits(numbers, content).astype(np.float64)
    else:
        kind = np.float64 if numbers.type == pa.float64() else np.int64
        values = np.frombuffer(content, dtype=kind)[numbers.offset :][: len(numbers)].astype(np.float64)
    is_missing = np.False_ if not numbers.null_count else ~_bits(numbers, known)
    if not (np.isfinite(values) | is_missing).all():
        return None
    if has_nulls:
        values[values == float(_NULL)] = NOT_FINITE
    values[is_missing] = MISSING
    return values


def _bits(numbers: pa.Array, content: pa.Buffer) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8), bitorder="little").astype(np.bool_)
    return bits[numbers.offset :][: len(numbers)]
