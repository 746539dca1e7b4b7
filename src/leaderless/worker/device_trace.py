"""Operations of a rank's device in one step, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from leaderless.observability.clock import MayFail


@contextmanager
def device_trace(path: Path, device: torch.device, may_fail: MayFail) -> Iterator[None]:
    """Record kernels, copies, and calls that start them or wait for them; without CUDA the operations of the CPU.

    The device is waited for at the end, so that everything that was started is in the trace. Nothing is written if an
    exception leaves the context.

    Args:
        path: File to write.
        device: Device of the rank.
        may_fail: Context in which the file is written.
    """
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        yield
        if is_cuda:
            torch.cuda.synchronize(device)
    with may_fail(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".new")
        found.export_chrome_trace(str(begun))
        begun.replace(path)
