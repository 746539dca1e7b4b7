"""Commands that answer requests until Ctrl-C: `leaderless serve`, `engine`, `retriever` and `ui`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from leaderless.cli.options import HostOption, PortOption, TokenOption, check_serving, check_token, ended_by_signals
from leaderless.config import RecipeError
from leaderless.observability.console import Display, console, print_line
from leaderless.worker.rank_info import RankInfo

LOOPBACK = "127.0.0.1"


def serve(  # noqa: PLR0913 - what a user may say of a server
    target: Annotated[
        str, typer.Argument(metavar="MODEL|CHECKPOINT|RUN", help="A folder, or the name of a model on the hub.")
    ],
    *,
    host: HostOption = LOOPBACK,
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
    full: Annotated[
        bool, typer.Option(help="Native engine without pages on an accelerator: slower, but it does all.")
    ] = False,
    max_waiting: Annotated[
        int | None, typer.Option(min=1, help="Responses that clients wait for at the same time; 4096 if not given.")
    ] = None,
    compute_dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of activations; by default as in the run, or bfloat16 on an accelerator."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Let clients train adapters on the model, in Tinker's API instead.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for states that clients of --train save; by default runs/serve-NAME.")
    ] = None,
    max_tenants: Annotated[
        int | None, typer.Option(min=1, help="Most adapters that --train trains at the same time; 16 if not given.")
    ] = None,
    pass_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of a pass of --train; 8192 on an accelerator, 2048 elsewhere."),
    ] = None,
) -> None:
    """Answer requests in OpenAI's and Anthropic's APIs, or in Tinker's to train, until Ctrl-C."""
    check_serving("serve", token)
    if full and engine not in {"auto", "native"}:
        raise RecipeError.at(
            "--full", f"is for the native engine, and not for --engine {engine}: leave out one of them"
        )
    if RankInfo.is_given() and RankInfo.from_environment().world_size > 1:
        raise RecipeError.at("", "`leaderless serve` is one process: start it without torchrun")
    import asyncio

    from leaderless.run.standalone_model import find_model, open_model
    from leaderless.serving.api.app import ModelServer
    from leaderless.serving.api.engine_thread import MAX_WAITING
    from leaderless.serving.listen import address_of, take_port

    given = {"--directory": directory, "--max-tenants": max_tenants, "--pass-tokens": pass_tokens}
    if not train and (unused := [name for name, value in given.items() if value is not None]):
        raise RecipeError.at(unused[0], "is for --train: give both, or leave it out")
    if train and (full or max_waiting is not None):
        raise RecipeError.at("--full" if full else "--max-waiting", "is for serving alone: leave it out with --train")
    loading = Display(console, status=lambda: f"loading {target}")
    with ended_by_signals(), take_port(host, port, token) as listener, loading as display:
        if train:
            if engine not in {"auto", "native"} or engine_python is not None:
                raise RecipeError.at("--engine", "is for serving alone: with --train, the native engine generates")
            from leaderless.serving.training.app import TrainingServer
            from leaderless.serving.training.service import ClientLimits
            from leaderless.serving.training.start import ServiceOptions, open_service

            source = find_model(target, role, print_line).changed(name, compute_dtype, max_sequences, None)
            folder = directory or Path("runs") / f"serve-{Path(source.name).name}"
            limits = ClientLimits() if max_tenants is None else ClientLimits(max_tenants=max_tenants)
            with open_service(source, ServiceOptions(folder, max_context, pass_tokens, limits), print_line) as service:
                training = TrainingServer(service, token)

                def ready() -> None:
                    address = f"http://{address_of(listener)}"
                    print_line(f"{source.name} can be trained at {address}, as TINKER_BASE_URL; Ctrl-C ends it")
                    display.status = service.news

                asyncio.run(training.answer(listener, ready))
            return
        source = find_model(target, role, print_line).changed(name, compute_dtype, max_sequences, engine_python)
        print_line(f"loading {source.checkpoint or source.config.path}")
        chosen = "native" if full and engine == "auto" else engine
        opened = open_model(source, None if chosen == "auto" else chosen, max_context, print_line, is_full=full)
        with opened as served:
            server = ModelServer(served, token, print_line, max_waiting or MAX_WAITING)

            def started() -> None:
                print_line(f"{served.name} answers at http://{address_of(listener)}/v1; Ctrl-C ends it")
                display.status = server.news

            asyncio.run(server.answer(listener, started))


def engine(
    *,
    python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with vLLM; by default that of this command.")
    ] = None,
    host: HostOption = LOOPBACK,
    port: PortOption = 8100,
    token: TokenOption = None,
) -> None:
    """Offer vLLM on this machine to ranks of runs elsewhere, one after the other, until Ctrl-C.

    A run names it in `rollout.external.addresses`. It needs the model under the same path or name.
    """
    check_token(token)
    from leaderless.rollout.external.offered import offer
    from leaderless.serving.listen import take_port

    with ended_by_signals():
        with take_port(host, port, token) as listener:
            chosen = int(listener.getsockname()[1])
        offer(python or sys.executable, host, chosen, token or "", print_line)


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

    from leaderless.environments.search.retriever import open_pages
    from leaderless.serving.http_server import WebServer
    from leaderless.serving.listen import address_of, take_port
    from leaderless.serving.retrieval_server import make_retriever_app

    with ended_by_signals(), take_port(LOOPBACK, port, None) as listener:
        found = open_pages(str(pages))
        text = f"{len(found):,} pages can be searched at http://{address_of(listener)}/retrieve; Ctrl-C ends it"
        asyncio.run(WebServer(make_retriever_app(found)).answer(listener, lambda: print_line(text)))


def ui(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold some; by default `runs`.")
    ] = None,
    *,
    host: HostOption = LOOPBACK,
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
