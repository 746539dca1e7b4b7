"""Serves the part of a model in Megatron, only to the rank that started it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.distributed.remote.messages import Handler, SharedMemory, bind
from leaderless.distributed.weights.buckets import PackedWeight, checksum
from leaderless.training.megatron.model import MegatronModel, MegatronPass, MegatronSettings, Slope, check_versions

ALIGNMENT = 16
"""Divisor of the offset at which each weight begins, in bytes."""


class MegatronCalls:
    """Functions that a rank may call. Tensors of a model are sent through memory that both processes see."""

    def __init__(self, model: MegatronModel) -> None:
        self._model, self._memory = model, SharedMemory()
        self._export: Iterator[tuple[str, Tensor]] = iter(())
        self._waiting: tuple[str, Tensor] | None = None

    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        """Answer a call."""
        match name:
            case "score":
                return self._model.score(MegatronPass(**body))
            case "gradient":
                slopes = [Slope(**one) for one in body["slopes"]]
                return self._model.gradient([MegatronPass(**one) for one in body["passes"]], slopes)
            case "export":
                self._export, self._waiting = self._model.export(body["kind"]), None
            case "bucket":
                return self._bucket(self._memory.open(body["place"]))
            case "step" | "load" | "loaded" | "discard":
                return getattr(self._model, name)(**body)
            case "health":
                pass
            case _:
                raise ValueError(f"there is no call '{name}'")
        return None

    def _bucket(self, data: Tensor) -> Mapping[str, object]:
        """Pack the next weights that fit, in float32; none at the end."""
        packed, end = list[PackedWeight](), 0
        while (one := self._waiting or next(self._export, None)) is not None:
            name, weight = one
            size = -(-weight.numel() * torch.float32.itemsize // ALIGNMENT) * ALIGNMENT
            if end + size > len(data):
                if not packed:
                    raise ValueError(f"'{name}' of {size} bytes does not fit into a bucket of {len(data)}")
                self._waiting = one
                break
            self._waiting = None
            data[end : end + size].zero_()
            packed.append(PackedWeight(name, "float32", tuple(weight.shape), end))
            packed[-1].view(data).copy_(weight)
            end += size
        if not packed:
            self._memory.close()
        return {"weights": [vars(one) for one in packed], "bytes": end, "checksum": checksum(data[:end])}


class _Handler(Handler):
    """Answers requests of ranks by `MegatronCalls`."""

    calls: ClassVar[MegatronCalls]

    @override
    def answer(self, name: str, body: Mapping[str, Any]) -> object:
        return self.calls.answer(name, body)


def meet(settings: MegatronSettings) -> None:
    """Connect the processes that have the model together."""
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        init_method=settings.meeting,
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.timeout_s),
    )


def main() -> None:
    """Serve one rank on the loopback interface until it ends; the settings are read from standard input."""
    start = json.loads(sys.stdin.readline())
    try:
        check_versions()
    except RuntimeError as error:
        sys.exit(str(error))
    server, settings = bind(start["port"], _Handler, start["token"]), MegatronSettings(**start["settings"])
    meet(settings)
    _Handler.calls = MegatronCalls(MegatronModel(settings))
    server.server_activate()  # connections are accepted from now on: the model is loaded
    server.serve_forever()
