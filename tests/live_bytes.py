"""Bytes of tensors that are alive on a device, which may have no memory: `meta` has shapes of any size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make on a device, for as long as anything holds them.

    Those of `meta` are copied to the host as zeros. What kernels allocate within an operation is not seen.

    Attributes:
        now: Bytes that are alive.
        highest: Most bytes since the last `reset`.
    """

    def __init__(self, kind: str = "meta") -> None:
        super().__init__()
        self.kind, self.now, self.highest = kind, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        options, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta:
            return 0
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        if name == "_to_copy" and args[0].is_meta and torch.device(options.get("device") or META).type != "meta":
            return torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        result = func(*args, **options)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self.kind:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.highest = max(self.highest, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def know(self, module: nn.Module) -> None:
        """Count the weights of a module, which were there before."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type == self.kind:
                self._watch(tensor.untyped_storage())

    def on_top(self, work: Callable[[], object]) -> int:
        """Most bytes of some work on top of those that are there before it."""
        before = self.highest = self.now
        work()
        return self.highest - before


def without_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Move a model to `meta`, and have it stay there."""
    model.to(META, dtype)
    model.to = lambda *_: model  # type: ignore[assignment, method-assign]


@contextmanager
def watched(owner: object, name: str, live: LiveBytes, found: list[int]) -> Iterator[None]:
    """Collect the most bytes of each call of a method of an object."""
    function = getattr(owner, name)

    def call(*args: object) -> object:
        results: list[object] = []
        found.append(live.on_top(lambda: results.append(function(*args))))
        return results[0]

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
