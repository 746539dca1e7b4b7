"""The hub: whether it answers, and rows of its datasets through the `datasets` library."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.row_sources import Row, RowSource, RowStream, plain_row

PROBE_TIMEOUT_S = 5.0
"""Longest wait for the hub's first answer."""


def unreachable_hub(name: str) -> str:
    """Check once, with a short time limit, that the hub responds, before looking for anything except a local path.

    The libraries would retry for a minute or more; if there is no answer, they use only earlier downloads.

    Returns:
        Empty text, or why the hub cannot be used and what to do, to be added to the error when `name` is not found.
    """
    return "" if Path(name).exists() else _unreachable()


def explained(error: Exception, unreachable: str) -> str:
    """The text of an error and what `unreachable_hub` says, as one sentence."""
    return f"{str(error).rstrip('. ')}{unreachable}" if unreachable else str(error)


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
        # The libraries use only earlier downloads, in child processes too.
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has copied the setting
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        return f"; the hub {constants.ENDPOINT} does not answer ({reason}): {remedy}"
    return ""


class HubRows:
    """Base of the readers of a dataset on the hub."""

    def __init__(self, config: DatasetConfig, **options: bool) -> None:
        """Find a dataset; the options are passed to `datasets.load_dataset`."""
        unreachable = unreachable_hub(config.path)
        import datasets

        self.name = f"{config.path}/{config.subset or 'default'}/{config.split}"
        self.columns = config.wanted_columns()
        try:
            self._dataset = datasets.load_dataset(config.path, config.subset, split=config.split, **options)
        except Exception as error:
            raise RecipeError.at(
                "data",
                f"'{config.path}' is no local file or folder, and the hub does not give it: {type(error).__name__}: "
                f"{explained(error, unreachable)}",
            ) from error

    def plain(self, values: Mapping[str, object], place: str) -> Row:
        """A row with the columns that are kept."""
        return plain_row({c: v for c, v in values.items() if self.columns is None or c in self.columns}, place)


class HubSource(HubRows, RowSource):
    """Rows of a dataset on the hub, in the library's cache on this machine."""

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        if self.columns is not None:  # other columns are not even decoded
            kept = [name for name in self._dataset.column_names if name in self.columns]
            self._dataset = self._dataset.select_columns(kept)

    @override
    def prepare(self, cache: DataCache) -> None:
        """Nothing to do: the library knows where rows are."""

    @override
    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def row(self, index: int) -> Row:
        return self.plain(self._dataset[index], self.describe(index))

    @override
    def describe(self, index: int) -> str:
        return f"{self.name} row {index}"

    @override
    def fingerprint(self) -> str:
        known = getattr(self._dataset, "_fingerprint", None)  # of name, version and split: no times, no folders
        if isinstance(known, str):
            return known
        ends = (0, len(self) - 1) if len(self) else ()
        return json.dumps([len(self), *map(self.row, ends)])


class HubStream(HubRows, RowStream):
    """Rows of a dataset on the hub, fetched while they are read."""

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config, streaming=True)

    @override
    def rows(self) -> Iterator[tuple[str, Row]]:
        for index, values in enumerate(self._fetched()):
            place = f"{self.name} row {index}"
            yield place, self.plain(values, place)

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
    def fingerprint(self) -> str:
        return json.dumps([self.name, *islice(self.rows(), 1)])
