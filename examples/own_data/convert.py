"""Converts data from another format to one that recipes read: Parquet or JSON lines, with any columns."""

from __future__ import annotations

from pathlib import Path

from pyarrow import csv, parquet

HERE = Path(__file__).parent


def convert(source: Path, target: Path) -> None:
    """Write a CSV file as Parquet with all its columns; the recipe says what they mean.

    Args:
        source: CSV file to read.
        target: Parquet file to write.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(csv.read_csv(source), target)


if __name__ == "__main__":
    convert(HERE / "additions.csv", Path("runs/own-data-rows/train.parquet"))
