"""`leaderless ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.servers import HostOption, PortOption, TokenOption, check_serving
from leaderless.cli.signals import ended_by_signals
from leaderless.config import RecipeError
from leaderless.observability.console import print_line


def ui(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold some; by default `runs`.")
    ] = None,
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 7860,
    token: TokenOption = None,
) -> None:
    """Show runs in a browser while they go on: curves, samples, what each rank does, events. Ctrl-C ends it.

    It reads the folders of runs, so that it may run on any machine that shares them, and no run depends on it.
    """
    check_serving("ui", token)
    folders = [folder.resolve() for folder in runs or [Path("runs")]]
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError.at("", f"{folder} is no folder: name the folder of a run, or one that holds runs")
    import asyncio

    from leaderless.serving.listen import address_of, take_port
    from leaderless.serving.live_page.app import PageServer
    from leaderless.serving.live_page.pages import RunStore

    with ended_by_signals(), take_port(host, port, token) as listener:
        secret = f"?token={token}" if token else ""
        text = f"the runs are at http://{address_of(listener)}/{secret} - Ctrl-C ends it"
        asyncio.run(PageServer(RunStore(folders), token).answer(listener, lambda: print_line(text)))
