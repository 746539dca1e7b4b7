"""HTTP between a rank and a server that it has started, and memory that both see."""

from __future__ import annotations

import hmac
import json
import traceback
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

MOST_MAPPED = 2
"""Memories of another process that are mapped at a time: the stagings that take turns."""


class SharedMemory:
    """Memories of another process of this machine, each of which holds one bucket of weights at a time."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}  # by place, those that were opened last at the end

    def open(self, place: Mapping[str, Any]) -> Tensor:
        """Map the memory at a staging's `place`, unless it is mapped already, and return its bytes."""
        key = json.dumps(place, sort_keys=True)
        data = self._mapped.pop(key, None)
        if data is None:
            while len(self._mapped) >= MOST_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            data = _map(place)
        self._mapped[key] = data
        return data

    def close(self) -> None:
        """Unmap the memories."""
        self._mapped.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _map(place: Mapping[str, Any]) -> Tensor:
    if "file" in place:
        return torch.from_file(place["file"], shared=True, size=place["bytes"], dtype=torch.uint8)
    handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in place["handle"]]
    # This process may see the device under another index.
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


NUMBER = "Call-Number"
"""Header with the number of a call that may be sent again over another connection."""


class _Answer(NamedTuple):
    """The last answer, with the number of its call; None if the call had none."""

    number: str | None
    status: int
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """One HTTP call, with the token that the rank and this server share; arguments and results are JSON.

    The answer to a call with a number is kept until the next call. If its connection is lost, the rank sends the call
    again with the same number, and gets the same answer: nothing is done twice.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two packets, and the second must not wait
    memory = SharedMemory()
    last: ClassVar[_Answer] = _Answer(None, 0, b"")
    token: str

    def do_GET(self) -> None:
        """Answer a health check."""
        self.do_POST()

    def do_POST(self) -> None:
        """Answer a call."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the connection is lost, and the call will be sent again
            self.close_connection = True
            return
        if not hmac.compare_digest(self.headers.get("Authorization") or "", f"Bearer {self.token}"):
            self._send(401, b'{"error": "wrong token"}')
            return
        number = self.headers.get(NUMBER)
        if number is None or number != self.last.number:
            type(self).last = _Answer(number, *self._result(body))
        self._send(self.last.status, self.last.body)

    def _result(self, body: bytes) -> tuple[int, bytes]:
        try:
            return 200, json.dumps(self.answer(self.path.removeprefix("/"), json.loads(body or b"{}"))).encode()
        except Exception as error:  # noqa: BLE001  (it is sent to the rank)
            traceback.print_exc()
            return 500, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()

    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        """Answer a call by its name, with something that JSON can hold; what is raised is sent to the rank."""
        raise NotImplementedError

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Calls are not logged: there is one for each step."""


def bind(port: int, handler: type[Handler], token: str) -> HTTPServer:
    """Take a port of the loopback interface; calls are accepted once the server is activated."""
    server = HTTPServer(("127.0.0.1", port), handler, bind_and_activate=False)
    server.server_bind()
    handler.token = token
    return server
