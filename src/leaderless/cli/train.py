"""`leaderless train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.plan import LAYOUT, with_layout
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.run import Run
from leaderless.run.stage_profile import has_accelerator
from leaderless.worker.rank_info import RankInfo


def train(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0: one per accelerator, or one.")] = 0,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and begin anew.")] = False,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Numbers of machines to train with; start this command on each."),
    ] = None,
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address at which the machines meet.")] = "",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Train in this process alone, for a debugger; it is not restarted.")
    ] = False,
    layout: Annotated[str, LAYOUT] = "",
) -> None:
    """Train. A run that was interrupted continues from its newest checkpoint."""
    machines = _machines(nodes, rendezvous, fresh=fresh)
    run = Run(target, *with_layout(overrides, layout))
    if RankInfo.is_given():
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        run.work(RankInfo.from_environment(), fresh=fresh, is_restart=is_restart)
    else:
        num_workers = workers or num_accelerators()
        if in_process and (num_workers > 1 or machines is not None):
            raise typer.BadParameter("--in-process is for one worker: give --workers 1, without --nodes")
        run.train(num_workers, fresh=fresh, nodes=machines, apart=True, in_process=in_process or _is_debugged())


def _machines(nodes: str | None, rendezvous: str, *, fresh: bool) -> Nodes | None:
    """The machines that a command line names."""
    if nodes is None and not rendezvous:
        return None
    if RankInfo.is_given():
        raise typer.BadParameter("--nodes and --rendezvous are for `leaderless train` itself, not under torchrun")
    if fresh:
        raise typer.BadParameter("--fresh does not go with --nodes: take another name, or move the run's folder away")
    try:
        return Nodes.parse(nodes or "1", rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _is_debugged() -> bool:
    """Whether this process runs under a debugger, which would not see another process."""
    return sys.gettrace() is not None or not {"debugpy", "pydevd"}.isdisjoint(sys.modules)


def num_accelerators() -> int:
    """Number of accelerators of this machine, found without torch if there can be none."""
    if not has_accelerator():
        return 1
    import torch

    return max(1, torch.accelerator.device_count())
