"""Common parts of the commands with a server."""

from __future__ import annotations

from typing import Annotated

import typer

from leaderless.config import RecipeError
from leaderless.config.packaged_files import server_refusal
from leaderless.serving.listen import TOKEN_VARIABLE

HostOption = Annotated[
    str, typer.Option(help="Interface to listen on; a token is needed if other machines can reach it.")
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")]
TokenOption = Annotated[
    str | None,
    typer.Option(envvar=TOKEN_VARIABLE, show_envvar=False, help=f"Key that clients send; ${TOKEN_VARIABLE}."),
]


def check_serving(command: str, token: str | None = None, *extras: str) -> None:
    """Refuse to serve without the packages, of `serve` and further extras, or with a token that no client can send."""
    if problem := server_refusal(*extras):
        raise RecipeError.at("", f"`leaderless {command}` {problem}")
    if token is not None and (not token.isascii() or not token.isprintable() or not token.strip() or " " in token):
        raise RecipeError.at("--token", "must consist of printable ASCII characters, without blanks")
