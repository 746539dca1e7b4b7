"""Environments of OpenEnv by address, with the servers and the client of the package: `make test-openenv`."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.by_address import trained
from tests.openenv_worlds import RECORD, SESSIONS, said_by, served
from tests.unit.environments.scripted import ScriptedEngine, play
from tests.unit.environments.test_play import Tokenizer
from tests.unit.environments.test_tool_episodes import call, played

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode
from leaderless.environments.registry import find_environment, try_environment
from leaderless.rollout.engine import Request

pytestmark = pytest.mark.skipif(find_spec("openenv") is None, reason="no package openenv: make test-openenv")
NUMBERS = "4231"
"""Guesses of which one is right."""


def guessing(url: str, say: Any, count: int = 1, **settings: Any) -> list[Episode]:
    """Episodes of the guessing game, in which the policy says something that depends on what it has read."""
    options = {"url": url, "reset": {"high": 4}, **settings.pop("options", {})}
    make = partial(find_environment(EnvironmentConfig(type="openenv", options=options)), **options)
    tokenizer = Tokenizer()

    def script(request: Request) -> list[int]:
        return tokenizer.encode(say(tokenizer.decode(request.prompt)), add_special_tokens=False)

    engine = ScriptedEngine(script)
    tasks = [{"seed": number} for number in range(count)]
    writer = ChatWriter(tokenizer, False)  # type: ignore[arg-type]
    return play(engine, make, writer, tasks, 1000, max_turns=5, **settings)[0]  # type: ignore[arg-type]


def in_order(context: str) -> str:
    """Guess one number after the other, by the number of hints so far."""
    return NUMBERS[context.count("higher") + context.count("lower")]


@pytest.mark.parametrize("name", SESSIONS)
def test_the_record_is_what_a_server_of_the_package_says(name: str) -> None:
    known = json.loads(RECORD.read_text())[name]
    assert said_by(name) == known


def test_each_of_many_episodes_has_a_session_of_its_own() -> None:
    with served("guess", 3) as url:
        episodes = guessing(url, in_order, 12, options={"state": True})
    assert [(episode.cause, episode.error) for episode in episodes] == [("", "")] * 12
    wanted = [str(Random(seed).randint(1, 4)) for seed in range(12)]
    assert [NUMBERS[len(episode.answers) - 2] for episode in episodes] == wanted
    for episode in episodes:
        last = episode.answers[-1].turn
        assert (last.reward, last.done) == (1.0, True)
        assert episode.info["state"]["step_count"] == len(episode.answers) - 1  # type: ignore[index, call-overload]


def test_an_episode_that_hangs_ends_by_its_deadline_and_others_are_unhurt() -> None:
    first = threading.Event()

    def say(context: str) -> str:
        if not first.is_set():
            first.set()
            return "sleep"
        return in_order(context)

    begin = time.monotonic()
    with served("guess") as url:
        episodes = guessing(url, say, 4, act_timeout_s=5)
        took_s = time.monotonic() - begin
    assert sorted(episode.cause for episode in episodes) == ["", "", "", "deadline"]
    assert took_s < 50, "the server sleeps for a minute"


def test_an_error_of_the_environment_is_one_of_the_episode() -> None:
    with served("guess") as url:
        (episode,) = guessing(url, lambda _: "boom")
    assert episode.cause == "environment"
    assert "reports EXECUTION_ERROR for 'step': boom" in episode.error


def test_a_server_that_ends_fails_its_episodes_which_are_tried_again() -> None:
    with served("guess") as url:
        (episode,) = guessing(url, lambda _: "die", max_attempts=2)
    assert (episode.cause, episode.attempts) == ("infrastructure", 2)
    first, second = episode.failures
    assert "has ended the session (" in first.error
    assert "cannot be reached: Failed to connect to ws://" in second.error


def test_a_session_that_was_lost_between_two_steps_is_not_another_world() -> None:
    async def lose(url: str) -> None:
        world = find_environment(EnvironmentConfig(type="openenv", options={"url": url}))(url=url)  # type: ignore[call-arg]
        await world.reset({}, Random(0))  # type: ignore[misc]
        session = world._session  # type: ignore[attr-defined]
        connection = session._client._ws
        connection.transport.abort()
        await asyncio.sleep(0.5)
        with pytest.raises(Exception, match="the connection was lost, and with it the world of the episode"):
            await world.act("1")  # type: ignore[misc]

    with served("guess") as url:
        asyncio.run(lose(url))


def test_a_full_server_is_waited_for_and_refused_with_the_remedy() -> None:
    def say(context: str) -> str:
        time.sleep(1.0)
        return in_order(context)

    with served("guess", 1) as url:
        episodes = guessing(url, say, 2, options={"wait_s": 0.3}, max_attempts=1)
    assert sorted(episode.cause for episode in episodes) == ["", "infrastructure"]
    error = next(episode.error for episode in episodes if episode.error)
    assert "no free session for 0.3 s (Server at capacity" in error
    assert "raise its max_concurrent_envs, or lower environment.concurrency" in error


def test_tools_are_those_of_the_server() -> None:
    with served("tools") as url:
        messages = [call("add", a=1, b=2), call("add", a=13, b=1), call("none", a=1), call("add", a=2, b=2)]
        (episode,) = played(messages, type="openenv", options={"url": url}, tools=[]).episodes
    assert (episode.cause, episode.error) == ("", "")
    assert [node.said.reward for node in episode.trace.said() if node.said] == [0.5, 0.5, 0.0, 0.5]
    texts = [result.text.partition("\n")[0] for result in episode.calls]
    assert texts[:2] == ["3", "Error calling tool 'add': unlucky"]
    assert "There is no tool 'none'" in texts[2]
    assert episode.calls[-1].done


def test_a_server_of_another_protocol_is_refused_before_a_run() -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_schema = self.path == "/schema"
            body = json.dumps({"action": {"properties": {}}}).encode() if is_schema else b""
            self.send_response(200 if is_schema else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        (episode,) = guessing(url, lambda _: '{"x": 1}')
        assert episode.cause == "environment"
        assert "is no OpenEnv server that this client understands: /ws is answered with an error" in episode.error
        assert "HTTP 404; run it with openenv of the same version as here (0.10" in episode.error
        with pytest.raises(RecipeError, match="/schema is answered with 404"):
            try_environment(EnvironmentConfig(type="openenv", options={"url": f"{url}/x"}))
    finally:
        server.shutdown()
        server.server_close()


def test_a_recipe_trains_by_address(tmp_path: Path) -> None:
    with served("letters", 16) as url:
        steps, printed = trained(tmp_path, "openenv", url, **{"steps": 20, "optimizer.learning_rate": 1e-2})
    assert len(steps) == 20, printed[-3000:]
    assert all(step["episode/failed"] == 0 and step["episode/turns"] == 2 for step in steps)
    means = [step["reward/mean"] for step in steps]
    print(f"share of the letter in both messages: {means[0]:.2f} in the first step, {means[-1]:.2f} in the last")
    assert sum(means[-3:]) > 1.5 * sum(means[:3]), "it learns what the server rewards"


def test_a_recipe_without_its_server_is_refused(tmp_path: Path) -> None:
    steps, printed = trained(tmp_path, "openenv", "http://127.0.0.1:1")
    assert steps == []
    assert "cannot be reached: [Errno 111] Connection refused; start it, or" in " ".join(printed.split())
