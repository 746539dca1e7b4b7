"""Delays at random, in all threads of a rank, wherever two ranks exchange something or one of them changes its mind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from random import Random
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from leaderless.distributed.weights.copies import PendingCopy
from leaderless.distributed.weights.delivery import WeightDelivery
from leaderless.rollout.weight_sources import Fed
from leaderless.worker.asynchronous.channels import Channels, Inbox, Note, Outbox
from leaderless.worker.build.roles import Roles
from leaderless.worker.chain import Chain
from leaderless.worker.worker import Worker

LONGEST_S = 0.08
"""Longest delay; most are far shorter."""
PLACES: list[tuple[type, str]] = [
    (Note, "exchange"),
    (Outbox, "post"),
    (Inbox, "begin"),
    (Inbox, "take"),
    (Fed, "fetch"),
    (PendingCopy, "wait"),
    (WeightDelivery, "_pack"),
    (WeightDelivery, "_take"),
    (Roles, "copy_weights"),
    (Channels, "_send_rows"),
    (Channels, "end_iteration"),
    (Chain, "_execute"),
    (Worker, "_agree"),
]
Given = ParamSpec("Given")
Result = TypeVar("Result")


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Delay this rank before and after each of `PLACES`; a seed draws the same delays for each thread again."""
    own, rank = threading.local(), os.environ["RANK"]

    def pause() -> None:
        if not hasattr(own, "chance"):
            own.chance = Random(f"{seed}/{rank}/{threading.current_thread().name}")
        time.sleep(LONGEST_S * own.chance.random() ** 6)

    def delayed(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            pause()
            try:
                return function(*args, **kwargs)
            finally:
                pause()

        return run

    with ExitStack() as stack:
        for owner, name in PLACES:
            stack.enter_context(patch.object(owner, name, delayed(getattr(owner, name))))
        yield
