"""Tools come from the environment, from functions and classes, and from servers; an episode has its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig, McpServerConfig
from leaderless.environments.guarded_environment import EnvironmentFailure, ThreadEnvironment
from leaderless.environments.protocol import Environment
from leaderless.environments.tools import Call, tool
from leaderless.environments.tools.sources import ToolSources

HERE = "tests.unit.environments.test_tool_sources"
SERVER = str(Path(__file__).with_name("mcp_server.py"))
closed = []


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def without_hint(a) -> int: ...


class Memory:
    def __init__(self, words=()):
        self.words = [*words]

    @tool
    async def remember(self, word: str) -> str:
        """Remember a word."""
        self.words.append(word)
        return " ".join(self.words)

    async def close(self):
        closed.append(self.words)


class Broken(Memory):
    def __init__(self):
        raise OSError("no disk")


class Plain(Environment):
    def reset(self, task, _):
        self.secret = task["secret"]
        return "Guess."


class World(Plain):
    def __init__(self, secret=0):
        self.secret = secret

    @tool
    def is_more(self, than: int) -> bool:
        """Compare the secret."""
        return self.secret > than


class Untyped(World):
    @tool
    def is_more(self, than): ...


class Twice(World):
    @tool
    def add(self, a: int) -> int: ...


def answer(toolbox, *calls, timeout_s=20.0):
    return [result.text for result in asyncio.run(toolbox.run(calls, timeout_s))]


def failure_of(toolbox, *calls, timeout_s=20.0):
    with pytest.raises(EnvironmentFailure) as failed:
        asyncio.run(toolbox.run(calls, timeout_s))
    return failed.value.kind, str(failed.value)


def sources_of(environment=Plain, *tools, **settings):
    return ToolSources(EnvironmentConfig(type="x:Y", tools=tools, **settings), environment)


def open_box(sources, world=None):
    return asyncio.run(sources.open(world or ThreadEnvironment(Plain, 5.0)))


def test_each_episode_has_its_own_objects_of_environment_and_classes():
    sources = sources_of(World, f"{HERE}:add", {"type": f"{HERE}:Memory", "options": {"words": ["a"]}})
    assert [schema["function"]["name"] for schema in sources.schemas] == ["is_more", "add", "remember"]
    worlds = [ThreadEnvironment(lambda secret=secret: World(secret), 5.0) for secret in (3, 5)]
    boxes = [open_box(sources, world) for world in worlds]
    calls = [Call("is_more", {"than": 4}), Call("add", {"a": 1, "b": 2}), Call("remember", {"word": "x"})]
    assert answer(boxes[0], *calls) == ["false", "3", "a x"]
    assert answer(boxes[1], *calls, calls[2]) == ["true", "3", "a x", "a x x"]
    closed.clear()
    for world in worlds:
        asyncio.run(world.close())
    assert closed == [["a", "x"], ["a", "x", "x"]]
    sources.close()


def test_a_class_that_cannot_be_made_fails_its_episode():
    with pytest.raises(
        EnvironmentFailure, match="the constructor of the tool Broken raised OSError: no disk"
    ) as failed:
        open_box(sources_of(Plain, f"{HERE}:Broken"))
    assert failed.value.kind == "tool"


def test_the_python_tool_has_a_short_name():
    assert [tool.usage for tool in sources_of(Plain, "python").tools] == ["python(code: string)"]


@pytest.mark.parametrize(
    ("environment", "entry", "key", "problem"),
    [
        (Plain, "pythons", "environment.tools.0", "unknown tool 'pythons' (did you mean 'python'?)"),
        (Plain, f"{HERE}:ad", "environment.tools.0", "has no function 'ad' (did you mean 'add'?)"),
        (Plain, "no.such:add", "environment.tools.0", "module 'no.such' cannot be imported"),
        (Plain, f"{HERE}:without_hint", "environment.tools.0", "parameter 'a' has no type hint"),
        (Plain, f"{HERE}:McpServerConfig", "environment.tools.0", "has no tools: mark methods with @tool"),
        (Plain, {"type": f"{HERE}:add", "options": {"a": 1}}, "environment.tools.0.options", "only a class takes"),
        (Plain, {"type": f"{HERE}:Memory", "options": {"size": 1}}, "environment.tools.0.options", "Memory(words=())"),
        (None, "python", "environment.tools", "a program calls its tools itself"),
        (Untyped, "python", "environment.type", "parameter 'than' has no type hint"),
        (Twice, f"{HERE}:add", "environment.tools", "2 tools have the name 'add'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(environment, entry, key, problem):
    with pytest.raises(RecipeError) as error:
        sources_of(environment, entry)
    assert error.value.problems[0].key == key
    assert problem in str(error.value)


@pytest.fixture
def servers():
    opened = []

    def start(**configs):
        opened.append(sources_of(Plain, mcp=configs))
        return opened[-1]

    yield start
    for sources in opened:
        sources.close()


def test_servers_on_standard_input_serve_an_episode_or_all(servers, monkeypatch):
    monkeypatch.setenv("OUR_SECRET", "x")
    command = (sys.executable, SERVER)
    sources = servers(own={"command": command, "env": {"GIVEN": "y"}}, all={"command": command, "shared": True})
    assert {tool.name.partition("_")[0] for tool in sources.tools} == {"own", "all"}  # the names clash
    first, second = open_box(sources), open_box(sources)
    counts = [Call("own_count"), Call("all_count", {"by": 10})]
    begun = answer(first, *counts) + answer(second, *counts)
    assert [text.split()[0] for text in begun] == ["1", "10", "1", "20"]
    assert begun[1].split()[1] == begun[3].split()[1]
    variables = [Call("own_variable", {"name": name}) for name in ("GIVEN", "OUR_SECRET")]
    assert answer(first, *variables, Call("own_add", {"a": "x", "b": 1}), Call("own_refuse")) == [
        "y",
        "none",
        "Error: own_add: a: 'x' is not of type 'integer'. Use own_add(a: integer, b: integer).",
        "Error executing tool refuse: not today",
    ]
    cause, text = failure_of(first, Call("own_die"))
    assert cause == "infrastructure"
    assert "the MCP server 'own'" in text
    assert "has not answered a call of 'die'" in text
    assert "has died during the episode" in failure_of(first, Call("own_count"))[1]
    assert "the MCP server 'all'" in failure_of(second, Call("all_die"))[1]
    assert [text.split()[0] for text in answer(second, *counts)] == ["2", "10"]  # what is shared began anew
    assert failure_of(second, Call("own_sleep", {"seconds": 9}), timeout_s=0.2)[0] == "deadline"
    for box in (first, second):
        asyncio.run(box.close(20.0))
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun[2].split()[1]), 0)


def test_a_server_at_an_address_may_come_back(servers, monkeypatch):
    monkeypatch.setenv("DOOR_TOKEN", "open sesame")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, SERVER, str(port)]
    address = {"url": f"http://127.0.0.1:{port}/mcp", "token_variable": "DOOR_TOKEN"}
    with subprocess.Popen(program) as process:
        wait_for(port)
        sources = servers(web={**address, "shared": True})
        with pytest.raises(RecipeError, match="cannot be reached"):
            servers(web={"url": address["url"]})
        assert [tool.name for tool in sources.tools][:2] == ["count", "add"]
        box = open_box(sources)
        assert answer(box, Call("add", {"a": 1, "b": 2}), Call("add", {"a": 3, "b": 4})) == ["3", "7"]
        process.send_signal(signal.SIGKILL)
    assert "the MCP server 'web'" in failure_of(box, Call("add", {"a": 1, "b": 2}))[1]
    with subprocess.Popen(program) as process:
        wait_for(port)
        assert answer(box, Call("add", {"a": 1, "b": 2})) == ["3"]
        process.send_signal(signal.SIGKILL)


def wait_for(port):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing answers at port {port}")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"command": ["/no/such/program"]}, "cannot be reached: FileNotFoundError"),
        ({"command": ["sleep", "60"], "start_timeout_s": 0.3}, "has not answered within 0.3 s (start_timeout_s)"),
        ({"command": ["false"]}, "cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp"}, "check that it runs there"),
        ({"url": "http://127.0.0.1:9/mcp", "token_variable": "NO_SUCH"}, "NO_SUCH (token_variable) is not set"),
    ],
)
def test_a_server_that_does_not_answer_is_refused(servers, config, problem):
    with pytest.raises(RecipeError) as error:
        servers(tools=config)
    assert error.value.problems[0].key == "environment.mcp.tools"
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "must have either `command`"),
        ({"command": ["x"], "url": "http://x"}, "must have either `command`"),
        ({"command": ["x"], "token_variable": "X"}, "`token_variable` is sent to a `url`"),
        ({"url": "http://x", "env": {"A": "b"}}, "`env` is for a `command`"),
    ],
)
def test_a_server_has_one_address(config, problem):
    with pytest.raises(ValueError, match="`") as error:
        McpServerConfig(**config)
    assert problem in str(error.value)


def test_a_missing_client_library_is_named(monkeypatch):
    monkeypatch.setattr("leaderless.environments.tools.mcp_servers.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"needs the package 'mcp': .* '\.\[mcp\]'"):
        sources_of(Plain, mcp={"x": {"command": ["x"]}})
