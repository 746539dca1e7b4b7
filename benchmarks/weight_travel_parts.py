"""A link on which weights take a known time, for `weight_travel.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fixed_lag_parts import PacedEngine
from leaderless import RolloutSetup, rollout_engine
from leaderless.distributed.transport import ProcessGroup, Round

exchanging = ProcessGroup.exchanging


def slowly(group: ProcessGroup, rounds: Iterable[Round], what: str) -> Iterator[None]:
    """Exchange rounds, and sleep for what a transfer of weights should take."""
    if what.startswith("weights of role"):
        time.sleep(json.loads(Path("travel.json").read_text(encoding="utf-8")))
    yield from exchanging(group, rounds, what)


ProcessGroup.exchanging = slowly  # type: ignore[method-assign]


@rollout_engine()
def make_engine(setup: RolloutSetup) -> PacedEngine:
    """The engine of `fixed_lag_parts`; on its rank, the link is slow."""
    return PacedEngine(setup)
