"""What recording needs of `torch.cuda`, on a machine without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch


class FakeCuda:
    """The current stream, the mode for operations that wait, and graphs of which the recording may fail.

    Attributes:
        stream: Current stream.
        sync_mode: Mode for operations that wait: "error" refuses them.
        modes: Mode of each recording.
        fails: Whether what is recorded cannot be.
        reason: Error of a recording that fails.
        is_collecting: Whether Python collected garbage in the last recording.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of functions of torch."""
        self.stream, self.sync_mode = "default", "default"
        self.modes, self.fails, self.is_collecting = list[str](), False, True
        self.reason = RuntimeError("operation failed due to a previous error during capture")
        fake = self

        class Graph:
            def pool(self) -> object:
                return fake

            def replay(self) -> None: ...

        class Recording:
            def __init__(self, *_: object, capture_error_mode: str, **__: object) -> None:
                self.mode = capture_error_mode

            def __enter__(self) -> None:
                fake.stream, fake.is_collecting = "side", gc.isenabled()
                fake.modes.append(self.mode)
                if fake.fails:  # work that is recorded is not done
                    raise fake.reason

            def __exit__(self, *_: object) -> None:
                fake.stream = "default"

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Recording)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(fake, "stream", stream))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: fake.sync_mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(fake, "sync_mode", mode))

    def wait(self) -> None:
        """Wait for the device, as a copy from it does."""
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
