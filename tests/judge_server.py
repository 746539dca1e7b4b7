"""A server with OpenAI's API whose answers a test decides: good ones, late ones, broken ones."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Said:
    """What the server sends.

    Attributes:
        text: Words of the model.
        status: Status of the answer.
        headers: Further headers.
        body: Bytes to send in place of an answer with the text.
        delay_s: Seconds before anything is sent.
        drips_s: Seconds between single bytes.
        is_cut: Whether the connection ends in the middle.
        finish_reason: Reason why the model stopped.
    """

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0
    drips_s: float = 0.0
    is_cut: bool = False
    finish_reason: str = "stop"


@dataclass
class Heard:
    """A request: its fields, its key, and when it came."""

    fields: Mapping[str, object]
    key: str
    time: float

    @property
    def question(self) -> str:
        """The last message."""
        return str(self.fields["messages"][-1]["content"])  # type: ignore[index]

    @property
    def num_messages(self) -> int:
        """Number of messages."""
        return len(self.fields["messages"])  # type: ignore[arg-type]


Model = Callable[[Heard, int], Said | str]
"""Function of a request and the number of requests before it."""


@dataclass
class JudgeServer:
    """A server that runs.

    Attributes:
        url: Its address.
        heard: Requests that came.
        most_at_once: Largest number of requests that were under way at a time.
    """

    url: str = ""
    heard: list[Heard] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(model: Model, port: int = 0) -> Iterator[JudgeServer]:
    """Run a server on this machine."""
    state = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with state.lock:
                number = len(state.heard)
                heard = Heard(fields, self.headers.get("authorization", ""), time.monotonic())
                state.heard.append(heard)
                state.now += 1
                state.most_at_once = max(state.most_at_once, state.now)
            try:
                assert self.path == "/v1/chat/completions", self.path
                found = model(heard, number)
                said = Said(found) if isinstance(found, str) else found
                time.sleep(said.delay_s)
            finally:
                with state.lock:  # before the client has its answer, and asks again
                    state.now -= 1
            with suppress(OSError):
                self.send(said)

        def send(self, said: Said) -> None:
            choice = {"message": {"role": "assistant", "content": said.text}, "finish_reason": said.finish_reason}
            body = json.dumps({"choices": [choice]}).encode() if said.body is None else said.body
            self.send_response(said.status)
            for name, value in {"content-type": "application/json", **said.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.close_connection = True
            if said.is_cut:
                self.wfile.write(body[: len(body) // 2])
            elif said.drips_s:
                for place in range(len(body)):
                    self.wfile.write(body[place : place + 1])
                    time.sleep(said.drips_s)
            else:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64
        daemon_threads = True

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def between(text: str, tag: str) -> str:
    """What stands between the tags of the general templates."""
    found = re.search(rf"<{tag}>\n(.*?)\n</{tag.split(maxsplit=1)[0]}>", text, re.DOTALL)
    assert found is not None, text
    return found[1]


def by_length(heard: Heard, number: int) -> str:
    """A judge who likes long responses: a point for each character, 10 at most."""
    first = str(heard.fields["messages"][0]["content"])  # type: ignore[index]
    return f"It has some characters.\nScore: {min(len(between(first, 'response')), 10)}"
