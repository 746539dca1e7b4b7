"""Sessions with a server of OpenEnv, through the client of its package. Imports no torch.

Each episode has a session of its own. All sessions of a rank live in one thread, so that they answer the pings of a
server while an engine is busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.failures import FailureKind
from leaderless.environments.adapters import needed
from leaderless.environments.loop_thread import LoopThread
from leaderless.environments.protocol import EpisodeFailed

if TYPE_CHECKING:
    from openenv.core import GenericEnvClient
    from openenv.core.client_types import StepResult
else:
    GenericEnvClient = needed("openenv.core", "openenv").GenericEnvClient
_sockets = needed("websockets.exceptions", "openenv")
ConnectionClosed: type[Exception] = _sockets.ConnectionClosed
InvalidHandshake: type[Exception] = _sockets.InvalidHandshake
_URL = "environment.options.url"
_ASK_S = 30.0
"""Seconds that a server may take to describe itself."""
_POLL_S = 0.2
"""Seconds between attempts to begin a session where a server has none left."""
_CLOSING_S = 5.0
"""Seconds that an episode waits for the end of its session; it ends later by itself."""
_MESSAGE_S = 1e6
"""Seconds that the client waits for an answer: the time limits of the recipe are shorter."""
_CODE = re.compile(r"^Server error: (?P<text>.*) \(code: (?P<code>\w+)\)$", re.DOTALL)
_OTHER_PROTOCOL = frozenset({"VALIDATION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON", "UNKNOWN"})


@dataclass(frozen=True)
class OpenEnvServer:
    """A server.

    Attributes:
        url: Its address.
        headers: Headers of all requests.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, token_variable: str | None) -> OpenEnvServer:
        """The server of an address, with a token from an environment variable.

        Raises:
            RecipeError: It is no address, or the variable is not set.
        """
        if not isinstance(url, str) or re.match(r"https?://.", url) is None:
            raise RecipeError.at(_URL, f"is {url!r}: must be an address such as http://127.0.0.1:8000")
        if token_variable is None:
            return cls(url.rstrip("/"))
        if not (token := os.environ.get(token_variable)):
            key = "environment.options.token_variable"
            raise RecipeError.at(key, f"the environment variable {token_variable} is not set")
        return cls(url.rstrip("/"), {"Authorization": f"Bearer {token}"})

    def schemas(self) -> Mapping[str, Mapping[str, Json]]:
        """JSON schemas of its actions, observations and states, by `action`, `observation` and `state`.

        Raises:
            RecipeError: It is no server of OpenEnv with sessions.
            EpisodeFailed: It is not there.
        """
        return _schemas(self.url, tuple(self.headers.items()))

    def unreachable(self, reason: object) -> EpisodeFailed:
        """The failure of an episode whose server is not there."""
        return EpisodeFailed(
            f"the OpenEnv server {self.url} cannot be reached: {reason}; start it, or correct {_URL}", "infrastructure"
        )

    def other_protocol(self, reason: object) -> str:
        """Description of what a server does that is no part of the protocol, with the remedy."""
        return (
            f"{self.url} is no OpenEnv server that this client understands: {reason}; run it with openenv of the same "
            f"version as here ({package_version()}), or give the address of such a server"
        )


def package_version() -> str:
    """Version of the package that is installed here."""
    return version("openenv")


@lru_cache
def _schemas(url: str, headers: tuple[tuple[str, str], ...]) -> Mapping[str, Mapping[str, Json]]:
    server = OpenEnvServer(url, dict(headers))
    try:
        with urlopen(Request(f"{url}/schema", headers=server.headers), timeout=_ASK_S) as answer:  # noqa: S310 - http(s)
            found = json.load(answer)
    except HTTPError as error:
        raise RecipeError.at(_URL, server.other_protocol(f"/schema is answered with {error.code}")) from error
    except (URLError, OSError) as error:
        raise server.unreachable(getattr(error, "reason", error)) from error
    except ValueError as error:
        raise RecipeError.at(_URL, server.other_protocol(f"/schema is no JSON ({error})")) from error
    if not isinstance(found, dict) or not isinstance(found.get("action"), dict):
        raise RecipeError.at(_URL, server.other_protocol("/schema describes no action"))
    return found


class _ProtocolError(Exception):
    """An answer that is no part of the protocol."""


class _NoPlaceError(Exception):
    """A server that has no free session."""


class EpisodeClient(GenericEnvClient):  # type: ignore[misc]
    """The package's client for one session: if its connection is lost, it does not begin another world in secret."""

    _has_begun = False

    async def _connect_async(self) -> EpisodeClient:
        before = self._ws
        await super()._connect_async()
        if self._has_begun and self._ws is not before:
            raise ConnectionResetError("the connection was lost, and with it the world of the episode")
        self._has_begun = True
        return self

    def _parse_result(self, payload: Mapping[str, Json]) -> object:
        if not isinstance(payload, dict) or not isinstance(payload.get("observation"), dict):
            raise _ProtocolError(f"its answer {json.dumps(payload)[:80]} holds no observation")
        return super()._parse_result(payload)


