"""Serves an engine over HTTP, only to the rank that started it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leaderless.distributed.remote.messages import Ask, Handler, Settings, bind, to_columns
from leaderless.distributed.weights.buckets import PackedWeight
from leaderless.rollout.external.vllm_process.worker import VllmWorker


class EngineHandler(Handler):
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
                data = self.memory.open(body["place"])[: body["bytes"]] if "place" in body else self._received()
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

    def _received(self) -> Tensor:
        """Weights that have come with the call, [bytes] uint8 on the device of the engine."""
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        return torch.frombuffer(self.attached, dtype=torch.uint8).to(device)


def main() -> None:
    """Serve one rank on the loopback interface until it ends; the settings are read from standard input."""
    start = json.loads(sys.stdin.readline())
    server = bind(start["port"], EngineHandler, start["token"])
    EngineHandler.worker = VllmWorker(Settings(**start["settings"]))
    EngineHandler.worker.start()
    server.server_activate()  # connections are accepted from now on: the engine is ready
    server.serve_forever()
