"""`leaderless retriever`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.servers import PortOption, check_serving
from leaderless.cli.signals import ended_by_signals
from leaderless.observability.console import print_line

LOOPBACK = "127.0.0.1"


def retriever(
    pages: Annotated[
        Path, typer.Argument(metavar="PAGES", help="JSON lines with `contents`: a title, a line break, a text.")
    ],
    *,
    port: PortOption = 8000,
) -> None:
    """Find pages for programs on this machine, as Search-R1's server does at /retrieve, until Ctrl-C."""
    check_serving("retriever", None, "search")
    import asyncio

    from leaderless.environments.search.bm25 import open_pages
    from leaderless.serving.http_server import WebServer
    from leaderless.serving.listen import address_of, take_port
    from leaderless.serving.retrieval_server import make_retriever_app

    with ended_by_signals(), take_port(LOOPBACK, port, None) as listener:
        found = open_pages(str(pages))
        address = f"http://{address_of(listener)}/retrieve"
        text = f"{len(found):,} pages can be searched at {address}; Ctrl-C ends it"
        asyncio.run(WebServer(make_retriever_app(found)).answer(listener, lambda: print_line(text)))
