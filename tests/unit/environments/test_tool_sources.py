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
from leaderless.config.mcp import McpServerConfig
from leaderless.environments.protocol import Environment, EpisodeFailed
from leaderless.environments.tools import Call, tool
from leaderless.environments.tools.formats import read_hermes
from leaderless.environments.tools.sources import ToolSources

HERE = "tests.unit.environments.test_tool_sources"
SERVER = str(Path(__file__).with_name("mcp_server.py"))
closed = []


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def without_hint(a) -> int: ...


class Memory:
    def __init__(self):
        self.words = []

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


class World(Environment):
    def __init__(self):
        self.secret = 0

    def reset(self, task, _):
        self.secret = task["secret"]
        return "Guess."

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
    with pytest.raises(EpisodeFailed) as failed:
        asyncio.run(toolbox.run(calls, timeout_s))
    return failed.value.args


def open_box(sources, environment=None):
    return asyncio.run(sources.open(environment, read_hermes, 1000))


def test_each_episode_has_its_own_objects_of_environment_and_classes():
    sources = ToolSources(World, [f"{HERE}:add", f"{HERE}:Memory"])
    assert [schema["function"]["name"] for schema in sources.schemas()] == ["is_more", "add", "remember"]
    boxes = []
    for secret in (3, 5):
        world = World()
        world.reset({"secret": secret}, None)
        boxes.append(open_box(sources, world))
    calls = [Call("is_more", {"than": 4}), Call("add", {"a": 1, "b": 2}), Call("remember", {"word": "x"})]
    assert answer(boxes[0], *calls) == ["false", "3", "x"]
    assert answer(boxes[1], *calls, calls[2]) == ["true", "3", "x", "x x"]
    closed.clear()
    for box in boxes:
        asyncio.run(box.close(5.0))
    assert closed == [["x"], ["x", "x"]]
    sources.close()


def test_a_class_that_cannot_be_made_fails_its_episode():
    sources = ToolSources(None, [f"{HERE}:Broken"])
    with pytest.raises(EpisodeFailed, match="the tool Broken cannot be made: no disk"):
        open_box(sources)


@pytest.mark.parametrize(
    ("environment", "names", "key", "problem"),
    [
        (None, ["ad"], "environment.tools", "unknown tool 'ad'"),
        (None, [f"{HERE}:ad"], "environment.tools", "has no function 'ad' (did you mean 'add'?)"),
        (None, ["no.such:add"], "environment.tools", "module 'no.such' cannot be imported"),
        (None, [f"{HERE}:without_hint"], "environment.tools", "parameter 'a' has no type hint"),
        (None, [f"{HERE}:McpServerConfig"], "environment.tools", "has no tools: mark methods with @tool"),
        (Untyped, [], "environment.type", "parameter 'than' has no type hint"),
        (Twice, [f"{HERE}:add"], "environment.tools", "2 tools have the name 'add'"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(environment, names, key, problem):
    with pytest.raises(RecipeError) as error:
        ToolSources(environment, names)
    assert error.value.problems[0].key == key
    assert problem in str(error.value)


@pytest.fixture
def servers():
    opened = []

    def start(**configs):
        opened.append(ToolSources(None, (), {name: McpServerConfig(**config) for name, config in configs.items()}))
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
    assert cause == "mcp:own"
    assert "has not answered a call of 'die'" in text
    assert failure_of(first, Call("own_count"))[0] == "mcp:own"
    assert failure_of(second, Call("all_die"))[0] == "mcp:all"
    assert [text.split()[0] for text in answer(second, *counts)] == ["2", "10"]  # what is shared began anew
    assert failure_of(second, Call("own_sleep", {"seconds": 9}), timeout_s=0.2)[0] == "tool_timeout:own_sleep"
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
    assert failure_of(box, Call("add", {"a": 1, "b": 2}))[0] == "mcp:web"
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
        ToolSources(None, (), {"x": McpServerConfig(command=("x",))})
