"""Lines of text over a socket in the file system, which works across network namespaces."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        """Take over a connection.

        Args:
            connection: Open connection.
            timeout_s: Longest wait for a line; None waits as long as the other end lives.
        """
        connection.settimeout(timeout_s)
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    @classmethod
    def connect(cls, path: Path, name: str) -> Self:
        """Connect to a `Switchboard` under a name."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        channel = cls(connection, None)
        channel.send(name)
        return channel

    def send(self, line: str) -> None:
        """Send a line."""
        self._connection.sendall(f"{line}\n".encode())

    def receive(self) -> str:
        """The next line.

        Raises:
            EOFError: The other end has closed.
            TimeoutError: Nothing came in time.
        """
        line = self._lines.readline()
        if not line:
            raise EOFError("the other end has closed")
        return line.rstrip("\n")

    def __iter__(self) -> Iterator[str]:
        """Lines until the other end closes the connection."""
        for line in self._lines:
            yield line.rstrip("\n")

    def close(self) -> None:
        """Tell the other end that no more lines follow."""
        self._lines.close()
        self._connection.close()


class Switchboard:
    """The place where processes connect, each under its name."""

    def __init__(self, path: Path) -> None:
        """Listen.

        Args:
            path: Path of the socket, below 100 characters.
        """
        self.path = path
        self.channels: dict[str, Channel] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self.channels.values():
            channel.close()
        self._listener.close()

    def wait_for(self, names: set[str], is_alive: Callable[[], None], timeout_s: float, line_timeout_s: float) -> None:
        """Wait until these processes have connected.

        Args:
            names: Names of the processes.
            is_alive: Function that raises if one of them cannot connect any more, called every second.
            timeout_s: Longest wait.
            line_timeout_s: Longest wait for a line of theirs later.

        Raises:
            TimeoutError: One did not.
        """
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(1)
        while missing := names - self.channels.keys():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(sorted(missing))} did not start within {timeout_s:.0f} s")
            is_alive()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            channel = Channel(connection, line_timeout_s)
            self.channels[channel.receive()] = channel
