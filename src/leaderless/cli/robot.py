"""`leaderless robot`: serve an arm, try it, and stop it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Annotated, Literal

import numpy as np
import typer

from leaderless.cli.signals import ended_by_signals
from leaderless.config import Json, RecipeError
from leaderless.observability.console import print_line
from leaderless.robots.client import Address, RobotClient
from leaderless.robots.outcome import Outcome, Refused
from leaderless.robots.registry import make_station
from leaderless.robots.server import RobotServer
from leaderless.serve.port import TOKEN_VARIABLE, take_port
from leaderless.supervision.stop import Interrupted

robot = typer.Typer(help="Serve an arm within its limits, try it, and stop it.", no_args_is_help=True)

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the arm's server.")]
TokenOption = Annotated[
    str | None, typer.Option(envvar=TOKEN_VARIABLE, show_envvar=False, help=f"Token of the server; ${TOKEN_VARIABLE}.")
]


@robot.command("serve")
def serve_robot(
    name: Annotated[
        str, typer.Argument(metavar="ROBOT", help="Robot: dummy, franka, or a function package.module:function.")
    ],
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the robot as key=value. May be given several times.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Interface to listen on; a token is needed if other machines can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8765,
    token: TokenOption = None,
) -> None:
    """Let clients move an arm within its limits, until Ctrl-C.

    A real arm begins stopped. A person types `release` and Enter here to let it move, and `stop` to stop it.
    """
    with ended_by_signals(), take_port(host, port, token) as listener:
        listener.setblocking(False)
        server = RobotServer(make_station(name, _options(option or [])), token)
        address = Address(*listener.getsockname()[:2])
        threading.Thread(target=_obey, args=(server,), daemon=True).start()

        def ready() -> None:
            print_line(f"{name} can be moved at {address}; Ctrl-C ends it")
            if server.controller.stopped_because:
                print_line("it is stopped: see that nobody is near it, then type 'release'")

        asyncio.run(_answer(server, listener, ready))


@robot.command("try")
def try_robot(
    address: AddressArgument,
    *,
    token: TokenOption = None,
    policy: Annotated[Literal["random", "rest"], typer.Option(help="Policy: random actions, or no movement.")] = "rest",
    steps: Annotated[int, typer.Option(min=1, help="Number of steps at most.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode and of random actions.")] = 0,
) -> None:
    """Play one episode on an arm, and show what each step did."""
    rng = np.random.default_rng(seed)
    with _connected(address, token) as client:
        description = client.description
        print_line(json.dumps(description.to_json()))
        client.reset(seed)
        total = 0.0
        for step in range(steps):
            action = rng.uniform(-1.0, 1.0, (1, len(description.arm.axes))) * (policy == "random")
            found = client.step(action.astype(np.float32))
            total += float(found.rewards.sum())
            print_line(f"step {step + 1}: {_describe(found)}")
            if found.is_terminated or found.is_truncated:
                break
        print_line(f"reward {total:g}")


@robot.command("stop")
def stop_robot(
    address: AddressArgument,
    *,
    token: TokenOption = None,
    reason: Annotated[str, typer.Option(help="Reason, for those who look at the arm.")] = "",
) -> None:
    """Stop an arm at once, also while another client moves it. A person at its server has to release it."""
    with _connected(address, token, role="watch") as client:
        client.stop(reason)
    print_line(f"the arm at {address} is stopped")


@contextmanager
def _connected(address: str, token: str | None, role: Literal["control", "watch"] = "control") -> Iterator[RobotClient]:
    """A client, whose refusals are errors of what the user asked for."""
    try:
        client = RobotClient(Address.of(address), token, role=role)
    except (ConnectionError, ValueError, Refused) as error:
        raise RecipeError.at("", str(error)) from error
    try:
        yield client
    except Refused as error:
        raise RecipeError.at("", str(error)) from error
    finally:
        client.close()


def _describe(found: Outcome) -> str:
    position = ", ".join(f"{one:.3f}" for one in found.reading.position)
    words = {
        "success": found.is_terminated,
        "end": found.is_truncated,
        "a person acted": found.intervened.any(),
        "clipped": found.clipped.any(),
        "limited": found.limited.any(),
        found.cut: found.cut,
    }
    return "; ".join([f"at ({position})", *(word for word, holds in words.items() if holds)])


def _options(given: list[str]) -> dict[str, Json]:
    """Options as values of JSON where they are, else as text."""
    found: dict[str, Json] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or not key.isidentifier():
            raise RecipeError.at("--option", f"'{one}' must be key=value")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


async def _answer(server: RobotServer, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer until a signal comes, which must not be lost in the task of a client."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(server.answer(listener, ready))
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError as error:
        raise Interrupted(received[0]) from error


def _obey(server: RobotServer) -> None:
    """Do what a person types at the server."""
    for line in sys.stdin:
        word = line.strip()
        if word == "stop":
            server.controller.stop("a person at its server has typed 'stop'")
            print_line("stopped")
        elif word == "release":
            server.controller.release().add_done_callback(_tell_release)
        elif word:
            print_line(f"'{word}' is none of 'release' and 'stop'")


def _tell_release(done: Future[None]) -> None:
    error = done.exception()
    print_line("released" if error is None else f"still stopped: {error}")
