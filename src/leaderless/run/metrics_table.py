"""The metrics of a run as a table."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from leaderless.config import nearest
from leaderless.observability.console import HEADLINES

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

_SHOWN_ROWS = 10
_SHOWN_COLUMNS = 8


class MetricsTable:
    """One row for each step, one column for each metric, NaN where a step does not have it.

    `table["reward/mean"]` is a column, `for row in table` gives rows by name, and `len(table)` counts them. Its
    `columns` are metrics by name, `step` first.
    """

    def __init__(self, rows: Sequence[Mapping[str, float]]) -> None:
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))
        self._rows = [{name: row.get(name, math.nan) for name in self.columns} for row in rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Rows, each by name."""
        return iter([dict(row) for row in self._rows])

    def __getitem__(self, column: str) -> list[float]:
        """The column of a metric; a KeyError names the nearest one."""
        if column not in self.columns:
            raise KeyError(f"no metric '{column}'{nearest(column, self.columns)}")
        return [row[column] for row in self._rows]

    def to_pandas(self) -> DataFrame:
        """The table as a data frame, whose index is the step, if pandas is installed."""
        from pandas import DataFrame

        return DataFrame(self._rows, columns=list(self.columns)).set_index("step")

    def __repr__(self) -> str:
        """The headline metrics of the first and last steps as text."""
        lines = self._shown()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*text, self._size()])

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        lines = [[html.escape(cell) for cell in line] for line in self._shown()]
        head, *body = ["".join(f"<td>{cell}</td>" for cell in line) for line in lines]
        rows = "".join(f"<tr>{line}</tr>" for line in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{self._size()}</p>"

    def _shown(self) -> list[list[str]]:
        """Names and numbers that fit on a screen."""
        known = [name for start, _, _ in HEADLINES for name in self.columns if name.startswith(start)]
        names = list(dict.fromkeys(["step", *known, *self.columns]))[:_SHOWN_COLUMNS]
        names = [name for name in names if name in self.columns]
        lines = [[_shown(row[name]) for name in names] for row in self._rows]
        if len(lines) > _SHOWN_ROWS:
            half = _SHOWN_ROWS // 2
            lines = [*lines[:half], ["..."] * len(names), *lines[-half:]]
        return [names, *lines]

    def _size(self) -> str:
        return f"[{len(self)} rows x {len(self.columns)} columns]"


def _shown(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
