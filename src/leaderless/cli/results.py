"""Commands about what a run has made: `leaderless eval`, `leaderless export` and `leaderless report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from leaderless.config import Recipe
from leaderless.observability.console import console, print_json, print_line, print_path
from leaderless.observability.run_directory import finite_or_none
from leaderless.run.planned_run import plan_evaluation
from leaderless.run.run import Run, newest_checkpoint
from leaderless.run.worker import evaluate_as_worker
from leaderless.worker.rank_info import RankInfo


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint to evaluate; for a run, its newest by default.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="Role that answers; by default evaluation.role, or the policy.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers on this machine.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer held-out prompts and print mean@k, pass@k and maj@k."""
    run = Run(target, *(overrides or []))
    if checkpoint is not None or target.is_dir():
        checkpoint = newest_checkpoint(checkpoint or target)
    place = RankInfo.from_environment()
    if RankInfo.is_given():
        scores = evaluate_as_worker(plan_evaluation(run.loaded, role, place.world_size), place, checkpoint)
    else:
        scores = run.evaluate(checkpoint, role=role, workers=workers)
    if place.rank == 0:
        _print(scores, run.recipe, checkpoint, as_json=as_json)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run for its newest one.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    role: Annotated[str, typer.Option(help="Role to export.")] = "policy",
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into their model, and write this.")] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, which transformers and vLLM load; adapters as peft does."""
    from leaderless.worker.checkpoint.export import export_model

    print_path("model", export_model(newest_checkpoint(checkpoint), role, out, merge=merge))


def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write `report.html` of a run: curves, timing, graph and samples in one file."""
    from leaderless.observability.report.page import write_report

    if not (run / "config.yaml").exists():
        raise typer.BadParameter(f"{run} is not the folder of a run: it holds no config.yaml")
    print_path("report", write_report(run))


def _print(scores: Mapping[str, float], recipe: Recipe, checkpoint: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(finite_or_none(scores))
        return
    assert recipe.data.evaluation is not None
    model = recipe.name if checkpoint is None else f"{recipe.name}, {checkpoint.name}"
    print_line(f"{model} on {recipe.data.evaluation.path}")
    table = Table()
    table.add_column("measure")
    table.add_column("score", justify="right")
    for name, value in scores.items():
        table.add_row(name.removeprefix("evaluation/"), f"{value:.0f}" if name.endswith("failed") else f"{value:.4f}")
    console.print(table)
