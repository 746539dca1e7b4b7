"""Actions of `leaderless robot`; only its commands import this, as it takes long."""

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
from dataclasses import asdict
from typing import Literal

import numpy as np

from leaderless.base.values import Json
from leaderless.cli.signals import ended_by_signals
from leaderless.config import RecipeError
from leaderless.embodied.robots.arm import CommandOutcome, Refused, make_station
from leaderless.embodied.robots.client import Address, RobotClient
from leaderless.embodied.robots.server import RobotServer
from leaderless.observability.console import print_line
from leaderless.serving.listen import take_port
from leaderless.worker.supervision.stop import Interrupted


def serve_robot(name: str, options: list[str], host: str, port: int, token: str | None) -> None:
    """Let clients move an arm, until Ctrl-C."""
    with ended_by_signals(), take_port(host, port, token) as listener:
        listener.setblocking(False)
        server = RobotServer(make_station(name, _options(options)), token)
        address = Address(*listener.getsockname()[:2])
        threading.Thread(target=_obey, args=(server,), daemon=True).start()

        def ready() -> None:
            print_line(f"{name} can be moved at {address}; Ctrl-C ends it")
            if server.controller.stopped_because:
                print_line("it is stopped: see that nobody is near it, then type 'release'")

        asyncio.run(_answer(server, listener, ready))


def try_robot(address: str, token: str | None, policy: str, steps: int, seed: int) -> None:
    """Play one episode on an arm, and show what each step did."""
    rng = np.random.default_rng(seed)
    with _connected(address, token) as client:
        description = client.description
        print_line(json.dumps(asdict(description)))
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


def stop_robot(address: str, token: str | None, reason: str) -> None:
    """Stop an arm at once."""
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


def _describe(found: CommandOutcome) -> str:
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
