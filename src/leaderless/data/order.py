"""The order in which a run takes rows: seeded, and the same on any number of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


class RowOrder:
    """An endless stream of rows, epoch after epoch, each in a random order of its own."""

    def __init__(self, rows: Int, seed: int, *, shuffle: bool) -> None:
        """Take the rows that may be used.

        Args:
            rows: [n] their numbers in the dataset, ascending.
            seed: Of the order.
            shuffle: Draw a new order every epoch; else rows come as they are in the dataset.
        """
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._epoch = -1
        self._permuted = rows

    def row_at(self, position: int) -> int:
        """The row at a place in the stream.

        Args:
            position: From 0; the prompt that is taken there has this number as its group id.
        """
        epoch, index = divmod(position, len(self.rows))
        if self.shuffle and epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._permuted, self._epoch = generator.permutation(self.rows), epoch
        return int(self._permuted[index])
