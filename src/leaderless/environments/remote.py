"""An episode in a process of its own, which may crash, hang or use global random numbers. Imports no torch.

Processes are forked from a server that has imported the environment once, so that starting one takes milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from typing import ClassVar, cast

from typing_extensions import override

from leaderless.base.leftover_processes import exit_in_words
from leaderless.base.named_functions import load_own
from leaderless.base.values import Json
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.failures import FailureKind
from leaderless.environments.guarded_environment import (
    EnvironmentFailure,
    GuardedEnvironment,
    ThreadEnvironment,
    kind_of_end,
)
from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.environments.tools.calls import Call, CallResult, Tool
from leaderless.environments.tools.function_tool import FunctionTool, ToolError
from leaderless.environments.tools.served_tools import EnvironmentTool
from leaderless.environments.tools.sources import python_tools
from leaderless.environments.tools.toolbox import Toolbox
from leaderless.environments.user_functions import call_user

GRACE_S = 5.0
"""Seconds that a process gets beyond the time limit of an answer, to report by itself what took so long."""
START_S = 60.0
"""Seconds that a process may take to start and to import its environment."""
NOTICE_S = 0.2
"""Seconds within which a process that has closed its connection ends."""
_PR_SET_PDEATHSIG = 1
_starting = threading.Lock()


class ProcessEnvironment(GuardedEnvironment):
    """An environment that is an object of another process, which ends with the episode."""

    def __init__(self, config: EnvironmentConfig, agents: tuple[str, ...], name: str) -> None:
        """Start a process for an environment that is named as `module:Class`."""
        self.agents, self._config = agents, config
        self._connection, there = Pipe()
        self._process = _start(name, config, there)
        there.close()
        self._is_ready = False

    async def make(self) -> None:
        """Make the environment.

        Raises:
            EnvironmentFailure: It cannot be made.
        """
        await self._ask("make", {})

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        return cast("Observation", await self._ask("reset", {"task": task, "seed": seed}))

    @override
    async def act(self, text: str) -> Turn:
        found = await self._ask("act", {"text": text})
        return Turn(**cast("dict[str, Json]", found))  # type: ignore[arg-type]

    @override
    async def bind(self, tool: FunctionTool | EnvironmentTool) -> Tool:
        """Make a tool that is called in the process, as all tools that are Python functions."""
        assert isinstance(tool, FunctionTool), "environments with a server are refused in processes"
        return RemoteTool(tool.name, tool.description, tool.parameters, tool, self)

    async def call_tool(self, name: str, arguments: Mapping[str, Json]) -> CallResult:
        """The result of a tool in the process; the arguments are as the policy wrote them."""
        found = await self._ask("tool", {"name": name, "arguments": arguments}, self._config.tool_timeout_s)
        return CallResult(**cast("dict[str, Json]", found))  # type: ignore[arg-type]

    @override
    async def close(self) -> None:
        try:
            if self._is_ready and self._process.is_alive():
                with suppress(EnvironmentFailure):
                    await self._ask("close", {})
        finally:
            self._end()

    async def _ask(self, what: str, arguments: Mapping[str, Json], timeout_s: float | None = None) -> Json:
        """Ask the process for something, and wait for its answer, which may take `act_timeout_s` or another time.

        Raises:
            EnvironmentFailure: The environment has failed, or its process has ended or does not answer.
        """
        limit_s = (timeout_s or self._config.act_timeout_s) + GRACE_S
        if not self._is_ready:
            limit_s += START_S + self._config.act_timeout_s

        def exchange() -> object:
            self._connection.send_bytes(json.dumps([what, arguments]).encode())
            return json.loads(self._connection.recv_bytes())

        try:
            async with asyncio.timeout(limit_s):
                kind, value = cast("tuple[str, Json]", await call_user(exchange, what))
        except TimeoutError as error:
            self._end()
            raise EnvironmentFailure(
                "deadline",
                f"the environment's process has not answered '{what}' within {limit_s:g} s, and was ended: raise "
                "environment.act_timeout_s, or let it answer faster",
            ) from error
        except (EOFError, OSError) as error:
            how = self._end(NOTICE_S)
            kind = kind_of_end(self._process.exitcode or 0)
            raise EnvironmentFailure(kind, f"the environment's process has ended with {how} during '{what}'") from error
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure("environment", f"'{what}' has arguments that JSON cannot hold: {error}") from error
        self._is_ready = True
        if kind == "failure":
            raise EnvironmentFailure(*cast("tuple[FailureKind, str]", value))
        return value

    def _end(self, notice_s: float = 0.0) -> str:
        """End the process and all that it has started, after some seconds to end by itself; its exit code in words."""
        self._process.join(notice_s)
        with suppress(OSError, ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join(GRACE_S)
        self._connection.close()
        return exit_in_words(self._process.exitcode or 0)


@dataclass(frozen=True)
class RemoteTool(Tool):
    """A tool in an episode's process, which answers one call after the other.

    Attributes:
        there: The tool, as it is described.
        world: The process.
    """

    there: FunctionTool
    world: ProcessEnvironment
    limits_itself: ClassVar[bool] = True

    @property
    def owner(self) -> object | None:
        """The process."""
        return self.world

    def prepare(self, arguments: Mapping[str, Json]) -> Mapping[str, object]:
        """Check arguments; they are converted in the process."""
        self.there.prepare(arguments)
        return arguments

    async def call(self, arguments: Mapping[str, object]) -> object:
        """Call the tool in the process."""
        result = await self.world.call_tool(self.name, cast("Mapping[str, Json]", arguments))
        if result.refusal is not None:
            raise ToolError(result.text)
        return result.text


def _start(name: str, config: EnvironmentConfig, connection: Connection) -> BaseProcess:
    """Start a process without the main module of this one, and with it torch and the model code."""
    context = multiprocessing.get_context("forkserver")
    main = vars(sys.modules["__main__"])
    with _starting:
        context.set_forkserver_preload([__name__, name.partition(":")[0]])
        hidden: dict[str, object] = {key: main[key] for key in ("__spec__", "__file__") if key in main}
        try:
            main["__spec__"] = None
            main.pop("__file__", None)
            arguments = (name, config.model_dump_json(), connection, list(sys.path))
            process = context.Process(target=serve, args=arguments, daemon=True, name="environment")
            process.start()
        finally:
            main.update(hidden)
    return process


def serve(name: str, config: str, connection: Connection, path: Sequence[str]) -> None:
    """Be the process of an episode, until the connection is closed.

    Args:
        name: Environment as `module:Class`.
        config: The recipe's `environment` section, as JSON.
        connection: Connection to the player. It sends pairs of what is asked and the arguments; it receives the kind of
            an answer, `value` or `failure`, and the answer.
        path: Folders in which modules are found.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output belongs to the run
    sys.path[:] = path
    settings = EnvironmentConfig.model_validate_json(config)
    asyncio.run(_serve(name, settings, connection))


