"""`leaderless stop`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.observability.console import print_line
from leaderless.observability.run_directory import RunDirectory


def stop(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Ask a run to stop after its present step, with a checkpoint; it may run on another machine."""
    if not (run / "config.yaml").exists():
        raise typer.BadParameter(f"{run} is not the folder of a run: it holds no config.yaml")
    RunDirectory(run).stop.touch()
    print_line(f"{run} stops after its present step, with a checkpoint, if it is under way")
