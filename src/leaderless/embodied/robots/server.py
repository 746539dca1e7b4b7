"""A server next to an arm: it checks who asks, and lets a `Controller` do what is asked for."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from math import inf
from typing import cast

import numpy as np

from leaderless.base.values import Json
from leaderless.embodied.robots.arm import CommandOutcome, Refused, Station
from leaderless.embodied.robots.controller import Controller
from leaderless.embodied.robots.frames import (
    MAX_REQUEST_BYTES,
    PREFIX,
    VERSION,
    Description,
    FrameError,
    MessageFrame,
    decode,
    lengths,
    to_frame,
)

HELLO_S = 5.0
"""Time that a client has to introduce itself."""
GUARD_S = 0.05
"""Time between two looks at whether the driver answers."""


class CommandLedger:
    """The last command of a session and what became of it, so that a repeated one is not executed again."""

    def __init__(self) -> None:
        self.last_id = 0
        self._digest = b""
        self._future: Future[CommandOutcome] = Future()
        self._future.set_exception(Refused("order", "there was no command"))

    def answer(
        self, number: object, digest: bytes, begin: Callable[[], Future[CommandOutcome]]
    ) -> Future[CommandOutcome]:
        """Outcome of a command: the outcome of before if it is a repeated one, else what `begin` begins.

        Raises:
            Refused: The id is out of order, or the command before is still being executed.
        """
        if number == self.last_id and digest == self._digest:
            return self._future
        if number != self.last_id + 1 or not isinstance(number, int):
            rule = f"repeat {self.last_id} as it was, or send {self.last_id + 1}"
            raise Refused("order", f"id={number!r} is out of order, or belonged to another command: {rule}")
        if not self._future.done():
            raise Refused("busy", f"command {self.last_id} is still being executed: wait for its answer")
        try:
            future = begin()
        except Refused as refused:
            future = Future()
            future.set_exception(refused)
        self.last_id, self._digest, self._future = number, digest, future
        return future


class RobotServer:
    """Serves one arm to one client at a time. Others with the token may watch over it, and stop it.

    Args:
        station: The arm with what stands next to it.
        token: Token that clients have to know; None if they need none.
    """

    def __init__(self, station: Station, token: str | None) -> None:
        self.controller = Controller(station)
        self._station, self._token = station, token
        self._session, self._ledger = "", CommandLedger()
        self.owner: _Client | None = None
        self._clients: dict[_Client, asyncio.Task[None]] = {}

    async def answer(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Answer clients until it is canceled; then the arm is stopped. It says when clients may come."""
        controller = self.controller
        thread = threading.Thread(target=controller.run, name="arm", daemon=True)
        thread.start()
        try:
            if self._station.arm.spec.is_simulated:
                await asyncio.wrap_future(controller.release())
            server = await asyncio.start_server(self._meet, sock=listener)
            try:
                ready()
                while True:
                    controller.stop_if_lost()
                    await asyncio.sleep(GUARD_S)
            finally:
                server.close()
        finally:
            controller.close()
            for client in self._clients:
                client.close()
            await asyncio.gather(*self._clients.values(), return_exceptions=True)
            await asyncio.to_thread(thread.join, 5.0)
            self._station.arm.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _notice_lost_peers(writer.get_extra_info("socket"))
        client, task = _Client(self, reader, writer), asyncio.current_task()
        assert task is not None
        self._clients[client] = task
        try:
            await client.serve()
        except (OSError, EOFError):
            pass  # the client is gone
        finally:
            if self.owner is client:
                self.owner = None
                self.controller.hold("its client has disconnected")
            client.close()
            del self._clients[client]

    def accept(self, client: _Client, header: dict[str, Json]) -> None:
        """Let a client in, if it has the token, and nobody else has the arm.

        Raises:
            Refused: It has not, or the arm is taken.
        """
        if header.get("verb") != "hello":
            raise Refused("token", "the first message must be 'hello'")
        given = str(header.get("token") or "")
        if self._token is not None and not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            raise Refused("token", "the token is missing or wrong: use the one that the server was started with")
        if header.get("version") != VERSION:
            versions = f"the client speaks version {header.get('version')}, the server version {VERSION}"
            raise Refused("version", f"{versions}: install the same version of leaderless on both")
        session = str(header.get("session") or "")
        if header.get("role") == "watch":
            return
        if not session:
            raise Refused("frame", "session='' must be a text that only this client knows")
        if self.owner is not None and session != self._session:
            raise Refused("taken", "another client has the arm: let it end first, or stop the arm")
        if self.owner is not None:
            self.owner.close()  # the same client has come back before its old connection was seen to be gone
        if session != self._session:
            self._session, self._ledger = session, CommandLedger()
        self.owner = client

    def describe(self) -> dict[str, Json]:
        """First message to a client when it is let in."""
        one = self._station
        about = Description(one.arm.spec, one.max_steps, one.max_chunk, one.instruction)
        return {
            "version": VERSION,
            "description": cast("dict[str, Json]", asdict(about)),
            "last_id": self._ledger.last_id,
            "stopped": self.controller.stopped_because,
            "now_s": self.controller.now_s,
        }

    def command(self, client: _Client, frame: MessageFrame) -> Future[CommandOutcome]:
        """Begin what a client commands, or find what became of it.

        Raises:
            Refused: It cannot be done.
        """
        if client is not self.owner:
            raise Refused("taken", "this client may only watch and stop: introduce it with the role 'control'")
        header = frame.header
        actions = frame.arrays.get("actions")
        content = repr([header.get(key) for key in ("verb", "seed")]).encode()
        if actions is not None:
            content += repr((str(actions.dtype), actions.shape)).encode() + actions.tobytes()
        given = header.get("deadline_s")
        deadline_s = float(given) if isinstance(given, int | float) else inf

        def begin() -> Future[CommandOutcome]:
            if header["verb"] == "reset":
                seed = header.get("seed")
                if type(seed) is not int or seed < 0:
                    raise Refused("frame", f"seed={seed!r} must be a whole number of at least 0")
                return self.controller.reset(seed, deadline_s)
            if actions is None or actions.dtype.kind != "f":
                raise Refused("shape", "a step needs 'actions' of type float32 or float64")
            return self.controller.step(actions.astype(np.float64), deadline_s)

        return self._ledger.answer(header.get("id"), hashlib.sha256(content).digest(), begin)


