"""What all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules, and the processes that run their functions, find each other as `tests.<folder>.<module>`.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run functions of tests as ranks of one process group; started when a test first needs them."""
    pool = RankPool()
    yield pool
    pool.close()
