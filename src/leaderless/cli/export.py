"""`leaderless export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.observability.console import print_path


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run for its newest one.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    role: Annotated[str, typer.Option(help="Role to export.")] = "policy",
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, which transformers and vLLM load."""
    from leaderless.checkpoint.export import export_model
    from leaderless.run.run import newest_checkpoint

    print_path("model", export_model(newest_checkpoint(checkpoint), role, out))
