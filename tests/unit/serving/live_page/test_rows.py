"""Lines that are read many at once hold the same numbers as lines that are read one by one."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.observability.report.runs import metrics_row

from leaderless.serving.live_page import metric_rows as rows_module
from leaderless.serving.live_page.metric_rows import MetricRows, read_each, read_many, read_rows

NAMES = st.sampled_from(["step", "time_s", "a", "b/c", "d(0->1)", 'e"', "f: null", "é", "[g", "{h", "null", "1.6e308"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["", "x", "null", '": null', "NaN", "2020-01-01", [1], [None], {"i": 1}, 10**400, 2**53 + 1, 1e308]
    ),
)
LINES = st.lists(st.dictionaries(NAMES, VALUES, max_size=5).map(lambda row: {"step": 1, "a": 0.5} | row), max_size=6)
BYTES = [bytes([value]) for value in b'{}[]:,"\\ \t\r\n019.-+eENaInfull\x00\x7f\x80\xff']


def text_of(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def same(one: MetricRows, other: MetricRows) -> bool:
    return (
        one.steps.tolist() == other.steps.tolist()
        and np.array_equal(one.seconds, other.seconds, equal_nan=True)
        and list(one.columns) == list(other.columns)
        and all(np.array_equal(one.columns[name], other.columns[name], equal_nan=True) for name in one.columns)
    )


@given(LINES, st.lists(st.tuples(st.floats(0, 1), st.sampled_from(BYTES), st.integers(0, 2)), max_size=3))
@example([{"step": 1, "a": None}, {"step": 2, "b": 1}], [])
def test_many_lines_are_read_as_each_of_them_or_not_at_all(rows, changes) -> None:
    text = text_of(rows)
    for where, byte, num_replaced in changes:
        place = int(where * len(text))
        text = text[:place] + byte + text[place + num_replaced :]
    text = text[: text.rfind(b"\n") + 1]
    many = read_many(text)
    assert many is None or same(many, read_each(text))


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1} {"step": 2}\n\n',
        b'{"step": 1, "a": Inf}\n',
        b'{"step": 1, "a": -NaN}\n',
        b'{"step": 1, "a": NaN}\n',
        b'{"step": 1, "a" : null}\n',
        b'{"step": 1, "a\\": null": 2}\n',
        b'{"step": 1, "a": 1, "a": 2}\n',
        b'{"step": 1, "a":\n2}\n',
        b'{"step": 1.0, "a": 2}\n',
        b'{"step": true, "a": 2}\n',
        b'{"a": 2}\n',
        b'{"step": 1, "a": ' + b"[" * 100_000 + b"}\n",
        b'{"step": 1, "a": ' + b'{"a":' * 100_000 + b"}\n",
        b'\xef\xbb\xbf{"step": 1}\n',
    ],
)
def test_lines_that_arrow_reads_otherwise_are_read_one_by_one(line) -> None:
    assert read_many(line) is None
    assert read_many(b'{"step": 0, "a": 1}\n' + line) is None


def test_plain_lines_are_read_at_once_also_where_numbers_are_missing_or_not_finite() -> None:
    rows = [metrics_row(step, 20, random.Random(step)) for step in range(20)]
    rows[3] |= {"policy/loss": None, "text": "said", "flag": True, "time_s": None}
    many = read_many(text_of(rows))
    assert many is not None
    assert same(many, read_each(text_of(rows)))
    assert many.columns["policy/loss"][3] == np.inf
    assert np.isnan(many.columns["policy/loss"][0])
    assert np.isnan(many.seconds[3])


def test_one_odd_line_among_many_makes_few_others_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text_of([{"step": step, "a": step / 7} for step in range(20_000)]).splitlines(keepends=True)
    lines[13_000] = b"half a line\n"
    slow: list[int] = []
    monkeypatch.setattr(rows_module, "read_each", lambda text: slow.append(len(text)) or read_each(text))
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 1 << 17)
    found = list(read_rows(b"".join(lines)))
    assert np.concatenate([rows.steps for rows in found]).tolist() == [s for s in range(20_000) if s != 13_000]
    assert np.concatenate([rows.columns["a"] for rows in found])[-1] == 19_999 / 7
    assert 0 < sum(slow) <= 3 * rows_module.MAX_SLOW_BYTES
