"""vLLM, in this process or in a process of another environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from leaderless.config import Json
from leaderless.device import own_device_environment
from leaderless.rollout import apart
from leaderless.rollout.apart.messages import Ask, Gain, Settings, checksum, from_columns
from leaderless.rollout.apart.vllm_worker import VllmWorker
from leaderless.rollout.child_server import ChildServer, bound_command
from leaderless.rollout.weights import CudaStaging, HostStaging, LocalStaging, make_buckets
from leaderless.weights.stream import WeightStream

FOLDER = Path(apart.__file__).parent
START = (
    "import importlib.util\n"
    "spec = importlib.util.spec_from_file_location('apart', sys.argv[1] + '/__init__.py')\n"
    "sys.modules['apart'] = importlib.util.module_from_spec(spec)\n"
    "from apart.server import main\n"
    "main()\n"
)
"""Program for the engine's interpreter. It imports one folder of this package, under another name, and not the folder
around it, which has all packages of this process, including other versions of the engine's."""


class InProcessVllm(VllmWorker):
    """See `Driver`. If vLLM fails, this process fails too."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings)
        self._device = device

    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """See `Driver`. Weights go through a bucket from the trainer's memory into vLLM's, in this process."""
        for bucket in make_buckets(weights, self.settings.torch_dtype, LocalStaging(self._device)):
            self.load_bucket(bucket.weights, bucket.data, adapter=adapter)
        self.finish_load(weights.policy_version, adapter)


class VllmServer:
    """See `Driver`. vLLM runs in a process of another interpreter, which serves only this rank."""

    def __init__(self, python: str, settings: Settings, device: torch.device, server: ChildServer) -> None:
        """Start nothing yet; `python` is an interpreter that has vLLM, and `server` runs it."""
        self._python, self._settings, self._device, self._server = python, settings, device, server

    def start(self) -> None:
        """See `Driver`."""
        self._server.prepare()
        greeting = {"port": self._server.port, "token": self._server.token, "settings": asdict(self._settings)}
        command = bound_command(self._python, START, str(FOLDER))
        self._server.start(command, json.dumps(greeting), own_device_environment(self._device))

    def wake(self) -> None:
        """See `Driver`."""
        self._server.call_numbered("/wake", {})

    def sleep(self, *, keep_weights: bool) -> None:
        """See `Driver`."""
        self._server.call_numbered("/sleep", {"keep_weights": keep_weights})

    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """See `Driver`. Weights are packed in memory that both processes see: of the device, or of the host."""
        staging = CudaStaging(self._device) if self._device.type == "cuda" else HostStaging()
        try:
            for bucket in make_buckets(weights, self._settings.torch_dtype, staging):
                packed: Json = [asdict(weight) for weight in bucket.weights]
                body = {"place": staging.place(), "weights": packed, "bytes": len(bucket.data), "adapter": adapter}
                # The checksum waits for copies on an accelerator, so that the server may read the bucket from now on.
                self._server.call_numbered("/load", body | {"checksum": checksum(bucket.data)})
            self._server.call_numbered("/finish_load", {"policy_version": weights.policy_version, "adapter": adapter})
        finally:
            staging.close()

    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """See `Driver`."""
        return cast(
            "list[float]", self._server.call_numbered("/prompt_log_probs", {"tokens": tokens, "adapter": adapter})
        )

    def submit(self, asks: Sequence[Ask]) -> None:
        """See `Driver`."""
        self._server.call_numbered("/submit", {"asks": [vars(ask) for ask in asks]})

    def step(self) -> list[Gain]:
        """See `Driver`."""
        return from_columns(cast("Mapping[str, Sequence[Any]]", self._server.call_numbered("/step", {})))

    def abort(self, ids: Sequence[int]) -> None:
        """See `Driver`."""
        self._server.call_numbered("/abort", {"ids": ids})

    def close(self) -> None:
        """See `Driver`."""
        self._server.close()
        if self._settings.meeting is not None:
            Path(self._settings.meeting).unlink(missing_ok=True)  # a server that is stopped leaves it behind
