"""`leaderless log`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.signals import ended_by_signals
from leaderless.config import load_recipe
from leaderless.config.run import LoggerConfig
from leaderless.observability.console import print_line
from leaderless.observability.loggers.registry import check_loggers
from leaderless.observability.loggers.start import loggers_running
from leaderless.worker.supervision.stop import Interrupted

NO_LIMIT_S = 30 * 24 * 3600.0
"""Time to send what is left, where nothing waits for it."""


def log(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
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
    if not (run / "config.yaml").exists():
        raise typer.BadParameter(f"{run} is not the folder of a run: it holds no config.yaml")
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
