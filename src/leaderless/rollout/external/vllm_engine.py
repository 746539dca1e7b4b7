"""vLLM, in this process or in a process of another environment."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.devices import own_device_environment
from leaderless.base.values import Json
from leaderless.distributed.in_flight import mark
from leaderless.distributed.remote.child_server import ChildServer, package_command
from leaderless.distributed.remote.messages import Ask, Gain, Settings, from_columns
from leaderless.distributed.weights.buckets import (
    CudaStaging,
    HostStaging,
    LocalStaging,
    WeightBucket,
    checksums,
    make_buckets,
)
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.external.lora_slots import AdapterDriver
from leaderless.rollout.external.vllm_process.worker import VllmWorker

SERVER = "leaderless.rollout.external.vllm_process.server"
"""Module that runs in the engine's interpreter."""


class InProcessVllm(VllmWorker):
    """vLLM in this process; if vLLM fails, this process fails too."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings)
        self._device = device

    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """Load weights through a bucket from the trainer's memory into vLLM's, in this process."""
        staging, exact = LocalStaging(self._device), weights.exact
        for bucket in make_buckets(weights, self.settings.torch_dtype, staging, exact=exact):
            self.load_bucket(bucket.weights, bucket.data, adapter)
        self.finish_load(weights.policy_version, adapter)


class VllmServer(AdapterDriver):
    """vLLM in a process of another interpreter, which serves only this rank."""

    def __init__(self, python: str, settings: Settings, device: torch.device, server: ChildServer) -> None:
        """Start nothing yet; `python` is an interpreter that has vLLM, and `server` runs it."""
        self._python, self._settings, self._device, self._server = python, settings, device, server

    @override
    def start(self) -> None:
        self._server.prepare()
        greeting = {"port": self._server.port, "token": self._server.token, "settings": asdict(self._settings)}
        command = package_command(self._python, SERVER)
        self._server.start(command, json.dumps(greeting), own_device_environment(self._device))

    @override
    def wake(self) -> None:
        self._server.call_numbered("/wake", {})

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        self._server.call_numbered("/sleep", {"keep_weights": keep_weights})

    @override
    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """Pack weights in memory that both processes see: of the device, or of the host.

        There are two such memories: while the server loads a bucket, which a thread asks for, the next one is packed.
        """
        is_cuda = self._device.type == "cuda"
        stagings = [CudaStaging(self._device) if is_cuda else HostStaging() for _ in range(2)]
        sums, asked = list[Tensor](), deque[Future[None]]()
        try:
            with ThreadPoolExecutor(1, "load weights") as thread:
                buckets = make_buckets(weights, self._settings.torch_dtype, *stagings, exact=weights.exact)
                for bucket, staging in zip(buckets, cycle(stagings), strict=False):
                    sums.append(checksums(bucket.data[None]))
                    packed, before = mark(self._device) if is_cuda else None, asked[-1] if asked else None
                    asked.append(thread.submit(self._ask_to_load, bucket, staging.place(), packed, adapter, before))
                    if len(asked) == len(stagings):  # the next bucket takes the memory of this one
                        asked.popleft().result()
                for one in asked:
                    one.result()
            found: Json = torch.cat(sums).tolist() if sums else []
            body: Json = {"policy_version": weights.policy_version, "adapter": adapter, "expected": found}
            self._server.call_numbered("/finish_load", body)
        finally:
            for staging in stagings:
                staging.close()

    def _ask_to_load(
        self, bucket: WeightBucket, place: Json, packed: torch.Event | None, adapter: str, before: Future[None] | None
    ) -> None:
        """Let the server load a bucket, once an accelerator has packed it and the server has loaded the one before."""
        if before is not None:
            before.result()  # raises its error: a server that hangs is not waited for a second time
        if packed is not None:
            packed.synchronize()
        weights: Json = [asdict(weight) for weight in bucket.weights]
        body: Json = {"place": place, "weights": weights, "bytes": len(bucket.data), "adapter": adapter}
        self._server.call_numbered("/load", body)

    @override
    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        return cast(
            "list[float]", self._server.call_numbered("/prompt_log_probs", {"tokens": tokens, "adapter": adapter})
        )

    @override
    def submit(self, asks: Sequence[Ask]) -> None:
        self._server.call_numbered("/submit", {"asks": [vars(ask) for ask in asks]})

    @override
    def step(self) -> list[Gain]:
        return from_columns(cast("Mapping[str, Sequence[Any]]", self._server.call_numbered("/step", {})))

    @override
    def abort(self, ids: Sequence[int]) -> None:
        self._server.call_numbered("/abort", {"ids": ids})

    @override
    def close(self) -> None:
        self._server.close()
        if self._settings.meeting is not None:
            Path(self._settings.meeting).unlink(missing_ok=True)  # a server that is stopped leaves it behind
