"""What all tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Test modules, and the processes that run their functions, find each other as `tests.<folder>.<module>`.
sys.path.insert(0, str(Path(__file__).parents[1]))

# Tensors in tests are tiny, and several processes share the cores: a second thread would cost more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many tests start Python anew; what has been compiled once need not be compiled by each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from tests.distributed.ranks import RankPool

# A shell that starts this in the background has it ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "quick",
    settings(),
    max_examples=50,
    deadline=None,  # other processes may use the same cores: how long an example takes says nothing about it
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run functions of tests as ranks of one process group; started when a test first needs them."""
    pool = RankPool()
    yield pool
    pool.close()
