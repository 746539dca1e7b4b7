r"""The law of continuous generation: the seconds of a step where ranks generate all the time, and others train.

The share of rank r in iteration k takes up its engine for ``work`` seconds: a place in it that a response has left is
taken by the next one, of whichever iteration, so that only the mean throughput counts. Its last response has ended
``alone`` seconds after its first could begin, if the engine has nothing else to do. With a capacity of c:

    start[r, k]   = max(front[r, k-1], trained[k-1-c])    weights must have come, and the engine must have room
    front[r, k]   = start[r, k] + work[r, k]              the next share may follow here, not at the end of this one
    graded[r, k]  = max(graded[r, k-1], start[r, k]) + grading[k]    rewards of a share, in other processes
    done[r, k]    = max(done[r, k-1], start[r, k] + alone[r, k], graded[r, k])
    trained[k]    = max(trained[k-1], max_r done[r, k]) + training[k]

In lockstep, and with a fixed lag, the next share follows at ``done``, so that each step waits for a longest response.
Here a step takes the longest of these: training; the mean work of the slowest rank; grading; and, as iteration k waits
for the weights of iteration k-1-c, the part ``(alone + training) / (c + 1)`` of them. The plan says the last one in
words: a response that takes longer than c + 1 steps of training holds it up.

Responses of other shares slow down the longest one. A step of the engine takes a time for itself and another one for
each response. Where the latter is a part u of an iteration, the engine makes its steps in the rest of it, and the
longest response takes ``longest / (1 - u)``, at most what c + 1 shares at once make of it. As u depends on the seconds
of an iteration, both are found together.

A rank that helps has the device of one that trains while that one does not use it: where training uses it for a part b
of an iteration, all that the helper does takes ``1 / (1 - b)`` times as long. That is the most it can have: it takes a
turn for each step of its engine, and training waits for the end of one at most, which is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.placement.node_seconds import Rates, Seconds

NUM_ROUNDS = 8
"""Halvings of the range in which the seconds of an iteration lie that depend on themselves."""
REPEATS = 4
"""Times that the drawn steps are gone through; the first of them are not counted."""
MOST_ITERATIONS = 64
LEAST_FREE = 1e-3
"""Least part of an iteration that is taken to be left of an engine or a device that others use."""


class Pools(NamedTuple):
    """The two pools of a plan that generates continuously.

    Attributes:
        rates: Seconds that the share of each generating rank takes.
        besides: [draws] seconds per iteration in which a generating rank does something else.
        grading: [draws] seconds in which other processes compute the rewards of a share; zeros if the rank does it.
        training: [draws] seconds of a step of the ranks that train.
        capacity: Iterations that generation may be ahead.
        helping: [shards] whether each rank that generates uses the device of one that trains.
        device_s: Seconds of a step in which training uses such a device.
    """

    rates: Rates
    besides: Seconds
    grading: Seconds
    training: Seconds
    capacity: int
    helping: NDArray[np.bool_]
    device_s: float = 0.0


def step_seconds(pools: Pools) -> float:
    """Seconds of a step in the long run."""
    least = _pace(pools, pools.rates.work, pools.rates.alone)
    if not pools.rates.longest.any() and not pools.helping.any():
        return least
    # The longer a step, the less is in each other's way: what follows from it falls below it at one place.
    most = least
    while _following(pools, most) > most:
        least, most = most, 2 * most
    for _ in range(NUM_ROUNDS):
        middle = (least + most) / 2
        is_short = _following(pools, middle) > middle
        least, most = (middle, most) if is_short else (least, middle)
    return most


def _following(pools: Pools, period: float) -> float:
    """Seconds of a step, if responses and devices are in each other's way as in a step of some seconds."""
    rates = pools.rates
    slower = np.where(pools.helping, 1 / max(LEAST_FREE, 1 - pools.device_s / period), 1.0)
    tokens, longest = slower * rates.work.mean(axis=0), slower * rates.longest
    crowded = np.minimum(longest / np.maximum(LEAST_FREE, 1 - tokens / period), longest + (pools.capacity + 1) * tokens)
    alone = slower * rates.alone
    if rates.longest.any():
        alone = np.maximum(alone, alone - longest - tokens + crowded)
    return _pace(pools, slower * rates.work, alone)


def _pace(pools: Pools, work: Seconds, alone: Seconds) -> float:
    """Seconds of an iteration by the recursion that this module begins with."""
    num_draws, num_ranks = work.shape
    num_iterations = min(MOST_ITERATIONS, REPEATS * num_draws)
    front, graded, done = (np.zeros(num_ranks) for _ in range(3))
    trained: list[float] = []
    for iteration in range(num_iterations):
        draw = iteration % num_draws
        weights = trained[iteration - 1 - pools.capacity] if iteration > pools.capacity else 0.0
        start = np.maximum(front, weights)
        front = start + work[draw] + pools.besides[draw]
        graded = np.maximum(graded, start) + pools.grading[draw]
        done = np.maximum(np.maximum(done, graded), start + alone[draw] + pools.besides[draw])
        trained.append(max(trained[-1] if trained else 0.0, float(done.max())) + float(pools.training[draw]))
    first = min(num_draws, num_iterations // 2)
    return float((trained[-1] - trained[first - 1]) / (num_iterations - first))
