"""Random numbers for code that keys none of its own."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, so that a step draws the same numbers however often it is run.

    A checkpoint need not hold their state, then. Our own stages do not use them.

    Args:
        seed: Of the recipe.
        step: That begins.
        rank: Of this worker.
    """
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - user code may use the global generator
    torch.manual_seed(int(words[2]))
