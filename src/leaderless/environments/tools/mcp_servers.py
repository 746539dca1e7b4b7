"""Tools of servers of the Model Context Protocol, through the official client library.

All sessions of a rank live in one thread with an event loop of its own. So they survive the loops that play episodes,
and continue while an engine is busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import McpServerConfig
from leaderless.config.packaged_files import how_to_install
from leaderless.environments.guarded_environment import EnvironmentFailure
from leaderless.environments.loop_thread import LoopThread
from leaderless.environments.tools.function_tool import ToolError
from leaderless.environments.tools.served_tools import SchemaTool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

CLOSE_TIMEOUT_S = 10.0
"""Seconds that ending a session may take; a program that is still there after six has been killed."""


class McpServers:
    """The servers of a recipe, for one rank.

    Attributes:
        tools: Tools of each server, by its name; they have no session yet.
    """

    def __init__(self, configs: Mapping[str, McpServerConfig]) -> None:
        """Start a session with each server, to learn which tools it has.

        Raises:
            RecipeError: The client library is missing, or a server does not answer.
        """
        if configs and find_spec("mcp") is None:
            raise RecipeError.at("environment.mcp", f"needs the package 'mcp': {how_to_install('mcp')}")
        self._configs = configs
        self.tools: dict[str, list[McpTool]] = {}
        self._thread: LoopThread | None = None
        if not configs:
            return
        self._thread = thread = LoopThread("mcp")
        try:
            self._shared = {name: McpSession(name, config, thread) for name, config in configs.items()}
            lists = {name: thread.start(session.list_tools()) for name, session in self._shared.items()}
            for name, listing in lists.items():
                try:
                    self.tools[name] = listing.result()
                except EnvironmentFailure as error:
                    raise RecipeError.at(f"environment.mcp.{name}", str(error)) from error
                if not configs[name].shared:
                    thread.start(self._shared[name].end()).result()
        except BaseException:
            self.close()
            raise

    def session(self, name: str) -> McpSession:
        """The session that an episode uses; nothing is started before its first call."""
        config = self._configs[name]
        assert self._thread is not None, "a server has a name"
        return self._shared[name] if config.shared else McpSession(name, config, self._thread)

    def close(self) -> None:
        """End shared sessions and the thread."""
        if self._thread is None:
            return
        for session in self._shared.values():
            with suppress(CancelledError):
                self._thread.start(session.end()).result()
        self._thread.stop(CLOSE_TIMEOUT_S)
        self._thread = None


class McpSession:
    """Calls to a server in one session, which begins with the first call.

    If the server dies, the calls in progress fail. A shared session begins anew with the next call; one of an episode
    does not, since what the server knew of the episode is lost.
    """

    def __init__(self, name: str, config: McpServerConfig, thread: LoopThread) -> None:
        self.name = name
        self._config, self._thread = config, thread
        self._connection: _Connection | None = None
        self._retired: list[_Connection] = []
        self._is_lost = False

    async def call(self, tool: str, arguments: Mapping[str, Json]) -> str:
        """The text with which the server answers, from any loop.

        Raises:
            ToolError: The tool refuses the call.
            EnvironmentFailure: The server does not answer.
        """
        return await self._thread.run(self._call(tool, arguments))

    async def close(self) -> None:
        """End the session of an episode, from any loop; a shared one stays open."""
        if not self._config.shared:
            await self._thread.run(self.end())

    async def end(self) -> None:
        """End the session, in the loop of the sessions."""
        if self._connection is not None:
            self._lose(self._connection)
        await asyncio.gather(*(connection.end() for connection in self._retired))

    async def list_tools(self) -> list[McpTool]:
        """The tools of the server, in the loop of the sessions."""
        connection = await self._connected()
        found: list[McpTool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    page = await connection.client.list_tools(cursor=cursor)
                    for one in page.tools:
                        facts = one.name, one.description or "", one.input_schema
                        found.append(McpTool(*facts, server=self.name, name_there=one.name))
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
        except Exception as error:
            raise self._failed(f"has not listed its tools: {_reason(error)}") from error

    async def _call(self, tool: str, arguments: Mapping[str, Json]) -> str:
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND

        connection = await self._connected()
        try:
            with connection.in_use():
                answer = await connection.client.call_tool(tool, dict(arguments))
        except asyncio.CancelledError:  # it took too long, and may hang
            self._lose(connection)
            raise
        except Exception as error:
            if isinstance(error, MCPError) and error.code in {INVALID_PARAMS, METHOD_NOT_FOUND}:
                raise ToolError(error.message) from error
            self._lose(connection)
            raise self._failed(f"has not answered a call of '{tool}': {_reason(error)}") from error
        text = _text_of(answer)
        if answer.is_error:
            raise ToolError(text)
        return text

    async def _connected(self) -> _Connection:
        if self._is_lost:
            raise self._failed("has died during the episode, and with it what it knew of the episode")
        if self._connection is None:
            self._connection = _Connection(self._config)
        connection = self._connection
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await asyncio.shield(connection.ready)
        except TimeoutError as error:
            self._lose(connection)
            limit = f"{self._config.start_timeout_s:g} s (start_timeout_s)"
            raise self._failed(f"has not answered within {limit}") from error
        except Exception as error:
            self._lose(connection)
            raise self._failed(f"cannot be reached: {_reason(error)}") from error
        return connection

    def _lose(self, connection: _Connection) -> None:
        """Use a connection no more; other calls in progress may still be answered."""
        if self._connection is connection:
            self._connection = None
            self._is_lost = not self._config.shared
            self._retired = [known for known in self._retired if not known.has_ended] + [connection]
        connection.retire()

    def _failed(self, problem: str) -> EnvironmentFailure:
        config = self._config
        address = config.url or " ".join(config.command)
        remedy = "check that it runs there" if config.url else "try the command in a terminal"
        return EnvironmentFailure("infrastructure", f"the MCP server '{self.name}' ({address}) {problem}; {remedy}")


class _Connection:
    """A client, entered and left by one task, as its library wants."""

    client: Client

    def __init__(self, config: McpServerConfig) -> None:
        from anyio import CancelScope

        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_calls, self._is_retired = 0, False
        self._leave = asyncio.Event()
        self._start = CancelScope()  # ends a program in order, as `Task.cancel` does not
        self._task = asyncio.create_task(self._own(config))

    async def _own(self, config: McpServerConfig) -> None:
        problem: Exception = RuntimeError("it was ended")
        try:
            with self._start:
                async with _client(config) as self.client:
                    self.ready.set_result(None)
                    await self._leave.wait()
        except Exception as error:  # noqa: BLE001 - whoever waits for `ready` gets it
            problem = error
        if not self.ready.done():
            self.ready.set_exception(problem)
            self.ready.exception()  # perhaps nobody waits

    @property
    def has_ended(self) -> bool:
        """Whether the session is over, and the server's program with it."""
        return self._task.done()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A call in progress."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._is_retired:
                self.retire()

    def retire(self) -> None:
        """Leave as soon as no call is in progress, without waiting for it."""
        self._is_retired = True
        if not self.ready.done():
            self._start.cancel()
        elif not self._num_calls:
            self._leave.set()

    async def end(self) -> None:
        """Leave now; the server's program has ended then."""
        self.retire()
        self._leave.set()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)


