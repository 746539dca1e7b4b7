r"""The law of continuous generation: the seconds of a step where ranks generate all the time, and others train.

The share of rank r in iteration k takes up its engine for ``work`` seconds: a place in it that a response has left is
taken by the next one, of whichever iteration, so that only the mean throughput counts. Its last response has ended
``alone`` seconds after its first could begin, if the engine has nothing else to do. With a capacity of c:

    start[r, k]   = max(front[r, k-1], trained[k-1-c])    weights must have come, and the engine must have room
    front[r, k]   = start[r, k] + work[r, k]              the next share may follow here, not at the end of this one
    done[r, k]    = max(done[r, k-1], start[r, k] + alone[r, k])
    trained[k]    = max(trained[k-1], max_r done[r, k]) + training[k]

In lockstep, and with a fixed lag, the next share follows at ``done``, so that each step waits for a longest response.
Here a step takes the longest of three: training; the mean work of the slowest rank; and, as iteration k waits for the
weights of iteration k-1-c, the part ``(alone + training) / (c + 1)`` of them. The plan says the last one in words: a
response that takes longer than c + 1 steps of training holds it up.

Responses of other shares slow down the longest one. A step of the engine takes a time for itself and another one for
each response. Where the latter is a part u of an iteration, the engine makes its steps in the rest of it, and the
longest response takes ``longest / (1 - u)``, at most what c + 1 shares at once make of it. As u depends on the seconds
of an iteration, both are found together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from leaderless.planner.auto.seconds import Rates, Seconds

NUM_ROUNDS = 6
"""Rounds in which the seconds of a step, and what responses slow each other down, are found together."""
REPEATS = 4
"""Times that the drawn steps are gone through; the first of them are not counted."""
MOST_ITERATIONS = 64


class Pools(NamedTuple):
    """The two pools of a plan that generates continuously.

    Attributes:
        rates: What the shares of the ranks that generate take.
        besides: Seconds of an iteration in which a rank that generates does something else.
        training: [draws] seconds of a step of the ranks that train.
        capacity: Iterations that generation may be ahead.
    """

    rates: Rates
    besides: Seconds
    training: Seconds
    capacity: int


def step_seconds(pools: Pools) -> float:
    """Seconds of a step in the long run."""
    rates = pools.rates
    tokens = rates.work.mean(axis=0)
    alone = rates.alone
    period: float = _pace(pools, rates.work, alone)
    for _ in range(NUM_ROUNDS if rates.longest.any() else 0):
        stretched = np.minimum(
            rates.longest / np.maximum(1 - tokens / max(period, tokens.max()), 1e-9),
            rates.longest + (pools.capacity + 1) * tokens,
        )
        # The first estimate is too short, and one that knows the crowd of the other too long: they meet in the middle.
        period = (period + _pace(pools, rates.work, np.maximum(alone, alone - rates.longest - tokens + stretched))) / 2
    return period


def _pace(pools: Pools, work: Seconds, alone: Seconds) -> float:
    """Seconds of an iteration by the recursion that this module begins with."""
    num_draws, num_ranks = work.shape
    num_iterations = min(MOST_ITERATIONS, REPEATS * num_draws)
    front, done = np.zeros(num_ranks), np.zeros(num_ranks)
    trained: list[float] = []
    for iteration in range(num_iterations):
        draw = iteration % num_draws
        weights = trained[iteration - 1 - pools.capacity] if iteration > pools.capacity else 0.0
        start = np.maximum(front, weights)
        front = start + work[draw] + pools.besides[draw]
        done = np.maximum(done, start + alone[draw] + pools.besides[draw])
        trained.append(max(trained[-1] if trained else 0.0, float(done.max())) + float(pools.training[draw]))
    first = min(num_draws, num_iterations // 2)
    return float((trained[-1] - trained[first - 1]) / (num_iterations - first))
