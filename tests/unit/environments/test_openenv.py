"""Environments of OpenEnv, with a stand-in for the package that answers as servers of the package have answered."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from tests.openenv_worlds import RECORD
from tests.unit.environments.test_tool_episodes import call, played, told

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.episode import Episode
from leaderless.environments.protocol import EpisodeFailed, Turn
from leaderless.environments.registry import environment_class, try_environment, world_maker
from leaderless.environments.tools.served_tools import ServedEnvironment

STAND_IN = RECORD.parent
RECORDED: dict[str, Any] = json.loads(RECORD.read_text())
Answers = Callable[[dict[str, Any]], Any]
"""Function that answers a message of a session: with an answer, or an error to raise."""


class Session:
    """A session that answers as a function says, and notes what it was asked."""

    def __init__(self, answers: Answers) -> None:
        self.is_closed, self.asked, self._answers = False, [], answers

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message)
        found = self._answers(message)
        if isinstance(found, float):
            await asyncio.sleep(found)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.is_closed = True


class Server:
    """A server whose schemas are fetched as from a real one."""

    def __init__(self, schema: object, begin: Callable[[], Answers]) -> None:
        self.sessions: list[Session] = []
        self._begin = begin
        body = json.dumps(schema).encode()

        self.tokens: list[str | None] = []
        tokens = self.tokens

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                tokens.append(self.headers["Authorization"])
                self.send_response(200 if self.path == "/schema" and schema is not None else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def connect(self) -> Session:
        self.sessions.append(Session(self._begin()))
        return self.sessions[-1]

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def from_record(name: str) -> Callable[[], Answers]:
    """Sessions in which any message is answered as it was when the record was made."""

    def begin() -> Answers:
        left = [*RECORDED[name]["session"]]

        def answer(message: dict[str, Any]) -> Any:
            place = next((place for place, (asked, _) in enumerate(left) if asked == message), None)
            assert place is not None, f"{message} is not in the record"
            return left.pop(place)[1]

        return answer

    return begin


@pytest.fixture(scope="module")
def package() -> Iterator[ModuleType]:
    """The stand-in, in place of the package."""

    def forget() -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "openenv" or name.startswith("leaderless.environments.adapters.openenv"):
                del sys.modules[name]

    forget()
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    yield importlib.import_module("openenv.core")
    sys.path.remove(str(STAND_IN))
    forget()


@pytest.fixture
def start(package: ModuleType) -> Iterator[Callable[..., Server]]:
    """Start a server, by the name of its record or with custom answers."""
    started: list[Server] = []

    def start(name: str, begin: Callable[[], Answers] | None = None, schema: object = ...) -> Server:
        schema = RECORDED[name]["schema"] if schema is ... else schema
        server = Server(schema, begin or from_record(name))
        package.SERVERS[server.url] = server
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
    package.SERVERS.clear()


def one(server: Server, messages: list[str], options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """What becomes of an episode."""
    environment = {"type": "openenv", "options": {"url": server.url, **(options or {})}, "tools": [], **settings}
    return played(messages, **environment)


def rewards(episode: Episode) -> list[float]:
    return [node.said.reward for node in episode.trace.said() if node.said]


FIXED = {"reset": {"seed": 3, "high": 4}}
"""Options with which a reset is as in the record."""


def test_a_message_is_an_action_with_one_text(start: Callable[..., Server]) -> None:
    server = start("guess")
    found = one(server, ["1", "2"], {**FIXED, "state": True, "instructions": "Guess."})
    (episode,) = found.episodes
    assert (episode.cause, episode.error, episode.is_cut) == ("", "", False)
    assert rewards(episode) == [0.0, 1.0]
    assert "Guess.\n1 to 4" in str(episode.trace.nodes[0].messages[-1]["content"])
    assert told(found) == ["higher"]
    assert episode.info == {"state": {"episode_id": None, "step_count": 2}}
    asked = [message for session in server.sessions for message in session.asked]
    assert asked == [message for message, _ in RECORDED["guess"]["session"][:4]]
    assert all(session.is_closed for session in server.sessions)


def test_an_action_with_other_fields_is_the_last_object_in_a_message(start: Callable[..., Server]) -> None:
    found = one(
        start("moves"),
        ["no", '{"row": 1}', '{"column": "2"}', 'not {"column": 1} but {"column": 2}'],
        {"reset": {"seed": 1}},
    )
    (episode,) = found.episodes
    usage = "Answer with a JSON object that has the fields column: integer, is_sure: boolean = false."
    first = str(episode.trace.nodes[0].messages[-1]["content"])
    assert f'{usage}\n{{"board": [0, 0, 0], "legal": [0, 1, 2]}}' in first
    none, unknown, wrong = told(found)
    assert none == f"There is no JSON object in the message. {usage}"
    assert "'row' was unexpected" in unknown
    assert "column: '2' is not of type 'integer'" in wrong
    assert rewards(episode) == [0.0, 0.0, 0.0, 2.0]


def test_the_policy_is_shown_the_fields_that_the_recipe_names(start: Callable[..., Server]) -> None:
    def first(fields: object) -> str:
        found = one(start("moves"), ['{"column": 2}'], {"reset": {"seed": 1}, "observation": fields})
        return str(found.episodes[0].trace.nodes[0].messages[-1]["content"])

    assert first("legal").endswith("\n[0, 1, 2]")
    assert first(["legal"]).endswith('\n{"legal": [0, 1, 2]}')


def test_calls_of_tools_are_steps_with_rewards_until_one_ends_the_episode(start: Callable[..., Server]) -> None:
    server = start("tools")
    found = one(
        server,
        [call("add", a=1, b=2), call("add", a=13, b=1), call("add", a="2", b=2), call("add", a=2, b=2)],
        {"reset": {"seed": 1}},
    )
    (episode,) = found.episodes
    assert (episode.cause, episode.error, episode.is_cut) == ("", "", False)
    assert "Add twice." in str(episode.trace.nodes[0].messages)
    assert rewards(episode) == [0.5, 0.5, 0.0, 0.5]
    three, unlucky, wrong = told(found)
    assert three == "3"
    assert unlucky == "Error calling tool 'add': unlucky"
    assert "'2' is not of type 'integer'" in wrong
    assert [result.refusal for result in episode.calls] == [None, "tool_error", "wrong_arguments", None]
    assert all(session.is_closed for session in server.sessions), "also that in which tools were listed"


def test_a_step_of_the_last_turn_counts_though_nobody_reads_its_result(start: Callable[..., Server]) -> None:
    (episode,) = one(start("tools"), [call("add", a=1, b=2)], {"reset": {"seed": 1}}, max_turns=1).episodes
    assert (rewards(episode), episode.is_cut) == ([0.5], True)


def test_calls_after_the_end_are_refused(start: Callable[..., Server]) -> None:
    message = "".join(call("add", a=a, b=2) for a in (1, 2))
    three = message + call("add", a=2, b=2)
    (episode,) = one(start("tools", ended_at(1)), [three], {"reset": {"seed": 1}}).episodes
    assert [result.text for result in episode.calls][1:] == ["Error: the episode is over"] * 2
    assert rewards(episode) == [0.5]


def ended_at(number: int) -> Callable[[], Answers]:
    """The tools of the record, where a call ends the episode."""

    def begin() -> Answers:
        count = 0

        def answer(message: dict[str, Any]) -> Any:
            nonlocal count
            if message["data"].get("type") != "call_tool":
                return next(found for asked, found in RECORDED["tools"]["session"] if asked == message)
            count += 1
            data = {"observation": {"tool_name": "add", "result": {"data": 3}}, "reward": 0.5, "done": count == number}
            return {"type": "observation", "data": data}

        return answer

    return begin


def test_a_message_without_calls_ends_an_episode_with_tools(start: Callable[..., Server]) -> None:
    (episode,) = one(start("tools"), [call("add", a=1, b=2), "That is all."], {"reset": {"seed": 1}}).episodes
    assert (rewards(episode), episode.cause, episode.is_cut) == ([0.5, 0.0], "", False)


def steps(*answers: Any) -> Callable[[], Answers]:
    """Sessions of the guessing game whose steps are answered in this order; the same ones for all sessions."""
    left = [*answers]

    def answer(message: dict[str, Any]) -> Any:
        known = RECORDED["guess"]["session"][0][1]
        return known if message["type"] == "reset" else left.pop(0)

    return lambda: answer


def error(code: str, text: str = "it broke") -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code}}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (error("EXECUTION_ERROR"), "environment", r"reports EXECUTION_ERROR for 'step': it broke"),
        (error("FACTORY_ERROR"), "environment", r"reports FACTORY_ERROR"),
        (error("SESSION_ERROR"), "infrastructure", r"reports SESSION_ERROR"),
        (
            error("UNKNOWN_TYPE"),
            "environment",
            r"no OpenEnv server that this client understands: 'step' is answered",
        ),
        ({"type": "observation", "data": {"text": 1}}, "environment", r"holds no observation; run it with openenv of"),
        (ConnectionResetError("gone"), "infrastructure", r"OpenEnv server http://\S+: gone"),
        (KeyError("x"), "environment", r"OpenEnv.act raised KeyError"),
    ],
)
def test_what_goes_wrong_on_the_server_has_a_kind(
    start: Callable[..., Server], answer: Any, kind: str, words: str
) -> None:
    server = start("guess", steps(answer))
    (episode,) = one(server, ["1"], failures={"infrastructure": "absent"}).episodes
    assert episode.cause == kind
    assert re.search(words, episode.error), episode.error


def test_a_lost_connection_does_not_begin_another_world(start: Callable[..., Server]) -> None:
    server = start("guess", steps(RECORDED["guess"]["session"][1][1], RECORDED["guess"]["session"][2][1]))
    world = environment_class(EnvironmentConfig(type="openenv", options={"url": server.url}))
    assert world is not None

    async def play() -> None:
        environment = world(url=server.url)  # type: ignore[call-arg]
        await environment.reset({}, Random(0))  # type: ignore[misc]
        server.sessions[0].is_closed = True
        await environment.act("1")  # type: ignore[misc]

    with pytest.raises(EpisodeFailed, match="the connection was lost, and with it the world") as failed:
        asyncio.run(play())
    assert failed.value.kind == "infrastructure"


def test_a_full_server_is_waited_for(start: Callable[..., Server]) -> None:
    full = error("CAPACITY_REACHED", "Server at capacity: 1/1 sessions active")
    answers = [full, full]

    def begin() -> Answers:
        found = answers.pop(0) if answers else None
        known = from_record("guess")()
        return lambda message: found or known(message)

    (episode,) = one(start("guess", begin), ["2"], FIXED).episodes
    assert (rewards(episode), episode.attempts) == ([1.0], 1)
    server = start("guess", lambda: lambda _: full)
    (episode,) = one(server, ["2"], {"wait_s": 0.5}, max_attempts=1).episodes
    assert episode.cause == "infrastructure"
    assert (
        "no free session for 0.5 s (Server at capacity: 1/1 sessions active): raise its max_concurrent_envs, or lower"
        in (episode.error)
    )


def test_an_episode_that_hangs_ends_by_the_deadline(start: Callable[..., Server]) -> None:
    begin = time.monotonic()
    (episode,) = one(start("guess", steps(30.0)), ["1"], act_timeout_s=0.5).episodes
    assert (episode.cause, time.monotonic() - begin < 10) == ("deadline", True)
    assert "OpenEnv.act has not answered within 0.5 s" in episode.error


@pytest.mark.parametrize("kind", ["timeout", "transport_error"])
def test_a_tool_that_its_server_cannot_call_fails(start: Callable[..., Server], kind: str) -> None:
    def begin() -> Answers:
        known = from_record("tools")()
        broken = {"observation": {"tool_name": "add", "error": {"error_type": kind, "message": "it broke"}}}
        data = {"type": "observation", "data": broken}
        return lambda message: data if message["data"].get("type") == "call_tool" else known(message)

    server = start("tools", begin)
    (episode,) = one(server, [call("add", a=1, b=2)], {"reset": {"seed": 1}}, max_attempts=1).episodes
    assert episode.cause == ("deadline" if kind == "timeout" else "infrastructure")
    assert f"the tool 'add' gave up: its server reports {kind}: it broke" in episode.error


def test_a_server_is_checked_before_a_run(start: Callable[..., Server], package: ModuleType) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(RecipeError) as found:
            try_environment(EnvironmentConfig(type="openenv", options=options))
        return str(found.value)

    gone = start("guess")
    gone.stop()
    gone.stop = lambda: None  # type: ignore[method-assign]
    assert "cannot be reached: [Errno 111] Connection refused; start it, or correct environment.options.url" in refused(
        url=gone.url
    )
    other = start("guess", schema=None)
    assert "is no OpenEnv server that this client understands: /schema is answered with 404; run it with openenv" in (
        refused(url=other.url)
    )
    assert "/schema describes no action" in refused(url=start("guess", schema=[]).url)
    assert "must be an address such as" in refused(url="localhost")
    url = start("guess").url
    assert "is 'txt' (did you mean 'text'?); an action has the fields text" in refused(url=url, action="txt")
    assert "has 'hin' (did you mean 'hint'?)" in refused(url=url, observation="hin")
    assert "the environment variable NO_TOKEN is not set" in refused(url=url, token_variable="NO_TOKEN")
    with pytest.raises(RecipeError, match="is 'process', but the server of OpenEnv has processes"):
        world_maker(EnvironmentConfig(type="openenv", options={"url": url}, isolation="process"))


def test_a_token_is_sent(start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "secret")
    server = start("guess")
    one(server, ["2"], {**FIXED, "token_variable": "THE_TOKEN"})
    assert server.tokens == ["Bearer secret"]


def test_rewards_of_a_reset_are_for_the_first_message(start: Callable[..., Server]) -> None:
    def begin() -> Answers:
        def answer(message: dict[str, Any]) -> Any:
            data = {"observation": {"hint": "x"}, "reward": 0.25, "done": message["type"] == "step"}
            return {"type": "observation", "data": data}

        return answer

    (episode,) = one(start("guess", begin), ["1"]).episodes
    assert rewards(episode) == [0.5]


def test_an_action_may_be_named_and_a_row_may_say_how_to_reset(start: Callable[..., Server]) -> None:
    server = start("guess")
    world = environment_class(EnvironmentConfig(type="openenv", options={"url": server.url}))
    assert world is not None
    assert issubclass(world, ServedEnvironment)

    async def play() -> Turn:
        environment = world(url=server.url, action="json", reset={"high": 9})  # type: ignore[call-arg]
        told = await environment.reset({"seed": 3, "reset": {"high": 4}}, Random(0))  # type: ignore[misc]
        assert told == "Answer with a JSON object that has the fields text: string.\n1 to 4"
        return await environment.act('{"text": "2"}')  # type: ignore[misc]

    assert asyncio.run(play()) == Turn("right", 1.0, done=True)


def test_the_record_is_of_the_version_that_is_asked_for() -> None:
    folders = [folder.name for folder in STAND_IN.glob("openenv-*.dist-info")]
    pinned = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert folders == ["openenv-0.10.0.dist-info"]
    assert 'openenv = ["openenv>=0.10,<0.11"]' in pinned
