"""What recording needs of `torch.cuda`, on a machine without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from leaderless.rollout.native import cuda_graph


class FakeCuda:
    """The current stream, the mode for operations that wait, and graphs of which the recording may fail.

    Attributes:
        stream: Current stream.
        sync_mode: Mode for operations that wait: "error" refuses them.
        modes: Mode of each recording.
        fails: Whether what is recorded cannot be.
        reason: Error of a recording that fails.
        is_collecting: Whether Python collected garbage in the last recording.
        num_open: Recordings that have begun and not ended.
        num_released: Number of times that unused memory was released.
        has_enough: Whether recordings succeed once unused memory is released.
        free_bytes: Free memory of the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of functions of torch."""
        self.stream, self.sync_mode = "default", "default"
        self.modes, self.fails, self.is_collecting = list[str](), False, True
        self.num_open = self.num_released = 0
        self.has_enough, self.free_bytes = False, 1 << 36
        self.reason = RuntimeError("operation failed due to a previous error during capture")
        fake = self

        class Graph:
            def pool(self) -> object:
                return fake

            def capture_begin(self, *_: object, capture_error_mode: str) -> None:
                assert fake.stream == "side"
                fake.is_collecting = gc.isenabled()
                fake.modes.append(capture_error_mode)
                if fake.fails:  # work that is recorded is not done
                    raise fake.reason
                fake.num_open += 1

            def capture_end(self) -> None:
                fake.num_open -= 1

            def replay(self) -> None: ...

        @contextmanager
        def on(stream: str) -> Iterator[None]:
            before, fake.stream = fake.stream, stream
            try:
                yield
            finally:
                fake.stream = before

        def released() -> None:
            fake.num_released += 1
            if fake.has_enough:
                fake.fails = False

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda_graph, "_side_stream", lambda _: "side")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", released)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (fake.free_bytes, 1 << 37))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: fake.sync_mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(fake, "sync_mode", mode))

    def wait(self) -> None:
        """Wait for the device, as a copy from it does."""
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