async def _serve(name: str, config: EnvironmentConfig, connection: Connection) -> None:
    world: ThreadEnvironment | None = None
    tools: dict[str, FunctionTool] = {}
    pid = os.getpid()
    while True:
        try:
            what, arguments = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            if world is None:
                found = cast("type[Environment]", load_own(name))
                _seed(str(arguments.get("seed")))
                make = partial(found, **config.options)
                world = ThreadEnvironment(make, config.act_timeout_s, found.agents, shows_images=config.images)
                tools = {tool.name: tool for tool in python_tools(config, found)}
            if what == "tool":
                own = [await world.bind(tools[arguments["name"]])]
                toolbox = Toolbox(own, max_result_characters=config.max_result_characters)
                (result,) = await toolbox.run([Call(**arguments)], config.tool_timeout_s)
                answer: tuple[str, object] = ("value", asdict(result))
            else:
                answer = ("value", await _answer(world, what, arguments))
        except EnvironmentFailure as failure:
            answer = "failure", (failure.kind, str(failure))
        try:
            message = json.dumps(answer)
        except (TypeError, ValueError) as error:
            text = f"what '{what}' returned cannot be sent to the player: {error}; use text, numbers, lists and dicts"
            message = json.dumps(("failure", ("environment", text)))
        if os.getpid() != pid:
            os._exit(1)  # a copy of this process that the environment has made must not answer
        connection.send_bytes(message.encode())


async def _answer(world: ThreadEnvironment, what: str, arguments: Mapping[str, str]) -> object:
    match what:
        case "reset":
            _seed(arguments["seed"])
            return await world.reset(cast("Task", arguments["task"]), arguments["seed"])
        case "act":
            return vars(await world.act(arguments["text"]))
        case "make":
            await world.make()
        case _:
            await world.close()
    return None


def _seed(seed: str) -> None:
    """Seed the global random numbers, which some libraries use."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.Random(seed).getrandbits(32))  # noqa: S311
