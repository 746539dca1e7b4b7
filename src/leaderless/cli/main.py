"""The command line."""

from __future__ import annotations

import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leaderless.base.versions import VERSION
from leaderless.cli.checks import doctor, reward, template
from leaderless.cli.env import env
from leaderless.cli.plan import plan, profile, schema, simulate
from leaderless.cli.quickstart import convert, new, quickstart
from leaderless.cli.regrade import regrade_episodes
from leaderless.cli.results import evaluate, export, log, report
from leaderless.cli.robot import demonstrate, robot
from leaderless.cli.runs import compare, ls
from leaderless.cli.serve import engine, retriever, serve, ui
from leaderless.cli.train import stop, submit, train
from leaderless.cli.verify import verify
from leaderless.observability.console import errors
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import WorkerFailure, WorkersFailed
from leaderless.worker.supervision.stop import Interrupted

OTHERS_REPORT_S = 5.0
"""Time that a worker gives the others to report the cause of their common failure."""


def _print_version(is_asked: bool) -> None:
    """Print what a report of a bug needs; torch's version is read without importing torch, which takes seconds."""
    if is_asked:
        typer.echo(f"leaderless {VERSION} (torch {version('torch')})")
        raise typer.Exit


def _options(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions of leaderless and torch."
        ),
    ] = False,
) -> None:
    """The options that stand before a command."""


app = typer.Typer(
    callback=_options,
    help="Fully distributed reinforcement-learning post-training: every worker computes the plan, none leads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(
        quickstart,
        new,
        train,
        submit,
        doctor,
        convert,
        plan,
        profile,
        simulate,
        evaluate,
        export,
        serve,
        engine,
        retriever,
    ),
    *(stop, ls, compare, verify, report, ui, log, reward, template, schema, demonstrate),
):
    app.command("eval" if command is evaluate else None)(command)
env.command("regrade")(regrade_episodes)
app.add_typer(env, name="env")
app.add_typer(robot, name="robot")


def main() -> None:
    """Run a command.

    Exit codes: 0 for success, 2 for something that the user has to correct, 128 + n where signal n stopped the command
    (130: Ctrl-C), and 1 for any other failure.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except Interrupted as error:
        sys.exit(128 + error.signal)
    except KeyboardInterrupt:
        errors.print("[red bold]interrupted[/]")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001 - the end of the process, where every failure is reported
        sys.exit(_explain(error))


def _explain(error: Exception) -> int:
    """Print a failure, once for all workers that have it, and return the exit code."""
    place = RankInfo.from_environment()
    failure = error.failure if isinstance(error, WorkersFailed) else WorkerFailure.of(error, place.rank)
    is_recipe = failure.kind == "recipe"
    if RankInfo.is_given() and (failure.kind == "lost_peers" or (is_recipe and place.local_rank > 0)):
        # Torch elastic ends this process as soon as the one with the cause has printed it and ended.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_REPORT_S)
    if failure.kind in {"error", "outside"}:
        errors.print(failure.trace, highlight=False, markup=False, soft_wrap=True)
    errors.print(f"[red bold]error[/] {escape(failure.message)}", highlight=False, soft_wrap=True)
    return 2 if is_recipe else 1
