"""Runs a command in bubblewrap, from where it reaches one address and nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from leaderless.rewards.sandbox.bubblewrap import find_bubblewrap

_FORWARD = Path(__file__).with_name("socket_forward.py")
_PIECE_BYTES = 65536
_DOOR = "/run/leaderless-door"


class Confinement:
    """Surroundings of one command, in a context.

    It has a network of its own, in which one address leads, through a socket in the file system, to the same address
    outside.
    """

    def __init__(self, folder: str, base_url: str) -> None:
        """Confine nothing yet.

        Args:
            folder: Empty folder of this command.
            base_url: Address that it may reach.
        """
        address = urlsplit(base_url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._socket = str(Path(folder, "door"))
        self.home = str(Path(folder, "home"))
        """Folder that the command may write to."""
        Path(self.home).mkdir()
        self._carrying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._carry, self._socket)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def command(self, command: Sequence[str]) -> Sequence[str]:
        """The command line that runs a command inside."""
        program = find_bubblewrap()
        assert program is not None, "it was asked whether it works"
        here = str(Path.cwd())
        return [
            *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"),  # noqa: S108
            *("--ro-bind-try", here, here, "--chdir", here),
            *("--bind", self._socket, _DOOR, "--bind", self.home, self.home),
            *(sys.executable, "-I", "-S", str(_FORWARD), _DOOR, self._host, str(self._port), *command),
        ]

    async def _carry(self, inside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Carry a connection from inside to the address."""
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        try:
            answers, questions = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(_copy(inside, questions), _copy(answers, back))
            finally:
                questions.close()
        finally:
            self._carrying.discard(task)
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(_PIECE_BYTES):
            target.write(data)
            await target.drain()
    with suppress(OSError):
        target.write_eof() if target.can_write_eof() else target.close()
