"""Errors with types of their own. Imports no torch."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")
"""Messages of allocators, as torch forwards them in errors without a separate type."""


class CollectiveError(RuntimeError):
    """A rank did not get what it waited for from its peers."""


class MemoryExhausted(RuntimeError):  # noqa: N818
    """Memory has run out; the message gives the purpose and what to lower."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or the system means that host or device memory ran out."""
    if isinstance(error, MemoryError | MemoryExhausted) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


@contextmanager
def memory_explained(what: str) -> Iterator[None]:
    """Add cause and remedy to an error of memory, as `too much is sampled at once: lower rollout.max_sequences`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryExhausted) or not is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryExhausted(f"{what} ({reason})") from error
