"""Commands about what a run has made: `leaderless eval`, `export`, `report` and `log`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column, Table

from leaderless.cli.options import JsonOption, OverridesArgument, RunArgument, check_run, ended_by_signals
from leaderless.config import Recipe, RecipeError, load_recipe
from leaderless.config.run import LoggerConfig
from leaderless.observability.console import Display, console, errors, print_json, print_line, print_path
from leaderless.observability.loggers.registry import check_loggers, loggers_running
from leaderless.observability.run_directory import finite_or_none
from leaderless.run.planned_run import plan_evaluation
from leaderless.run.run import Run, newest_checkpoint
from leaderless.run.worker import evaluate_as_worker
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.stop import Interrupted

NO_LIMIT_S = 30 * 24 * 3600.0
"""Time to send what is left, where nothing waits for it."""


def evaluate(  # noqa: PLR0913 - what a user may say of an evaluation
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or the folder of a run.")],
    overrides: OverridesArgument = None,
    *,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint to evaluate; for a run, its newest by default.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="Role that answers; by default evaluation.role, or the policy.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers on this machine.")] = 1,
    evaluator: Annotated[
        Literal["lm-eval"] | None,
        typer.Option("--with", help="Package that asks a run or model instead; its own arguments come after --."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Task of that package, by its name or as a YAML file. May be repeated.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help="Most rows of a task of --with, or their share if below 1.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of --with; by default the task's.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with further tasks for --with.")] = None,
    with_python: Annotated[
        str | None,
        typer.Option(
            envvar="LEADERLESS_EVAL_PYTHON",
            show_envvar=False,
            help="Interpreter of an environment with that package; $LEADERLESS_EVAL_PYTHON, or this one.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for what --with has measured; by default one in the run's folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer held-out prompts and print mean@k, pass@k and maj@k; or have another package measure its tasks."""
    if evaluator is not None:
        from leaderless.cli.evaluate_with import evaluate_with_lm_eval
        from leaderless.serving.lm_harness import HarnessTasks

        if workers != 1:
            raise RecipeError.at("--workers", "is for held-out prompts: leave it out with --with")
        tasks = HarnessTasks(tuple(task or ()), limit, num_fewshot, include_path, tuple(overrides or ()))
        python = with_python or sys.executable
        evaluate_with_lm_eval(str(checkpoint or target), role or "policy", python, tasks, out, as_json=as_json)
        return
    given = {"--task": task, "--limit": limit, "--num-fewshot": num_fewshot, "--include-path": include_path}
    if unused := [name for name, value in (given | {"--out": out}).items() if value is not None]:
        raise RecipeError.at(unused[0], "is for --with: give both, or leave it out")
    run = Run(target, *(overrides or []))
    if checkpoint is not None or target.is_dir():
        checkpoint = newest_checkpoint(checkpoint or target)
    place = RankInfo.from_environment()
    if RankInfo.is_given():
        scores = evaluate_as_worker(plan_evaluation(run.loaded, role, place.world_size), place, checkpoint)
    else:
        scores = run.evaluate(checkpoint, role=role, workers=workers)
    if place.rank == 0 and as_json:
        print_json(finite_or_none(scores))
    elif place.rank == 0:
        _print(scores, run.recipe, checkpoint)


def _print(scores: Mapping[str, float], recipe: Recipe, checkpoint: Path | None) -> None:
    assert recipe.data.evaluation is not None
    model = recipe.name if checkpoint is None else f"{recipe.name}, {checkpoint.name}"
    print_line(f"{model} on {recipe.data.evaluation.path}")
    table = Table("measure", Column("score", justify="right"))
    formats = {"evaluation/failed": ".0f", "evaluation/response_tokens": ".1f"}
    for name, value in scores.items():
        table.add_row(name.removeprefix("evaluation/"), f"{value:{formats.get(name, 'z.4f')}}")
    console.print(table)
    if cut := scores.get("evaluation/truncated", 0.0):
        longest = recipe.rollout.max_response_tokens
        print_line(f"{cut:.1%} were cut at rollout.max_response_tokens={longest}, or at a limit of their environment")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run for its newest one.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    role: Annotated[str, typer.Option(help="Role to export.")] = "policy",
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into their model, and write this.")] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder, which transformers and vLLM load; adapters as peft does."""
    from leaderless.worker.checkpoint.export import export_model

    with Display(errors, status=lambda: f"writing {out}"):
        path = export_model(newest_checkpoint(checkpoint), role, out, merge=merge)
    print_path("model", path)


def report(run: RunArgument) -> None:
    """Write `report.html` of a run: curves, timing, graph and samples in one file."""
    from leaderless.observability.report.page import write_report

    check_run(run)
    print_path("report", write_report(run))


def log(
    run: RunArgument,
    to: Annotated[
        list[str] | None,
        typer.Option(help="Logger to send to, such as wandb; by default the recipe's. May be repeated."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue to send what the run writes, until Ctrl-C.")
    ] = False,
) -> None:
    """Send a run to its loggers: what they do not have yet.

    For machines without a network, run it elsewhere on the shared folder, during a run or after it.
    """
    check_run(run)
    named = tuple(LoggerConfig(type=name) for name in to or ())
    configs = named or load_recipe(run / "config.yaml").recipe.loggers
    check_loggers(configs)
    patient = [config.model_copy(update={"finish_s": NO_LIMIT_S}) for config in configs]
    with loggers_running(patient, run, print_line) as end:
        if follow:
            print_line(f"following {run}; Ctrl-C ends it")
            try:
                with ended_by_signals():
                    threading.Event().wait()
            except Interrupted:
                pass
        end()
    print_line(f"{run}: sent to {', '.join(config.type for config in configs) or 'no logger'}")
