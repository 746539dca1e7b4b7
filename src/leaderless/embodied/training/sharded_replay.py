"""Transitions of all ranks as one list, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from leaderless.distributed.transport import ProcessGroup
from leaderless.embodied.data.replay_buffer import RECORDS_FILE, ReplayBuffer, Transitions
from leaderless.embodied.simulators.protocol import Spaces

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """The transitions of a batch that this rank computes.

    Attributes:
        transitions: These, [n, ...].
        slots: [n] int64, their places in the batch.
    """

    transitions: Transitions
    slots: Numbers


class TransitionMemory:
    """Transitions of the ranks of a run, each in its own files below one folder.

    Transitions are numbered by step, episode and decision, so that their numbers do not depend on which rank holds
    them, and neither does what is drawn. Where a run continues with another number of ranks, each takes over files of
    those that are gone.

    Attributes:
        num_new: Number of transitions of the step that was remembered last, of all ranks.
    """

    def __init__(self, folder: Path, spaces: Spaces, chunk: int, ranks: ProcessGroup, shown: Transitions) -> None:
        """Open the files of this rank, in a folder that all ranks see. All ranks call it together.

        They all have the transitions of experts, `shown`.
        """
        self._ranks, self._place = ranks, ranks.ranks.index(ranks.rank)
        size = ranks.size
        found = {int(path.parent.name) for path in folder.glob(f"*/{RECORDS_FILE}") if path.parent.name.isdecimal()}
        mine = [*sorted(number for number in found if number >= size and number % size == self._place), self._place]
        # Rows are counted over all of them, so the one that grows is the last.
        self._files = [ReplayBuffer(folder / str(number), spaces, chunk) for number in mine]
        self._shown = shown
        self._table = np.zeros((0, 5), np.int64)  # step, episode, holder, row, whether a person acted
        self._helped = self._table  # rows in which a person acted
        self.num_new = 0

    def __len__(self) -> int:
        """Number of transitions of all ranks, as of the last `remember`."""
        return len(self._table)

    @property
    def num_demonstrations(self) -> int:
        """Number of transitions of experts, and of those in which a person acted."""
        return len(self._shown) + len(self._helped)

    def remember(self, step: int, episodes: Numbers, transitions: Transitions) -> None:
        """Keep transitions of a step; what there is of this step and of later ones is dropped. All ranks call it.

        `episodes` has the number of the episode of each, int64 [n]; transitions of an episode follow one another.
        """
        for file in self._files:
            file.cut(step)
        self._files[-1].append(transitions, step, episodes)
        self._files[-1].sync()
        known = self._table[self._table[:, 0] < step]
        # Where nothing is known yet, files may have what an earlier process has kept.
        self._table = np.concatenate([known, self._gathered(step if len(known) else 0)])
        self._helped = self._table[self._table[:, 4] > 0]
        self.num_new = int((self._table[:, 0] == step).sum())

    def _gathered(self, since: int) -> Numbers:
        """The rows of the table for transitions of all ranks, from a step."""
        rows = [np.zeros((0, 5), np.int64)]
        before = 0
        for file in self._files:
            first = file.first_of(since)
            step, episode, helped = file.places(first)
            row = np.arange(first, len(file)) + before
            holder = np.full(len(row), self._place)
            rows.append(np.stack([step, episode, holder, row, helped], axis=1))
            before += len(file)
        whole = torch.cat(self._ranks.gather(torch.from_numpy(np.concatenate(rows)), "places of transitions")).numpy()
        # Rows of an episode are on one rank, in the order in which they were lived through.
        order = np.lexsort((whole[:, 3], whole[:, 1], whole[:, 0]))
        return np.ascontiguousarray(whole[order])

    def draw(self, size: int, seed: int, update: int) -> Drawn:
        """This rank's part of transitions that are drawn with replacement, the same for the same numbers.

        Half of them are demonstrations, if there are any, those last.
        """
        # As many words as the learner's own streams have, which count from 1: a missing one would be taken for 0.
        chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 0, update])))
        half = size // 2 if self.num_demonstrations else 0
        lived = self._table[chance.integers(len(self._table), size=size - half)]
        slots, rows = self._own(lived)
        parts, places = [self._take(rows)], [slots]
        if half:
            drawn = chance.integers(self.num_demonstrations, size=half)
            is_shown = drawn < len(self._shown)
            where = np.flatnonzero(is_shown & (np.arange(half) % self._ranks.size == self._place))
            from_people = np.flatnonzero(~is_shown)
            slots, rows = self._own(self._helped[drawn[from_people] - len(self._shown)])
            parts += [self._shown.take(drawn[where]), self._take(rows)]
            places += [where + size - half, from_people[slots] + size - half]
        return Drawn(joined(parts), np.concatenate(places))

    def _own(self, table: Numbers) -> tuple[Numbers, Numbers]:
        """Places in a list of rows of the table that this rank holds, and its rows."""
        mine = np.flatnonzero(table[:, 2] == self._place)
        return mine, table[mine, 3]

    def _take(self, rows: Numbers) -> Transitions:
        """Transitions of this rank's files, one after the other."""
        if len(self._files) == 1:
            return self._files[0].take(rows)
        ends = np.cumsum([len(file) for file in self._files])
        number = np.searchsorted(ends, rows, side="right")
        parts = [file.take(rows[number == n] - (ends[n] - len(file))) for n, file in enumerate(self._files)]
        order = np.argsort(np.argsort(number, kind="stable"), kind="stable")
        return joined(parts).take(order)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def joined(parts: Sequence[Transitions]) -> Transitions:
    """Transitions one after the other."""

    def of(name: str) -> object:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return {camera: np.concatenate([value[camera] for value in values]) for camera in values[0]}

    return Transitions(**{one.name: of(one.name) for one in fields(Transitions)})  # type: ignore[arg-type]
