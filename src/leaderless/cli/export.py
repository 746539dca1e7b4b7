"""`leaderless export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.common import print_path


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run for its newest one.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    role: Annotated[str, typer.Option(help="Whose weights.")] = "policy",
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, which transformers and vLLM load."""
    from leaderless.checkpoint.export import export_model

    path = export_model(newest_checkpoint(checkpoint), role, out)
    print_path("model", path)


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means.

    Args:
        path: A checkpoint, or the folder of a run.
    """
    from leaderless.observability.run_directory import list_checkpoints

    if (path / "state.json").exists():
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise typer.BadParameter(f"{path} is neither a checkpoint nor the folder of a run that has one")
    return checkpoints[-1]
