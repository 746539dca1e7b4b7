"""The global generators, which the code of users may draw from."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import torch

from leaderless.worker.worker import seed_generators


def test_every_seed_step_and_rank_draws_its_own_numbers_and_the_same_again() -> None:
    def drawn(seed: int, step: int, rank: int) -> tuple[float, ...]:
        seed_generators(seed, step, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    places = list(product((0, 1), (1, 2), (0, 1)))
    numbers = [drawn(*place) for place in places]
    assert [drawn(*place) for place in places] == numbers
    assert all(len(set(column)) == len(places) for column in zip(*numbers, strict=True))
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
