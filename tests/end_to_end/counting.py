"""What the ranks of a run send each other, counted from outside: bytes between ranks, and bytes to the store."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.distributed.transport import ProcessGroup

MODEL = "the model"
"""Label of messages of FSDP, which do not pass through `ProcessGroup`."""

Bytes = dict[str, tuple[float, float]]
"""Bytes sent and received, by what ranks waited for."""


@dataclass
class Wire:
    """Bytes that this rank sends and receives; for collectives, the bytes of the best algorithm.

    Attributes:
        exchanged: Bytes from peer to peer.
        agreed: Bytes of collectives that treat all ranks alike.
        broadcast: Bytes of broadcasts.
    """

    exchanged: Bytes = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    agreed: Bytes = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    broadcast: Bytes = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    _thread: threading.local = field(default_factory=threading.local)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count until the end of the context."""
        with ExitStack() as stack:
            for name in ("sum", "max", "gather", "gather_equal", "broadcast", "broadcast_text", "_begin"):
                stack.enter_context(patch.object(ProcessGroup, name, self._labelled(getattr(ProcessGroup, name))))
            stack.enter_context(self._labels(MODEL))
            yield

    @contextmanager
    def _labels(self, what: str) -> Iterator[None]:
        """Count everything that this thread sends in the context as one kind."""
        before = getattr(self._thread, "what", None)
        self._thread.what = what
        with ExitStack() as stack:
            if before is None:  # a thread that is not counted
                stack.enter_context(_Listening(self))
            try:
                yield
            finally:
                self._thread.what = before

    def _labelled(self, method: Callable[..., object]) -> Callable[..., object]:
        def wrapped(group: ProcessGroup, *args: object) -> object:
            with self._labels(str(args[-1])):
                return method(group, *args)

        return wrapped

    def add(self, kind: Bytes, sent: float, received: float) -> None:
        """Count bytes under what this thread waits for."""
        before = kind[self._thread.what]
        kind[self._thread.what] = (before[0] + sent, before[1] + received)


class _Listening(TorchDispatchMode):
    """Sees every operation of every process group, whoever started it."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[object]) -> None:
        wire = self.wire
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        others, size = group.size() - 1, group.size()
        match name:
            case "send":
                wire.add(wire.exchanged, _bytes(args[0]), 0)
            case "recv_":
                wire.add(wire.exchanged, 0, _bytes(args[0]))
            case "allreduce_":
                share = 2 * _bytes(args[0]) * others / size
                wire.add(wire.agreed, share, share)
            case "_reduce_scatter_base_":
                share = _bytes(args[1]) * others / size
                wire.add(wire.agreed, share, share)
            case "allgather_" | "_allgather_base_":
                wire.add(wire.agreed, _bytes(args[1]) * others, _bytes(args[0]) * others / size)
            case "broadcast_":
                is_sender = args[2] == group.rank()
                wire.add(wire.broadcast, *((_bytes(args[0]) * others, 0) if is_sender else (0, _bytes(args[0]))))
            case _:
                raise AssertionError(f"c10d::{name} is led by one rank, or not counted here")


def _bytes(tensors: object) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    assert isinstance(tensors, list | tuple)
    return sum(map(_bytes, tensors))


class StoreProxy:
    """Forwards between ranks and the rendezvous store, and records when anything passes.

    Attributes:
        port: Port on 127.0.0.1 where ranks meet.
        passed: Time, on the clock of `time.monotonic`, and bytes of each message.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.passed: list[tuple[float, int]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:  # closed
                return
            store = socket.create_connection(("127.0.0.1", self._store_port))
            for source, target in ((client, store), (store, client)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while content := source.recv(1 << 16):
                self.passed.append((time.monotonic(), len(content)))
                target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has closed
            source.close()
            target.close()
