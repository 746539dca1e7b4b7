"""`leaderless retriever`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.signals import ended_by_signals
from leaderless.config import RecipeError
from leaderless.config.packaged import how_to_install
from leaderless.observability.console import print_line

LOOPBACK = "127.0.0.1"


def retriever(
    pages: Annotated[
        Path, typer.Argument(metavar="PAGES", help="JSON lines with `contents`: a title, a line break, a text.")
    ],
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
) -> None:
    """Find pages for programs on this machine, as Search-R1's server does at /retrieve, until Ctrl-C."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise RecipeError.at("", f"`leaderless retriever` needs more packages: {how_to_install('serve', 'search')}")
    import asyncio

    from leaderless.environments.search.bm25 import open_pages
    from leaderless.serve.port import take_port
    from leaderless.serve.retriever import answer_searches

    with ended_by_signals(), take_port(LOOPBACK, port, None) as listener:
        found = open_pages(str(pages))
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/retrieve"
        text = f"{len(found):,} pages can be searched at {address}; Ctrl-C ends it"
        asyncio.run(answer_searches(found, listener, lambda: print_line(text)))
