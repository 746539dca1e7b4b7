"""The hub: whether it answers, and rows of its datasets through the `datasets` library.

Without a connection the libraries try again and again, file by file, for a minute and more. So the hub is asked once,
with a short time limit, and when it does not answer they look only at what has been downloaded before.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.cache import DataCache
from leaderless.data.rows import Row, RowSource, RowStream, plain_row

PROBE_TIMEOUT_S = 5.0
"""Longest wait for the hub's first answer."""


def unreachable_hub(name: str) -> str:
    """Ask the hub whether it is there, before a model or dataset is looked for on it.

    Args:
        name: Name of the model or dataset, or a local path, for which nothing is asked.

    Returns:
        Empty text, or why the hub cannot be used and what to do, to be added to the error when `name` is not found.
    """
    return "" if Path(name).exists() else _unreachable()


@cache
def _unreachable() -> str:
    remedy = "connect, or download it where there is a connection and name the folder or file"
    if constants.HF_HUB_OFFLINE:
        return f"; the environment variable HF_HUB_OFFLINE forbids to ask the hub: unset it, {remedy}"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PROBE_TIMEOUT_S).close()  # noqa: S310
    except HTTPError:  # an answer too
        return ""
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):  # the libraries may know other certificates
            return ""
        _go_offline()
        return f"; the hub {constants.ENDPOINT} does not answer ({reason}): {remedy}"
    return ""


def _go_offline() -> None:
    """Have the libraries look only at what has been downloaded before, in child processes too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it has copied the setting
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


class HubSource(RowSource):
    """Rows of a dataset on the hub, in the library's cache on this machine."""

    def __init__(self, config: DatasetConfig) -> None:
        """Find a dataset, and download it where that has not been done.

        Args:
            config: Its name, subset and split, and the columns that rows keep.

        Raises:
            RecipeError: There is none.
        """
        unreachable = unreachable_hub(config.path)
        import datasets

        self.name, self._bytes = _name(config), 0
        try:
            dataset = datasets.load_dataset(config.path, config.subset, split=config.split)
        except Exception as error:
            raise _not_there(config, error, unreachable) from error
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
        unreachable = unreachable_hub(config.path)
        import datasets

        self.name, self._bytes = _name(config), 0
        self._columns = config.wanted_columns()
        try:
            self._dataset = datasets.load_dataset(config.path, config.subset, split=config.split, streaming=True)
        except Exception as error:
            raise _not_there(config, error, unreachable) from error

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
                f"{self.name} cannot be fetched beyond row {num_rows}: {type(error).__name__}: {error}: check "
                "the connection; the same command continues from the last checkpoint"
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


def _not_there(config: DatasetConfig, error: Exception, unreachable: str) -> RecipeError:
    return RecipeError.at(
        "data",
        f"'{config.path}' is no local file or folder, and the hub does not give it: {type(error).__name__}: "
        f"{error}{unreachable}",
    )
