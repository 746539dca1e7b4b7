"""Memory that a process uses for some time, in bytes (Linux)."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """Resident memory around a piece of work.

    Attributes:
        before: Bytes before it.
        highest: Most bytes during it.
        after: Bytes after it.
    """

    before: int = 0
    highest: int = 0
    after: int = 0

    @property
    def on_top(self) -> int:
        """Additional memory of the work at its peak, in bytes."""
        return self.highest - self.before


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure the work inside; the system's own maximum is reset first."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    peak = Peak(before=_status("VmRSS"))
    yield peak
    peak.highest, peak.after = _status("VmHWM"), _status("VmRSS")


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10
