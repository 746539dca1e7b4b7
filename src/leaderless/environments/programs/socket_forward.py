"""Inside a confinement: listens at an address, leads each connection to a socket in the file system, runs a command.

It runs by itself, with nothing but the standard library.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import suppress

_PIECE_BYTES = 65536


def main() -> None:
    """Run the command of the arguments, and end with its exit code."""
    door, host, port, *command = sys.argv[1:]
    listener = socket.create_server((host, int(port)))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # pieces of a response do not wait for each other
    threading.Thread(target=_listen, args=(listener, door), daemon=True).start()
    code = subprocess.run(command, check=False).returncode  # noqa: S603 - the user's own
    sys.exit(code if code >= 0 else 128 - code)


def _listen(listener: socket.socket, door: str) -> None:
    while True:
        inside, _ = listener.accept()
        outside = socket.socket(socket.AF_UNIX)
        outside.connect(door)
        for source, target in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


main()
