"""From a format of one's own to one that recipes read: Parquet (or JSON lines), with any columns one likes."""

from __future__ import annotations

from pathlib import Path

from pyarrow import csv, parquet

HERE = Path(__file__).parent


def convert(source: Path, target: Path) -> None:
    """Write a CSV file as Parquet; every column stays, and the recipe says which one means what.

    Args:
        source: The CSV file.
        target: The Parquet file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(csv.read_csv(source), target)


if __name__ == "__main__":
    convert(HERE / "additions.csv", Path("runs/own-data-rows/train.parquet"))
