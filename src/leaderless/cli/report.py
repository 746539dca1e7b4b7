"""`leaderless report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.observability.console import print_path
from leaderless.observability.report import write_report


def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write `report.html` of a run: curves, timing, graph and samples in one file."""
    if not (run / "config.yaml").exists():
        raise typer.BadParameter(f"{run} is not the folder of a run: it holds no config.yaml")
    print_path("report", write_report(run))
