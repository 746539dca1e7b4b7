"""What a rank computes on where there is no accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from leaderless.device import setup_device

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Gives back the number of threads that other tests compute with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_cores", "num_ranks", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_the_ranks_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_ranks: int, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    torch.set_num_threads(3)
    assert setup_device(0, num_ranks).backend == "gloo"
    assert torch.get_num_threads() == expected


def test_the_number_of_threads_is_the_users_where_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)  # as torch does when it is loaded
    setup_device(0, 1)
    assert torch.get_num_threads() == 3
