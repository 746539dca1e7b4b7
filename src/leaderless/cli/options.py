"""Options and arguments that several commands have, and how they are read."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from leaderless.base.tokens import TOKEN_VARIABLE
from leaderless.config import RecipeError
from leaderless.config.packaged_files import server_refusal
from leaderless.observability.console import print_line
from leaderless.run.launch.rendezvous import Nodes
from leaderless.worker.supervision.stop import Interrupted

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")]
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LayoutOption = Annotated[
    str, typer.Option("--layout", metavar="auto", help="auto: choose all layouts by a profile or --cluster.")
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(help="File with constants of the machines: layouts are chosen by them where there is no profile."),
]
WorkersOption = Annotated[int, typer.Option(min=0, help="Workers on this machine; 0: one per accelerator, or one.")]
RendezvousOption = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address at which the machines meet.")]
HostOption = Annotated[
    str, typer.Option(help="Interface to listen on; a token is needed if other machines can reach it.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")]
TokenOption = Annotated[
    str | None,
    typer.Option(envvar=TOKEN_VARIABLE, show_envvar=False, help=f"Key that clients send; ${TOKEN_VARIABLE}."),
]


def with_layout(overrides: list[str] | None, layout: str, cluster: Path | None) -> list[str]:
    """Settings of a command line, `--layout` and `--cluster` among them."""
    if layout not in {"", "auto"}:
        raise typer.BadParameter(f"is '{layout}', but can only be auto; give layouts as layout.NODE.ranks=0-3")
    described = [] if cluster is None else [f"placement.cluster={json.dumps(str(cluster))}"]
    return [*(overrides or []), *(["layout=auto"] if layout else []), *described]


def parse_nodes(nodes: str, rendezvous: str) -> Nodes:
    """The machines that `--nodes` and `--rendezvous` name."""
    try:
        return Nodes.parse(nodes, rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def check_run(folder: Path, option: str | None = None) -> None:
    """Refuse what is not the folder of a run."""
    if not (folder / "config.yaml").exists():
        message = f"{folder} is not the folder of a run: it holds no config.yaml"
        raise typer.BadParameter(message, param_hint=option)


def check_serving(command: str, token: str | None = None, *extras: str) -> None:
    """Refuse to serve without the packages, of `serve` and further extras, or with a token like none."""
    if problem := server_refusal(*extras):
        raise RecipeError.at("", f"`leaderless {command}` {problem}")
    check_token(token)


def check_token(token: str | None) -> None:
    """Refuse a token that no client can send."""
    if token is not None and (not token.isascii() or not token.isprintable() or not token.strip() or " " in token):
        raise RecipeError.at("--token", "must consist of printable ASCII characters, without blanks")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end what runs inside cleanly, by an `Interrupted`."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Interrupted(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Interrupted:
        print_line("stopped")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cut(value: object, limit: int) -> str:
    """A value as one line of a table, cut at a number of characters."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[:limit]}…"
