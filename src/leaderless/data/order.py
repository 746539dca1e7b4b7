"""The order in which a run takes rows: seeded, and the same on any number of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
Float = NDArray[np.float64]


def generator(seed: int, *keys: int) -> np.random.Generator:
    """Random numbers that follow from a seed and from what they are for.

    Args:
        seed: Of the order of a dataset.
        keys: Such as the epoch.
    """
    return np.random.Generator(np.random.PCG64([seed, *keys]))


class RowOrder:
    """An endless stream of rows, epoch after epoch, each in an order of its own."""

    def __init__(self, rows: Int, seed: int, dataset: int = 0, levels: Float | None = None, *, shuffle: bool) -> None:
        """Take the rows that may be used.

        Args:
            rows: [n] their numbers in the dataset, ascending.
            seed: Of the order.
            dataset: Tells the datasets of a mixture from each other.
            levels: [n] what rows are sorted by, small ones first; equal ones keep the order that they have without.
            shuffle: Draw a new order every epoch; else rows come as they are in the dataset.
        """
        self.rows, self.seed, self.dataset, self.levels, self.shuffle = rows, seed, dataset, levels, shuffle
        self._epoch = -1
        self._ordered = rows

    def row_at(self, place: int) -> int:
        """The row at a place in the stream.

        Args:
            place: From 0.
        """
        epoch, index = divmod(place, len(self.rows))
        if epoch != self._epoch and (self.shuffle or self._epoch < 0):
            self._ordered = self._order(epoch)
        self._epoch = epoch
        return int(self._ordered[index])

    def _order(self, epoch: int) -> Int:
        count = len(self.rows)
        order = np.arange(count)
        if self.shuffle:
            order = generator(self.seed, epoch, self.dataset).permutation(count)
        if self.levels is not None:
            order = order[np.argsort(self.levels[order], kind="stable")]
        return self.rows[order]
