"""Training data of which only what comes next is known: streams of rows, and requests of clients.

Streams are shuffled within windows of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.data import DataConfig, TrainingSetConfig
from leaderless.data.dataset import Feed, Prompt, TrainingSet, generator
from leaderless.data.prompts.encode import Encoded, RowEncoder, all_overlong, fits
from leaderless.data.sources.row_sources import Row, RowStream

UNSHUFFLED_WINDOW = 64
"""Rows that are held when their order stays as it is."""


StreamRow = tuple[str, Row, Encoded | None]
"""Place and values of a row that may be used, and its token ids if they were needed to know that."""


class StreamedDataset(TrainingSet):
    """A stream of rows, and their encoder.

    The number of rows is unknown until the stream has ended once. So each rank reads the whole stream, and tokenizes
    every row that could be overlong, to know the place of each row.
    """

    def __init__(self, stream: RowStream, encoder: RowEncoder, config: TrainingSetConfig, data: DataConfig) -> None:
        """Take a stream; it must have a row, and the first row must have the columns."""
        self.stream, self.encoder, self.config, self.data = stream, encoder, config, data
        first = next(iter(stream.rows()), None)
        if first is None:
            raise RecipeError.at(f"{encoder.key}.path", f"{config.path} has no rows")
        place, row = first
        encoder.encode(row, place)

    def usable_rows(self) -> Iterator[StreamRow]:
        """The rows that may be used, from the first."""
        for place, row in islice(self.stream.rows(), self.config.limit):
            if self.data.overlong == "error":
                yield place, row, None
                continue
            encoded = self.encoder.encode(row, place)
            if fits(encoded, place, self.data, self.encoder.key):
                yield place, row, encoded

    @override
    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        return StreamFeed(self, seed, number, shuffle=shuffle)

    @override
    def summary(self, path: str) -> str:
        return f"a stream of {path}"


class StreamFeed(Feed):
    """Reads a stream, epoch after epoch, window by window; rows may be shuffled within windows.

    The order within a window follows from the seed, the epoch and the number of the window. So any place can be found
    again by reading the stream from the beginning of its epoch, and nothing but the place has to be remembered.
    """

    def __init__(self, dataset: StreamedDataset, seed: int, number: int, *, shuffle: bool) -> None:
        self.dataset, self.seed, self.number, self.shuffle = dataset, seed, number, shuffle
        self.window_size = dataset.config.shuffle_buffer if shuffle else UNSHUFFLED_WINDOW
        self._length: int | None = None
        self._epoch, self._window_number = -1, -1
        self._window: list[StreamRow] = []

    @override
    def take(self, places: Sequence[int]) -> list[Prompt]:
        return [self._prompt(*self._find(place)) for place in places]

    @override
    def epoch(self, num_rows: int) -> float:
        if num_rows:
            self._find(num_rows - 1)
        return num_rows / self._length if self._length else 0.0  # not known before the stream has ended once

    def _find(self, place: int) -> StreamRow:
        """Read on until a place is in the window."""
        while True:
            epoch, index = divmod(place, self._length) if self._length else (0, place)
            number, inside = divmod(index, self.window_size)
            if epoch != self._epoch or number < self._window_number:
                self._windows = self._read(epoch)
                self._epoch, self._window_number, self._window = epoch, -1, []
            if number == self._window_number and inside < len(self._window):
                return self._window[inside]
            self._window = next(self._windows)
            self._window_number += 1

    def _read(self, epoch: int) -> Iterator[list[StreamRow]]:
        """The windows of an epoch, the last of which is not full and may be empty."""
        rows = self.dataset.usable_rows()
        for number in count():
            window = list(islice(rows, self.window_size))
            if len(window) < self.window_size:
                self._end(number * self.window_size + len(window))
            if self.shuffle:
                order = generator(self.seed, epoch, self.number, number + 1).permutation(len(window))
                window = [window[index] for index in order.tolist()]
            yield window

    def _end(self, length: int) -> None:
        """Remember how many rows there are."""
        if not length:
            raise all_overlong("all rows", self.dataset.config, self.dataset.data)
        if self._length not in {None, length}:
            raise RuntimeError(
                f"{self.dataset.config.path} has {length} usable rows now, and had {self._length} in the epoch before: "
                "data must stay as they are while a run reads them"
            )
        self._length = length

    def _prompt(self, place: str, row: Row, encoded: Encoded | None) -> Prompt:
        if encoded is None:
            encoded = self.dataset.encoder.encode(row, place)
            fits(encoded, place, self.dataset.data, self.dataset.encoder.key)  # refuses what is overlong
        return Prompt(row, encoded)


class RequestSet(TrainingSet, Feed):
    """Tasks without content, as many as are wanted, which stand for groups of requests that clients bring."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder

    @override
    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        return self

    @override
    def take(self, places: Sequence[int]) -> list[Prompt]:
        return [Prompt({}, self.encoder.encode({}, f"request group {place}")) for place in places]

    @override
    def epoch(self, num_rows: int) -> float:
        return 0.0  # there is no end of them

    @override
    def summary(self, path: str) -> str:
        return "requests of clients"
