"""Memory of another process of this machine, in which weights arrive."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SharedMemory:
    """The bytes of one bucket after the other."""

    def __init__(self) -> None:
        self._place: Mapping[str, object] = {}
        self._data = torch.empty(0, dtype=torch.uint8)

    def open(self, place: Mapping[str, object]) -> Tensor:
        """The memory as bytes; opened anew only when it is another one.

        Args:
            place: A `file` with its `bytes`, or the fields of a CUDA IPC handle.
        """
        if place != self._place:
            self.close()
            self._data = _open_cuda(place) if "handle" in place else _open_file(place)
            self._place = place
        return self._data

    def close(self) -> None:
        """Let go of it."""
        self._place, self._data = {}, torch.empty(0, dtype=torch.uint8)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _open_file(place: Mapping[str, object]) -> Tensor:
    return torch.from_file(str(place["file"]), shared=True, size=int(str(place["bytes"])), dtype=torch.uint8)


def _open_cuda(place: Mapping[str, object]) -> Tensor:
    """This process may see the device under another number, so its own is taken."""
    storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001
        torch.cuda.current_device(),
        bytes.fromhex(str(place["handle"])),
        place["bytes"],
        place["offset"],
        bytes.fromhex(str(place["counter"])),
        place["counter_offset"],
        bytes.fromhex(str(place["event"])),
        place["has_event"],
    )
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
