"""Serves an engine over HTTP to the rank that has started it, and to nobody else."""

from __future__ import annotations

import hmac
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from .messages import Ask, PackedWeight, Settings
from .shared_memory import SharedMemory
from .vllm_worker import VllmWorker


class _Calls:
    """The calls of a rank, by name; arguments and results are JSON."""

    def __init__(self, worker: VllmWorker) -> None:
        self._worker, self._memory = worker, SharedMemory()

    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        """Carry out a call, and return JSON-able values."""
        worker = self._worker
        match name:
            case "submit":
                worker.submit(Ask(**ask) for ask in body["asks"])
            case "step":
                return [asdict(gain) for gain in worker.step()]
            case "abort":
                worker.abort(body["ids"])
            case "load":
                data = self._memory.open(body["place"])[: body["bytes"]]
                worker.load_bucket([PackedWeight(**weight) for weight in body["weights"]], data, body["checksum"])
            case "finish_load":
                self._memory.close()
                worker.finish_load(body["policy_version"])
            case "prompt_log_probs":
                return worker.prompt_log_probs(body["tokens"])
            case "wake":
                worker.wake()
            case "sleep":
                worker.sleep(keep_weights=body["keep_weights"])
            case "health":
                pass
            case _:
                raise ValueError(f"there is no call '{name}'")
        return None


class _Handler(BaseHTTPRequestHandler):
    """One HTTP call, with the token that the rank and this server share."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two packets, and the second must not wait
    calls: _Calls
    token: str

    def do_GET(self) -> None:
        """Answer a health check."""
        self.do_POST()

    def do_POST(self) -> None:
        """Answer a call."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not hmac.compare_digest(self.headers.get("Authorization") or "", f"Bearer {self.token}"):
            self._send(401, {"error": "wrong token"})
            return
        try:
            self._send(200, self.calls.answer(self.path.removeprefix("/"), json.loads(body or b"{}")))
        except Exception as error:  # noqa: BLE001  (it is sent to the rank)
            traceback.print_exc()
            self._send(500, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Calls are not logged: there is one for each step."""


def main() -> None:
    """Serve one rank on the loopback interface until it ends; the settings are read from standard input."""
    start = json.loads(sys.stdin.readline())
    server = HTTPServer(("127.0.0.1", start["port"]), _Handler, bind_and_activate=False)
    server.server_bind()
    _Handler.token = start["token"]
    worker = VllmWorker(Settings(**start["settings"]))
    worker.start()
    _Handler.calls = _Calls(worker)
    server.server_activate()  # connections are accepted from now on: the engine is ready
    server.serve_forever()
