"""The command line."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import typer
from rich.markup import escape

from leaderless.cli.common import errors
from leaderless.cli.evaluate import evaluate
from leaderless.cli.export import export
from leaderless.cli.plan import plan
from leaderless.cli.report import report
from leaderless.cli.schema import schema
from leaderless.cli.train import train
from leaderless.config import RecipeError

app = typer.Typer(
    help="Fully distributed reinforcement-learning post-training: every worker computes the plan, none leads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan)
app.command("eval")(evaluate)
app.command()(export)
app.command()(report)
app.command()(schema)


def main() -> None:
    """Run a command: exit code 0 for success, 2 for what the user has to correct, 1 for any other failure."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except RecipeError as error:
        errors.print(f"[red bold]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("[red bold]interrupted[/]")
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the end of the process, where every failure is reported
        _exit_with(error)


def _exit_with(error: Exception) -> None:
    """Print a failure: of a worker, its own traceback."""
    failure = getattr(error, "failure", None)
    if failure is not None and failure.is_recipe:
        errors.print(f"[red bold]error[/] {escape(failure.message)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    if failure is not None:
        errors.print(failure.trace, highlight=False, markup=False, soft_wrap=True)
    elif not hasattr(error, "failure"):
        errors.print("".join(traceback.format_exception(error)), highlight=False, markup=False, soft_wrap=True)
    errors.print(f"[red bold]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(1)