class _Client:
    """A connection."""

    def __init__(self, server: RobotServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server, self._reader, self._writer = server, reader, writer

    async def serve(self) -> None:
        """Answer until the client is gone, or has sent what cannot be read."""
        tag: Json = None
        try:
            hello = await asyncio.wait_for(self._receive(), HELLO_S)
            tag = hello.header.get("tag")
            self._server.accept(self, dict(hello.header))
            self._send({"tag": tag, "ok": True, **self._server.describe()})
            await self._writer.drain()
            while True:
                frame = await self._receive()
                tag = frame.header.get("tag")
                try:
                    self._answer(frame)
                except Refused as refused:
                    self._refuse(tag, refused)
                await self._writer.drain()  # who does not read answers is not listened to either
        except TimeoutError:
            pass
        except (FrameError, Refused) as error:
            self._refuse(tag, error if isinstance(error, Refused) else Refused("frame", str(error)))
            await self._writer.drain()

    def _answer(self, frame: MessageFrame) -> None:
        tag, reason = frame.header.get("tag"), str(frame.header.get("reason") or "")[:200]
        controller = self._server.controller
        match frame.header.get("verb"):
            case "step" | "reset":
                loop = asyncio.get_running_loop()
                future = self._server.command(self, frame)
                future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._reply, tag, done))
                return
            case "hold":
                if self is not self._server.owner:
                    raise Refused("taken", "this client may only watch and stop")
                controller.hold(reason or "its client has asked for it")
            case "stop":
                controller.stop(reason or "a client has asked for it")
            case verb:
                raise Refused("verb", f"unknown verb {verb!r}: there are 'reset', 'step', 'hold' and 'stop'")
        self._send({"tag": tag, "ok": True, "now_s": controller.now_s})

    def _reply(self, tag: Json, done: Future[CommandOutcome]) -> None:
        """Send what has become of a command."""
        if self._writer.is_closing():
            return
        if isinstance(error := done.exception(), Refused):
            self._refuse(tag, error)
        else:
            frame = to_frame(done.result(), {"tag": tag, "ok": True, "now_s": self._server.controller.now_s})
            self._writer.write(frame.encode())

    async def _receive(self) -> MessageFrame:
        prefix = await self._reader.readexactly(PREFIX.size)
        num_header, num_body = lengths(prefix, MAX_REQUEST_BYTES)
        return decode(await self._reader.readexactly(num_header), await self._reader.readexactly(num_body))

    def _refuse(self, tag: Json, refused: Refused) -> None:
        about: dict[str, Json] = {"code": refused.code, "message": str(refused), "now_s": self._server.controller.now_s}
        self._send({"tag": tag, "ok": False, **about})

    def _send(self, header: Mapping[str, Json]) -> None:
        self._writer.write(MessageFrame(header).encode())

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self._writer.close()


def _notice_lost_peers(connection: socket.socket) -> None:
    """Let the kernel ask a silent peer after a second whether it is there, and send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
