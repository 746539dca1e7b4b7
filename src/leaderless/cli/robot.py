"""Commands about bodies: `leaderless robot` serves an arm, tries it and stops it; `leaderless demonstrate` records."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leaderless.base.values import Json
from leaderless.cli.options import HostOption, OverridesArgument, PortOption, TokenOption, ended_by_signals
from leaderless.config import RecipeError
from leaderless.observability.console import console, print_line
from leaderless.planner.workflow import load_recipe
from leaderless.run.settings import recipe_path
from leaderless.worker.supervision.stop import Interrupted

if TYPE_CHECKING:
    import socket
    from concurrent.futures import Future

    from leaderless.embodied.robots.arm import CommandOutcome
    from leaderless.embodied.robots.client import RobotClient
    from leaderless.embodied.robots.server import RobotServer

robot = typer.Typer(help="Serve an arm within its limits, try it, and stop it.", no_args_is_help=True)

AddressArgument = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the arm's server.")]


@robot.command("serve")
def serve_robot(
    name: Annotated[
        str, typer.Argument(metavar="ROBOT", help="Robot: dummy, franka, or a function package.module:function.")
    ],
    *,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the robot as key=value. May be given several times.")
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8765,
    token: TokenOption = None,
) -> None:
    """Let clients move an arm within its limits, until Ctrl-C.

    A real arm begins stopped. A person types `release` and Enter here to let it move, and `stop` to stop it.
    """
    import threading

    from leaderless.embodied.robots.arm import make_station
    from leaderless.embodied.robots.client import Address
    from leaderless.embodied.robots.server import RobotServer
    from leaderless.serving.listen import take_port

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

    def report(done: Future[None]) -> None:
        error = done.exception()
        print_line("released" if error is None else f"still stopped: {error}")

    for line in sys.stdin:
        word = line.strip()
        if word == "stop":
            server.controller.stop("a person at its server has typed 'stop'")
            print_line("stopped")
        elif word == "release":
            server.controller.release().add_done_callback(report)
        elif word:
            print_line(f"'{word}' is none of 'release' and 'stop'")


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
    import numpy as np

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
    from leaderless.embodied.robots.arm import Refused
    from leaderless.embodied.robots.client import Address, RobotClient

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


def demonstrate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with a body, or the folder of a run.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the demonstrations, new or one to add to.")],
    overrides: OverridesArgument = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes to record.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; the next one has the next.")] = 0,
    keep_failures: Annotated[
        bool, typer.Option("--keep-failures", help="Record episodes without success, too.")
    ] = False,
) -> None:
    """Record what the scripted expert of an environment does, in the format of LeRobot."""
    from leaderless.embodied.data.lerobot import DemonstrationWriter
    from leaderless.embodied.simulators.registry import open_body
    from leaderless.embodied.simulators.scripted_expert import AT_ONCE, played

    loaded = load_recipe(recipe_path(target), overrides or [])
    config = loaded.recipe.body
    if config is None:
        raise loaded.locate(RecipeError.at("body", "the recipe has no body whose expert could demonstrate anything"))
    try:
        environment = open_body(config, AT_ONCE)
    except RecipeError as error:
        raise loaded.locate(error) from error
    num_tried = 0
    try:
        with DemonstrationWriter(folder, robot=config.type) as recorder, console.status("recording"):
            for is_success, episode in played(environment, seed):
                num_tried += 1
                if is_success or keep_failures:
                    recorder.add(episode)
                if len(recorder) >= episodes or num_tried >= 100 * episodes:
                    break
            total = len(recorder)
    except (NotImplementedError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        environment.close()
    console.print(f"{folder} has {total} demonstrations; {num_tried} episodes were played", highlight=False)
