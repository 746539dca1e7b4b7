"""Serves an engine over HTTP, only to the rank that started it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from leaderless.distributed.remote.messages import Ask, Handler, Settings, bind, to_columns
from leaderless.distributed.weights.buckets import PackedWeight
from leaderless.rollout.external.vllm_process.worker import VllmWorker


class _Handler(Handler):
    """Answers requests with the methods of a `VllmWorker`."""

    worker: VllmWorker

    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        """Call the method of the worker that a request names."""
        match name:
            case "submit":
                self.worker.submit(Ask(**ask) for ask in body["asks"])
            case "step":
                return to_columns(self.worker.step())
            case "load":
                data = self.memory.open(body["place"])[: body["bytes"]]
                weights = [PackedWeight(**weight) for weight in body["weights"]]
                self.worker.load_bucket(weights, data, body["adapter"], is_checked=True)
            case "finish_load":
                self.memory.close()
                self.worker.finish_load(**body)
            case "abort" | "prompt_log_probs" | "wake" | "sleep":
                return getattr(self.worker, name)(**body)
            case "health":
                pass
            case _:
                raise ValueError(f"there is no call '{name}'")
        return None


def main() -> None:
    """Serve one rank on the loopback interface until it ends; the settings are read from standard input."""
    start = json.loads(sys.stdin.readline())
    server = bind(start["port"], _Handler, start["token"])
    _Handler.worker = VllmWorker(Settings(**start["settings"]))
    _Handler.worker.start()
    server.server_activate()  # connections are accepted from now on: the engine is ready
    server.serve_forever()
