"""The table of a run's metrics."""

from __future__ import annotations

import math

import pytest

from leaderless.run.metrics_table import MetricsTable

ROWS = [{"step": 0, "evaluation/mean@1": 0.5}, *({"step": i, "reward/mean": i / 4, "<b>": 1.0} for i in range(1, 21))]


def test_columns_and_rows_have_every_metric() -> None:
    table = MetricsTable(ROWS)
    assert len(table) == 21
    assert table.columns == ("step", "evaluation/mean@1", "reward/mean", "<b>")
    assert table["reward/mean"][1:3] == [0.25, 0.5]
    assert math.isnan(table["reward/mean"][0])
    assert [row["step"] for row in table] == list(range(21))
    with pytest.raises(KeyError, match="did you mean 'reward/mean'"):
        table["reward/man"]


def test_text_and_page_show_first_and_last_rows() -> None:
    table = MetricsTable(ROWS)
    lines = repr(table).splitlines()
    assert lines[0].split() == ["step", "evaluation/mean@1", "reward/mean", "<b>"]
    assert len({len(line) for line in lines[:-1]}) == 1, "columns are aligned"
    assert [line.split()[0] for line in lines[1:-1]] == ["0", "1", "2", "3", "4", "...", "16", "17", "18", "19", "20"]
    assert lines[-1] == "[21 rows x 4 columns]"
    page = table._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert repr(MetricsTable([])) == "\n[0 rows x 0 columns]"


def test_pandas_gets_the_step_as_index() -> None:
    frame = MetricsTable(ROWS).to_pandas()
    assert list(frame.index) == list(range(21))
    assert frame["reward/mean"].max() == 5.0
