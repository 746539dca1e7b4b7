"""`leaderless ui`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.signals import ended_by_signals
from leaderless.config import RecipeError
from leaderless.config.packaged import how_to_install
from leaderless.observability.console import print_line
from leaderless.serve.port import TOKEN_VARIABLE


def ui(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold some; by default `runs`.")
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="Interface to listen on; a token is needed if other machines can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 7860,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, show_envvar=False, help=f"Token that readers need; ${TOKEN_VARIABLE}."),
    ] = None,
) -> None:
    """Show runs in a browser while they go on: curves, samples, what each rank does, events. Ctrl-C ends it.

    It reads the folders of runs, so that it may run on any machine that shares them, and no run depends on it.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise RecipeError.at("", f"`leaderless ui` needs more packages: {how_to_install('serve')}")
    if token is not None and (not token.isascii() or not token.isprintable() or not token.strip() or " " in token):
        raise RecipeError.at("--token", "must consist of printable ASCII characters, without blanks")
    folders = [folder.resolve() for folder in runs or [Path("runs")]]
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError.at("", f"{folder} is no folder: name the folder of a run, or one that holds runs")
    import asyncio

    from leaderless.serve.port import take_port
    from leaderless.ui.desk import Desk
    from leaderless.ui.server import PageServer

    with ended_by_signals(), take_port(host, port, token) as listener:
        address, number = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        secret = f"?token={token}" if token else ""
        text = f"the runs are at http://{shown}:{number}/{secret} - Ctrl-C ends it"
        asyncio.run(PageServer(Desk(folders), token).answer(listener, lambda: print_line(text)))
