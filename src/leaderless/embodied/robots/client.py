"""A client of one arm's server. It comes back after a lost connection, and learns what became of its last command."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.embodied.robots.arm import CommandOutcome, Refused
from leaderless.embodied.robots.frames import (
    MAX_REPLY_BYTES,
    PREFIX,
    VERSION,
    Description,
    MessageFrame,
    decode,
    from_frame,
    lengths,
)

RETRY_S = 0.1
"""Time between two attempts to come back."""


@dataclass(frozen=True)
class Address:
    """Place where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """The address `host:port`, with an IPv6 host in brackets.

        Raises:
            ValueError: It is none.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"address '{text}' must be host:port, such as 127.0.0.1:8765")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        """As `of` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RobotClient:
    """A connection to a server, which lasts beyond lost sockets. Commands are sent one after the other.

    Args:
        address: Address of the server.
        token: Token of the server; None if it has none.
        timeout_s: Longest time for an answer, beyond that which a command needs.
        reconnect_s: Time for which a lost server is looked for.
        role: `control`, or `watch` for one who may only stop the arm.
        taken_s: Time for which an arm is waited for that another client has.

    Raises:
        Refused: The server does not let this client in.
        ConnectionError: There is no server.
    """

    def __init__(
        self,
        address: Address,
        token: str | None = None,
        *,
        timeout_s: float = 10.0,
        reconnect_s: float = 10.0,
        role: Literal["control", "watch"] = "control",
        taken_s: float = 0.5,
    ) -> None:
        self.address, self._token, self._role = address, token, role
        self._timeout_s, self._reconnect_s = timeout_s, reconnect_s
        self._session = secrets.token_hex(8)
        self._tags = count(1)
        self._pending: MessageFrame | None = None
        self._wait_s = 0.0
        self._ahead_s = 0.0
        self._socket: socket.socket | None = None
        self.stopped = ""
        self._id = 0
        until_s = time.monotonic() + taken_s
        while True:  # the client before may not yet be seen to be gone
            try:
                self.description = self._connect()
                return
            except Refused as refused:
                if refused.code != "taken" or time.monotonic() > until_s:
                    raise
            time.sleep(RETRY_S)

    def begin_reset(self, seed: int, within_s: float) -> None:
        """Ask for an episode that begins within a time; `finish` gives the outcome."""
        self._begin({"verb": "reset", "seed": seed, "deadline_s": self._time_in(within_s)}, {}, within_s)

    def begin_step(self, actions: NDArray[np.float32], within_s: float) -> None:
        """Ask for a chunk of actions that begins within a time; `finish` gives the outcome."""
        needed_s = within_s + len(actions) * self.description.arm.period_s
        self._begin({"verb": "step", "deadline_s": self._time_in(within_s)}, {"actions": actions}, needed_s)

    def finish(self) -> CommandOutcome:
        """The outcome of the command that was begun.

        Raises:
            Refused: The server has refused it.
            ConnectionError: The server is gone, and has not come back.
        """
        assert self._pending is not None
        frame, self._pending = self._pending, None
        return from_frame(self._exchange(frame, self._wait_s), self.description)

    def reset(self, seed: int, within_s: float = 30.0) -> CommandOutcome:
        """Begin an episode."""
        self.begin_reset(seed, within_s)
        return self.finish()

    def step(self, actions: NDArray[np.float32], within_s: float = 1.0) -> CommandOutcome:
        """Execute a chunk of actions."""
        self.begin_step(actions, within_s)
        return self.finish()

    def hold(self, reason: str = "") -> None:
        """Let the arm brake and hold until the next command."""
        self._exchange(MessageFrame({"verb": "hold", "reason": reason, "tag": next(self._tags)}), 0.0, is_sent=False)

    def stop(self, reason: str = "") -> None:
        """Stop the arm at once; only a person at its server can release it."""
        self._exchange(MessageFrame({"verb": "stop", "reason": reason, "tag": next(self._tags)}), 0.0, is_sent=False)

    def close(self) -> None:
        """End the connection; the arm holds."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = None

    def _begin(self, header: Mapping[str, Json], arrays: Mapping[str, NDArray[np.generic]], wait_s: float) -> None:
        assert self._pending is None
        self._id += 1
        self._pending = MessageFrame({**header, "id": self._id, "tag": next(self._tags)}, arrays)
        self._wait_s = wait_s
        with suppress(OSError):  # `finish` comes back and sends it again
            self._send(self._pending)

    def _exchange(self, frame: MessageFrame, wait_s: float, *, is_sent: bool = True) -> MessageFrame:
        """Wait for the answer to a frame, and send it again over a new connection if the old one is lost."""
        until_s: float | None = None  # from the first loss, as a command may take longer than a server is looked for
        while True:
            try:
                if not is_sent:
                    self._send(frame)
                return self._receive(frame.header["tag"], wait_s + self._timeout_s)
            except (OSError, EOFError) as error:
                self.close()
                lost = error
                until_s = until_s or time.monotonic() + self._reconnect_s
            while self._socket is None:
                if time.monotonic() > until_s:
                    remedy = "look at its server, and check the network"
                    raise ConnectionError(f"the arm at {self.address} is lost ({lost}): {remedy}") from lost
                try:
                    self._connect()
                except OSError as error:
                    lost = error
                    time.sleep(RETRY_S)
            is_sent = False

    def _connect(self) -> Description:
        """Introduce this client."""
        try:
            self._socket = socket.create_connection((self.address.host, self.address.port), self._timeout_s)
        except OSError as error:
            raise ConnectionError(f"no arm answers at {self.address} ({error}): start its server") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tag, about = next(self._tags), {"token": self._token, "role": self._role, "session": self._session}
        try:
            self._send(MessageFrame({"verb": "hello", "version": VERSION, "tag": tag, **about}))
            answer = self._receive(tag, self._timeout_s)
        except BaseException:
            self.close()
            raise
        self.stopped = str(answer.header["stopped"])
        return Description.from_json(cast("Mapping[str, Json]", answer.header["description"]))

    def _send(self, frame: MessageFrame) -> None:
        if self._socket is None:
            raise ConnectionError("there is no connection")
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(frame.encode())

    def _receive(self, tag: Json, timeout_s: float) -> MessageFrame:
        """The answer with a tag; older ones are passed over."""
        until_s = time.monotonic() + timeout_s
        while True:
            num_header, num_body = lengths(self._exactly(PREFIX.size, until_s), MAX_REPLY_BYTES)
            header = self._exactly(num_header, until_s)
            frame = decode(header, self._exactly(num_body, until_s))
            if frame.header.get("tag") not in {tag, None}:
                continue
            now = frame.header.get("now_s")
            if isinstance(now, int | float):
                self._ahead_s = now - time.monotonic()
            if not frame.header.get("ok"):
                raise Refused(str(frame.header.get("code")), f"arm at {self.address}: {frame.header.get('message')}")
            return frame

    def _exactly(self, num: int, until_s: float) -> bytes:
        if self._socket is None:
            raise ConnectionError("there is no connection")
        found = bytearray()
        while len(found) < num:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            piece = self._socket.recv(min(num - len(found), 1 << 20))
            if not piece:
                raise ConnectionError("the server has closed the connection")
            found += piece
        return bytes(found)

    def _time_in(self, seconds: float) -> float:
        """A time on the server's clock. Answers take a while to arrive, so that it is rather too early."""
        return time.monotonic() + self._ahead_s + seconds