def _client(config: McpServerConfig) -> Client:
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if config.url is None:
        command, *arguments = config.command
        program = StdioServerParameters(command=command, args=arguments, env=dict(config.env))
        return Client(stdio_client(program, errlog=sys.__stderr__ or sys.stderr))
    if config.token_variable is None:
        return Client(config.url)
    from httpx2 import AsyncClient

    token = os.environ.get(config.token_variable)
    if not token:
        raise ValueError(f"the environment variable {config.token_variable} (token_variable) is not set")
    return Client(
        streamable_http_client(config.url, http_client=AsyncClient(headers={"Authorization": f"Bearer {token}"}))
    )


@dataclass(frozen=True)
class McpTool(SchemaTool):
    """A tool of a server.

    Attributes:
        server: Name of the server.
        name_there: Name of the tool on the server.
        session: Session in which it is called; None while it is only described.
    """

    server: str
    name_there: str
    session: McpSession | None = None

    async def call(self, arguments: Mapping[str, object]) -> object:
        """Call the tool on its server."""
        assert self.session is not None, "a tool of an episode has a session"
        return await self.session.call(self.name_there, arguments)  # type: ignore[arg-type]


def _text_of(answer: CallToolResult) -> str:
    """Answer of a server, for a policy that reads texts."""
    if not answer.content and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    parts = []
    for block in answer.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "resource_link":
            parts.append(f"[{block.name}: {block.uri}]")
        else:
            parts.append(f"[{block.type}, which cannot be shown as a text]")
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The cause of an error, which may be in a group with others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")
