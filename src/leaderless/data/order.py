"""The order in which a run takes rows: seeded, and the same on any number of ranks; and the turns of a mixture."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.assign.balance import Int

Float = NDArray[np.float64]


def generator(seed: int, *keys: int) -> np.random.Generator:
    """Random numbers that follow from the seed of the run and from keys, such as the epoch."""
    return np.random.Generator(np.random.PCG64([seed, *keys]))


class RowOrder:
    """An endless sequence of rows, epoch after epoch, each in a different order."""

    def __init__(self, rows: Int, seed: int, dataset: int = 0, levels: Float | None = None, *, shuffle: bool) -> None:
        """Take the numbers [n] of the rows that may be used, ascending; `dataset` is its number in a mixture.

        Rows are sorted by their levels [n], small ones first, where there are any; equal ones keep their order. Without
        shuffling they come as they are in the dataset.
        """
        self.rows, self.seed, self.dataset, self.levels, self.shuffle = rows, seed, dataset, levels, shuffle
        self._epoch = -1
        self._ordered = rows

    def row_at(self, place: int) -> int:
        """The row at a place in the sequence, from 0."""
        epoch, index = divmod(place, len(self.rows))
        if epoch != self._epoch and (self.shuffle or self._epoch < 0):
            count = len(self.rows)
            order = generator(self.seed, epoch, self.dataset).permutation(count) if self.shuffle else np.arange(count)
            if self.levels is not None:
                order = order[np.argsort(self.levels[order], kind="stable")]
            self._ordered = self.rows[order]
        self._epoch = epoch
        return int(self._ordered[index])


class Interleaving:
    """An endless sequence of turns, true to the weights from its beginning to any point within less than one turn.

    Turns are given by earliest deadline, as to periodic tasks that fill one processor: the turn number `k` of a dataset
    of weight `w` lies between `floor(k / w)` and `ceil((k + 1) / w)` (Baruah, Cohen, Plaxton and Varvel, 1996,
    Proportionate progress, section 2). The seed decides between equal deadlines. Weights are taken as the decimal
    fractions that they were written as, so that the sequence repeats itself when all shares are whole numbers.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Take the weight of each dataset, above 0, and the seed of the order between equals; only ratios count."""
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        self._shares = [share // gcd(*whole) for share in whole]
        self._period = sum(self._shares)
        self._rank = generator(seed, 0).permutation(len(weights)).tolist()
        self._turns, self._places = array("H"), array("q")
        self._taken = [0] * len(weights)
        self._release = [0] * len(weights)
        self._deadline = [self._last_turn(dataset) for dataset in range(len(weights))]

    def at(self, position: int) -> tuple[int, int]:
        """The dataset whose turn it is at a position from 0, and the number of its turns before: its place."""
        cycle, offset = divmod(position, self._period)
        self._extend(offset + 1)
        dataset = self._turns[offset]
        return dataset, cycle * self._shares[dataset] + self._places[offset]

    def counts(self, position: int) -> list[int]:
        """How many turns each dataset has had before a position."""
        cycle, offset = divmod(position, self._period)
        self._extend(offset)
        turns = np.array(self._turns[:offset], dtype=np.int64)
        begun = np.bincount(turns, minlength=len(self._shares)).tolist()
        return [cycle * share + count for share, count in zip(self._shares, begun, strict=True)]

    def _last_turn(self, dataset: int) -> int:
        return -(-(self._taken[dataset] + 1) * self._period // self._shares[dataset])

    def _extend(self, length: int) -> None:
        """Extend the sequence of turns to a length."""
        for turn in range(len(self._turns), length):
            ready = (dataset for dataset, release in enumerate(self._release) if release <= turn)
            chosen = min(ready, key=lambda dataset: (self._deadline[dataset], self._rank[dataset]))
            self._turns.append(chosen)
            self._places.append(self._taken[chosen])
            self._taken[chosen] += 1
            self._release[chosen] = self._taken[chosen] * self._period // self._shares[chosen]
            self._deadline[chosen] = self._last_turn(chosen)
