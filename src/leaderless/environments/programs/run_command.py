"""A command of its own in a process group, and the end of what it prints. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

_KEPT_BYTES = 65536
"""Bytes of output that are kept, the last ones."""
_CLOSING_S = 2.0
"""Seconds in which the output of a program that has ended is read to its end."""


class CommandEnd(NamedTuple):
    """End of a command.

    Attributes:
        code: Exit code.
        printed: End of its standard output.
        told: End of its standard error.
    """

    code: int
    printed: str
    told: str


async def run_command(command: Sequence[str], env: Mapping[str, str]) -> CommandEnd:
    """Run a command to its end. Who gives up waiting ends it, and all that it has started."""
    # Pipes of asyncio's own would keep `wait` waiting for whoever has inherited them.
    output, errors = await _Tail.open(), await _Tail.open()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.end,
            stderr=errors.end,
            start_new_session=True,
        )
        output.begin()
        errors.begin()
        try:
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
            await process.wait()
    finally:
        printed, told = await output.close(), await errors.close()
    return CommandEnd(code, printed, told)


class _Tail:
    """The end of what is written to a pipe."""

    def __init__(self, transport: asyncio.ReadTransport, reader: asyncio.StreamReader, end: int) -> None:
        self._transport, self._reader, self.end = transport, reader, end
        self._kept = bytearray()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls) -> _Tail:
        """Open a pipe, whose writing end is to be given away."""
        begin, end = os.pipe()
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        file = open(begin, "rb", buffering=0)  # noqa: SIM115, PTH123 - the transport closes it
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        return cls(transport, reader, end)

    def begin(self) -> None:
        """Read, once the writing end was given away."""
        os.close(self.end)
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> str:
        """Read the rest, which those that have been killed do not add to, and return the end of all."""
        if self._reading is None:
            os.close(self.end)
        else:
            await asyncio.wait({self._reading}, timeout=_CLOSING_S)
            self._reading.cancel()
        self._transport.close()
        return self._kept.decode(errors="replace")

    async def _read(self) -> None:
        while data := await self._reader.read(_KEPT_BYTES):
            self._kept += data
            del self._kept[:-_KEPT_BYTES]
