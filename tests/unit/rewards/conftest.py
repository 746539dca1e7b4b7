"""Fixtures that grade."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.rewards.calls import (
    EVERYTHING,
    make_config,
)

from leaderless.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardPool]:
    """Two processes with every reward, each for the source of the same name."""
    with RewardPool(make_config(EVERYTHING), 2) as rewards:
        yield rewards
