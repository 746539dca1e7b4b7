"""Memory of another process of this machine, through which weights arrive."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SharedMemory:
    """Memory that holds one bucket of weights at a time."""

    def __init__(self) -> None:
        self._place: Mapping[str, object] = {}
        self._data = torch.empty(0, dtype=torch.uint8)

    def open(self, place: Mapping[str, object]) -> Tensor:
        """Map memory, unless it is mapped already, and return it as bytes.

        Args:
            place: Path `file` and size `bytes`, or the fields of a CUDA IPC handle.
        """
        if place != self._place:
            self.close()
            self._data = _open_cuda(place) if "handle" in place else _open_file(place)
            self._place = place
        return self._data

    def close(self) -> None:
        """Unmap the memory."""
        self._place, self._data = {}, torch.empty(0, dtype=torch.uint8)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _open_file(place: Mapping[str, object]) -> Tensor:
    return torch.from_file(str(place["file"]), shared=True, size=int(str(place["bytes"])), dtype=torch.uint8)


def _open_cuda(place: Mapping[str, object]) -> Tensor:
    """Map CUDA memory. This process may see the device under another index, so the current device is used."""
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
