"""Rows of datasets on the hub, through the `datasets` library."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.cache import DataCache
from leaderless.data.rows import Row, RowSource, RowStream, plain_row


class HubSource(RowSource):
    """Rows of a dataset on the hub, in the library's cache on this machine."""

    def __init__(self, config: DatasetConfig) -> None:
        """Find a dataset, and download it where that has not been done.

        Args:
            config: Its name, subset and split, and the columns that rows keep.

        Raises:
            RecipeError: There is none.
        """
        import datasets

        self.name, self._bytes = _name(config), 0
        try:
            dataset = datasets.load_dataset(config.path, config.subset, split=config.split)
        except Exception as error:
            raise _not_there(config, error) from error
        columns = config.wanted_columns()
        self._dataset = dataset if columns is None else dataset.select_columns(_kept(dataset.column_names, columns))

    @override
    def prepare(self, cache: DataCache) -> None:
        """The library knows where rows are."""

    @override
    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def row(self, index: int) -> Row:
        row = plain_row(self._dataset[index], self.describe(index))
        self._bytes += len(json.dumps(row))  # what is mapped into memory is not seen from here
        return row

    @override
    def describe(self, index: int) -> str:
        return f"{self.name} row {index}"

    @override
    def bytes_read(self) -> int:
        return self._bytes

    @override
    def fingerprint(self) -> str:
        known = getattr(self._dataset, "_fingerprint", None)  # of name, version and split: no times, no folders
        if isinstance(known, str):
            return known
        ends = (0, len(self) - 1) if len(self) else ()
        return json.dumps([len(self), *map(self.row, ends)])

    @override
    def version(self) -> str:
        return self.fingerprint()


class HubStream(RowStream):
    """Rows of a dataset on the hub, fetched while they are read."""

    def __init__(self, config: DatasetConfig) -> None:
        """Find a dataset.

        Args:
            config: Its name, subset and split, and the columns that rows keep.

        Raises:
            RecipeError: There is none.
        """
        import datasets

        self.name, self._bytes = _name(config), 0
        self._columns = config.wanted_columns()
        try:
            self._dataset = datasets.load_dataset(config.path, config.subset, split=config.split, streaming=True)
        except Exception as error:
            raise _not_there(config, error) from error

    @override
    def rows(self) -> Iterator[tuple[str, Row]]:
        for index, values in enumerate(self._fetched()):
            place = f"{self.name} row {index}"
            kept = values if self._columns is None else {c: values[c] for c in _kept(values, self._columns)}
            row = plain_row(kept, place)
            self._bytes += len(json.dumps(row))
            yield place, row

    def _fetched(self) -> Iterator[Mapping[str, object]]:
        num_rows = 0
        try:
            for values in self._dataset:
                yield values
                num_rows += 1
        except Exception as error:
            raise RuntimeError(
                f"{self.name} cannot be fetched beyond row {num_rows}: {type(error).__name__}: {error}: see to the "
                "connection; the same command continues from the last checkpoint"
            ) from error

    @override
    def bytes_read(self) -> int:
        return self._bytes

    @override
    def fingerprint(self) -> str:
        return json.dumps([self.name, *islice(self.rows(), 1)])


def _name(config: DatasetConfig) -> str:
    return f"{config.path}/{config.subset or 'default'}/{config.split}"


def _kept(names: Collection[str], wanted: Collection[str]) -> list[str]:
    return [name for name in names if name in wanted]


def _not_there(config: DatasetConfig, error: Exception) -> RecipeError:
    return RecipeError.at(
        "data",
        f"'{config.path}' is no local file or folder, and the hub does not give it: {type(error).__name__}: {error}",
    )
