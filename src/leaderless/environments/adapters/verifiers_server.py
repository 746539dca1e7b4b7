"""Environment servers of verifiers, through the client of its package. Imports no torch.

All episodes of a process share one connection to a server. It lives in a thread, so that a server's answers are read
while an engine is busy.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters import needed
from leaderless.environments.loop_thread import LoopThread
from leaderless.environments.programs.chat import Chat
from leaderless.environments.protocol import EpisodeFailed

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve import EnvClient

_v1 = needed("verifiers.v1", "verifiers")
_zmq = needed("zmq", "verifiers")
_URL = "environment.options.url"
_ASK_S = 10.0
"""Seconds that a server may take to say that it is there, before a run."""
_NO_KEY = "LEADERLESS_SENDS_NO_KEY"
"""Environment variable of a server whose value would be sent to the policy's address as a key: none is needed."""


class VerifiersServer:
    """An environment server.

    Attributes:
        url: Its address.
    """

    def __init__(self, url: str, wait_s: float) -> None:
        """Connect to nothing yet; an episode waits so many seconds for a server that does not answer.

        Raises:
            RecipeError: It is no address of this machine.
        """
        self.url, self._wait_s = url, wait_s
        if not _is_of_this_machine(url):
            raise RecipeError.at(
                _URL,
                f"is {url!r}: must be an address of this machine, such as tcp://127.0.0.1:5000 or ipc:///tmp/tasks, as "
                "the policy's own address is reached from here only; start a server on each machine",
            )

    async def check(self) -> None:
        """Ask whether it is there, before a run.

        Raises:
            RecipeError: It does not understand this client.
            EpisodeFailed: It is not there.
        """
        address = urlsplit(self.url)
        if address.scheme == "tcp":
            try:
                socket.create_connection((str(address.hostname), int(address.port or 0)), _ASK_S).close()
            except OSError as error:
                raise self._unreachable(error) from error
        if not await _thread(os.getpid()).run(self._answers(_ASK_S)):
            problem = self._other_protocol(f"it does not say within {_ASK_S:g} s that it is there")
            raise RecipeError.at(_URL, problem)

    async def play(self, task: Mapping[str, Json], chat: Chat) -> WireEpisode:
        """Let it play an episode; who gives up waiting ends it there, too.

        Args:
            task: Data of the task, as its taskset makes them.
            chat: The policy in this episode.

        Raises:
            EpisodeFailed: It cannot be reached, ends, refuses the task, or does not understand this client.
        """
        admission, distribution = chat.admission, chat.rules.params.distribution
        policy = _v1.EvalClientConfig(base_url=admission.shared_url, api_key_var=_NO_KEY)
        # A program may ask for another distribution: the server sends these instead.
        sampling = _v1.SamplingConfig(temperature=distribution.temperature, top_p=distribution.top_p)
        request = {"client": policy, "model": admission.model, "sampling": sampling, "task_data": dict(task)}
        return await _thread(os.getpid()).run(self._played(request))

    async def _answers(self, timeout_s: float) -> bool:
        """Whether it says that it is there, in the thread."""
        return bool(await _connection(self.url).client.health(timeout_s))

    async def _played(self, request: Mapping[str, object]) -> WireEpisode:
        """An episode, in the thread."""
        if not await self._answers(self._wait_s):
            raise self._unreachable(f"it has not answered for {self._wait_s:g} s")
        connection = _connection(self.url)
        lost = connection.lost
        asking = asyncio.ensure_future(connection.client.run(**request))
        try:
            await asyncio.wait({asking, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EpisodeFailed(
                    f"the verifiers server {self.url} has ended: see its log, and start it again", "infrastructure"
                )
            return self._checked(asking.result())
        except RuntimeError as error:
            raise self._refusal(str(error)) from error
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise EpisodeFailed(self._other_protocol(f"its answer cannot be read ({error})")) from error
        finally:
            asking.cancel()
            with suppress(Exception, asyncio.CancelledError):
                await asking

    def _checked(self, episode: WireEpisode) -> WireEpisode:
        for trace in episode.traces:
            if _release(trace.verifiers.version) != _release(version("verifiers")):
                raise EpisodeFailed(self._other_protocol(f"it runs verifiers {trace.verifiers.version}"))
        return episode

    def _refusal(self, reason: str) -> EpisodeFailed:
        """The failure of an episode that the server answers with an error."""
        if reason.startswith("Cancelled"):  # it is being stopped
            return EpisodeFailed(f"the verifiers server {self.url} has given up the episode", "infrastructure")
        if reason.startswith("ValidationError"):
            if "RunRequest" in reason:
                return EpisodeFailed(self._other_protocol(f"it refuses the request ({reason})"))
            return EpisodeFailed(
                f"the verifiers server {self.url} refuses the task ({reason}): make rows of the taskset that it serves"
            )
        return EpisodeFailed(f"the verifiers server {self.url} reports {reason}")

    def _unreachable(self, reason: object) -> EpisodeFailed:
        return EpisodeFailed(
            f"the verifiers server {self.url} cannot be reached: {reason}; start it, or correct {_URL}",
            "infrastructure",
        )

    def _other_protocol(self, reason: str) -> str:
        return (
            f"{self.url} is no verifiers server that this client understands: {reason}; run it with verifiers of the "
            f"same version as here ({version('verifiers')}), or give the address of such a server"
        )


def _is_of_this_machine(url: object) -> bool:
    if not isinstance(url, str):
        return False
    try:
        address = urlsplit(url)
        host, port = address.hostname or "", address.port
        is_loopback = host == "localhost" or (bool(host) and ip_address(host).is_loopback)
    except ValueError:
        return False
    return (address.scheme == "tcp" and is_loopback and bool(port)) or re.match(r"ipc://.", url) is not None


def _release(version_text: str) -> str:
    """The part of a version that says which protocol is spoken."""
    return ".".join(version_text.split(".")[:2])


class _Connection:
    """A client in the thread.

    Attributes:
        client: Client of the package, which connects again by itself.
        lost: Future that is set when the connection breaks, and with it the episodes that the server plays.
    """

    def __init__(self, url: str) -> None:
        self.client: EnvClient = needed("verifiers.v1.serve", "verifiers").EnvClient(url)
        self._monitor = self.client.socket.get_monitor_socket(_zmq.EVENT_DISCONNECTED)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._monitor.recv_multipart()
            lost, self.lost = self.lost, asyncio.get_running_loop().create_future()
            lost.set_result(None)


@lru_cache
def _thread(_process: int) -> LoopThread:
    """The thread of all connections of a process; a forked one has its own."""
    return LoopThread("verifiers")


_CONNECTIONS: dict[tuple[int, str], _Connection] = {}


def _connection(url: str) -> _Connection:
    """The connection of this process to a server, in the thread."""
    key = (os.getpid(), url)
    if key not in _CONNECTIONS:
        _CONNECTIONS[key] = _Connection(url)
    return _CONNECTIONS[key]