@dataclass(frozen=True)
class Answered:
    """Answer of a server to a reset or a step.

    Attributes:
        observation: Observation, as values by the names of fields.
        reward: The reward; 0 if there is none.
        done: Whether the episode is over.
    """

    observation: Mapping[str, Json]
    reward: float
    done: bool


class OpenEnvSession:
    """A session of one episode, for any loop. Its failures have kinds."""

    def __init__(self, server: OpenEnvServer, wait_s: float) -> None:
        """Begin nothing yet; a server without a free session is waited for so many seconds."""
        self._server, self._wait_s = server, wait_s
        self._client: EpisodeClient | None = None

    async def begin(self, arguments: Mapping[str, Json]) -> Answered:
        """Begin the session with a reset, as soon as the server has a place for it.

        Raises:
            EpisodeFailed: The server cannot be reached, has no place, or reports an error.
        """
        return await _thread(os.getpid()).run(self._begun("reset", **arguments))

    async def list_tools(self) -> Sequence[Mapping[str, Json]]:
        """Begin the session with a question for the tools, which needs no reset. Errors as of `begin`."""
        found = await _thread(os.getpid()).run(self._begun("step", {"type": "list_tools"}))
        return cast("Sequence[Mapping[str, Json]]", found.observation.get("tools", ()))

    async def step(self, action: Mapping[str, Json]) -> Answered:
        """Act. Errors as of `begin`."""
        return _answered(await _thread(os.getpid()).run(self._asked("step", dict(action))))

    async def state(self) -> Mapping[str, Json]:
        """The state of the world. Errors as of `begin`."""
        return cast("Mapping[str, Json]", await _thread(os.getpid()).run(self._asked("state")))

    async def close(self) -> None:
        """End the session; a server that does not answer is waited for a few seconds, and left behind then."""
        if (client := self._client) is not None:
            self._client = None
            ending = asyncio.wrap_future(_thread(os.getpid()).start(_closed(client)))
            await asyncio.wait({ending}, timeout=_CLOSING_S)

    async def _begun(self, what: str, *values: Json, **arguments: Json) -> Answered:
        """The first answer, in the thread."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._wait_s
        while True:
            self._client = EpisodeClient(
                self._server.url,
                connect_timeout_s=self._wait_s,
                message_timeout_s=_MESSAGE_S,
                headers=dict(self._server.headers) or None,
            )
            try:
                return _answered(await self._asked(what, *values, **arguments))
            except _NoPlaceError as error:
                await _closed(self._client)
                if clock() + _POLL_S > end_s:
                    raise EpisodeFailed(
                        f"the OpenEnv server {self._server.url} has had no free session for {self._wait_s:g} s "
                        f"({error}): raise its max_concurrent_envs, or lower environment.concurrency",
                        "infrastructure",
                    ) from error
                await asyncio.sleep(_POLL_S)

    async def _asked(self, what: str, *values: Json, **arguments: Json) -> object:
        """What a method of the client returns, in the thread; its errors as failures of the episode."""
        client, url = self._client, self._server.url
        if client is None:
            raise EpisodeFailed(f"the session with the OpenEnv server {url} is over")
        try:
            return await getattr(client, what)(*values, **arguments)
        except _ProtocolError as error:
            raise EpisodeFailed(self._server.other_protocol(error)) from error
        except ConnectionResetError as error:
            raise EpisodeFailed(f"the OpenEnv server {url}: {error}", "infrastructure") from error
        except ConnectionError as error:
            cause = error.__cause__
            if isinstance(cause, InvalidHandshake) and _status(cause) < HTTPStatus.INTERNAL_SERVER_ERROR:
                raise EpisodeFailed(self._server.other_protocol(f"/ws is answered with an error: {cause}")) from error
            raise self._server.unreachable(error) from error
        except ConnectionClosed as error:
            lost = f"the OpenEnv server {url} has ended the session ({error}): see its log, and start it again"
            raise EpisodeFailed(lost, "infrastructure") from error
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> Exception:
        """The failure of an episode whose server reports an error."""
        found = _CODE.match(str(error))
        if found is None:
            return error
        text, code = found["text"], found["code"]
        if code == "CAPACITY_REACHED":
            return _NoPlaceError(text)
        if code in _OTHER_PROTOCOL:
            return EpisodeFailed(self._server.other_protocol(f"'{what}' is answered with {code}: {text}"))
        kind: FailureKind = "infrastructure" if code == "SESSION_ERROR" else "environment"
        return EpisodeFailed(f"the OpenEnv server {self._server.url} reports {code} for '{what}': {text}", kind)


def _status(error: Exception) -> int:
    """The status with which a connection was refused; 0 if there is none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


async def _closed(client: EpisodeClient) -> None:
    with suppress(Exception):
        await client.close()


def _answered(found: object) -> Answered:
    """An answer of the client, where no reward is 0."""
    result = cast("StepResult[dict[str, Json]]", found)
    return Answered(result.observation, float(result.reward or 0.0), bool(result.done))


@lru_cache
def _thread(_process: int) -> LoopThread:
    """The thread of all sessions of a process; a forked one has its own."""
    return LoopThread("openenv")
