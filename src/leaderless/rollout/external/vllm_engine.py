"""vLLM, in this process, in a process of another environment, or started elsewhere."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.devices import own_device_environment
from leaderless.base.values import Json
from leaderless.distributed.in_flight import mark
from leaderless.distributed.remote.child_server import ChildServer, package_command
from leaderless.distributed.remote.elsewhere import ServerElsewhere
from leaderless.distributed.remote.messages import Ask, Gain, Settings, from_columns
from leaderless.distributed.remote.server_calls import ServerCalls
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
from leaderless.rollout.external.vllm_process.stages import forget_meeting
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

    @override
    def close(self) -> None:
        super().close()
        forget_meeting(self.settings)


class ServedVllm(AdapterDriver):
    """vLLM in another process, which serves only this rank."""

    def __init__(self, settings: Settings, device: torch.device, server: ServerCalls) -> None:
        self._settings, self._device, self._server = settings, device, server

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
        stagings = [self._staging(), self._staging()]
        sums, asked = list[Tensor](), deque[Future[None]]()
        try:
            with ThreadPoolExecutor(1, "load weights") as thread:
                buckets = make_buckets(weights, self._settings.torch_dtype, *stagings, exact=weights.exact)
                for bucket, staging in zip(buckets, cycle(stagings), strict=False):
                    sums.append(checksums(bucket.data[None]))
                    packed, before = mark(self._device) if is_cuda else None, asked[-1] if asked else None
                    asked.append(thread.submit(self._ask_to_load, bucket, staging, packed, adapter, before))
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
        self,
        bucket: WeightBucket,
        staging: LocalStaging,
        packed: torch.Event | None,
        adapter: str,
        before: Future[None] | None,
    ) -> None:
        """Let the server load a bucket, once an accelerator has packed it and the server has loaded the one before."""
        if before is not None:
            before.result()  # raises its error: a server that hangs is not waited for a second time
        if packed is not None:
            packed.synchronize()
        self._load({"weights": [asdict(weight) for weight in bucket.weights], "adapter": adapter}, bucket, staging)

    @abstractmethod
    def _staging(self) -> LocalStaging:
        """Memory in which a bucket is packed for the server."""

    @abstractmethod
    def _load(self, body: dict[str, Json], bucket: WeightBucket, staging: LocalStaging) -> None:
        """Let the server load a bucket."""

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


class VllmServer(ServedVllm):
    """vLLM in a process of another interpreter on this machine, which this rank starts."""

    def __init__(self, python: str, settings: Settings, device: torch.device, server: ChildServer) -> None:
        """Start nothing yet; `python` is an interpreter that has vLLM, and `server` runs it."""
        super().__init__(settings, device, server)
        self._python, self._child = python, server

    @override
    def start(self) -> None:
        self._child.prepare()
        greeting = {"port": self._child.port, "token": self._child.token, "settings": asdict(self._settings)}
        command = package_command(self._python, SERVER)
        self._child.start(command, json.dumps(greeting), own_device_environment(self._device))

    @override
    def _staging(self) -> LocalStaging:
        return CudaStaging(self._device) if self._device.type == "cuda" else HostStaging()

    @override
    def _load(self, body: dict[str, Json], bucket: WeightBucket, staging: LocalStaging) -> None:
        """Name memory that both processes see."""
        assert isinstance(staging, CudaStaging | HostStaging), "the server can open it"
        self._server.call_numbered("/load", body | {"place": staging.place(), "bytes": len(bucket.data)})

    @override
    def close(self) -> None:
        super().close()
        forget_meeting(self._settings)  # a server that is stopped leaves it behind


class VllmElsewhere(ServedVllm):
    """vLLM in a process that was started elsewhere, to which weights are sent."""

    def __init__(self, settings: Settings, device: torch.device, server: ServerElsewhere) -> None:
        super().__init__(settings, device, server)
        self._elsewhere = server

    @override
    def start(self) -> None:
        self._elsewhere.start(asdict(self._settings))

    @override
    def _staging(self) -> LocalStaging:
        return LocalStaging(torch.device("cpu"))

    @override
    def _load(self, body: dict[str, Json], bucket: WeightBucket, staging: LocalStaging) -> None:
        """Send the bytes of the bucket."""
        self._server.call_numbered("/load", body, bucket.data.numpy().data)
