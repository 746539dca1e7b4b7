"""`leaderless serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from leaderless.cli.servers import HostOption, PortOption, TokenOption, check_serving
from leaderless.cli.signals import ended_by_signals
from leaderless.config import RecipeError
from leaderless.observability.console import print_line
from leaderless.worker.rank_info import RankInfo


def serve(  # noqa: PLR0913 - what a user may say of a server
    target: Annotated[
        str, typer.Argument(metavar="MODEL|CHECKPOINT|RUN", help="A folder, or the name of a model on the hub.")
    ],
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    token: TokenOption = None,
    engine: Annotated[
        Literal["auto", "native", "vllm", "sglang"], typer.Option(help="Engine that generates; auto as in a recipe.")
    ] = "auto",
    engine_python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with vLLM or SGLang; by default the run's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients; by default the folder's or run's.")
    ] = None,
    role: Annotated[str, typer.Option(help="Role to serve, of a checkpoint or run.")] = "policy",
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="Responses sampled at the same time; by default as in the run, or 256.")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of prompt and response; by default all that the model can take."),
    ] = None,
    compute_dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of activations; by default as in the run, or float32."),
    ] = None,
) -> None:
    """Answer requests in OpenAI's API, for completions and chats, until Ctrl-C."""
    check_serving("serve", token)
    if RankInfo.is_given() and RankInfo.from_environment().world_size > 1:
        raise RecipeError.at("", "`leaderless serve` is one process: start it without torchrun")
    import asyncio

    from leaderless.run.standalone_model import find_model, open_model
    from leaderless.serving.api.app import ModelServer
    from leaderless.serving.listen import address_of, take_port

    with ended_by_signals(), take_port(host, port, token) as listener:
        source = find_model(target, role, print_line).changed(name, compute_dtype, max_sequences, engine_python)
        print_line(f"loading {source.checkpoint or source.config.path}")
        with open_model(source, None if engine == "auto" else engine, max_context, print_line) as served:
            text = f"{served.name} answers at http://{address_of(listener)}/v1; Ctrl-C ends it"
            asyncio.run(ModelServer(served, token).answer(listener, lambda: print_line(text)))
