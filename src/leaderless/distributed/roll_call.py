"""Which ranks are late or gone, where others stop waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import _get_default_store

ROLL_CALL_S = 1.0
"""Time for ranks that stop waiting to report it, so that the missing ones can be named."""


def silent_ranks(rank: int, others: Sequence[int]) -> tuple[int, ...]:
    """The ranks that have not stopped waiting too, so that they are late or gone.

    A rank that stops waiting reports it in the rendezvous store, which is not read while all is well.
    """
    end, silent = time.monotonic() + ROLL_CALL_S, list(others)
    try:
        store = _get_default_store()
        store.set(f"given up/{rank}", "")
        while silent and time.monotonic() < end:
            time.sleep(0.05)
            silent = [other for other in silent if not store.check([f"given up/{other}"])]
    except (RuntimeError, ValueError):  # the store is gone, and nobody else can be named
        return ()
    return tuple(silent)
