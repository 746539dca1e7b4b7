"""Bytes that this process reads from data files, exchanges with other ranks, and holds in a databuffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from leaderless.data.batch import Jagged
from leaderless.data.buffer.databuffer import Databuffer
from leaderless.data.sources import jsonl, parquet
from leaderless.distributed.one_sided.messages import ADDRESSES
from leaderless.distributed.transport import ProcessGroup, Round


@dataclass
class BytesRead:
    """Bytes of files and of lines; of Parquet, of what is decoded."""

    total: int = 0

    def counted(self, function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.total += size(*args)
            return function(*args)

        return call

    def counted_batches(self, batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(*args: Any) -> Iterator[Any]:
            for batch in batches(*args):
                self.total += batch.nbytes
                yield batch

        return call


@contextmanager
def counting_bytes_read() -> Iterator[BytesRead]:
    """Count what is read from data files until the end of the context."""
    count = BytesRead()
    with ExitStack() as stack:
        for owner, name, function in (
            (jsonl, "_find_lines", count.counted(jsonl._find_lines, lambda _, share: len(share))),
            (jsonl, "parse_line", count.counted(jsonl.parse_line, lambda text, *_: len(text))),
            (parquet.ParquetSource, "_batches", count.counted_batches(parquet.ParquetSource._batches)),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield count


@dataclass
class Traffic:
    """Bytes of payload that this rank has sent to and received from others."""

    sent: int = 0
    received: int = 0


@contextmanager
def counting_traffic() -> Iterator[Traffic]:
    """Count what is exchanged with other ranks until the end of the context."""
    traffic, exchanging = Traffic(), ProcessGroup.exchanging

    def counted(self: ProcessGroup, rounds: Iterable[Round], what: str) -> Iterator[None]:
        def watched() -> Iterator[Round]:
            for sent, received in rounds:
                traffic.sent += sum(len(message) for _, message in sent)
                traffic.received += sum(len(message) for _, message in received)
                yield sent, received

        yield from exchanging(self, rounds if what == ADDRESSES else watched(), what)

    with patch.object(ProcessGroup, "exchanging", counted):
        yield traffic


def held_bytes(buffer: Databuffer) -> int:
    """Bytes of tensors that are held, of rows and of prompts; those that tables share count once."""
    held = [columns for table in buffer._tables.values() for columns in (table.columns, table.prompt_columns)]
    columns = [column for some in held for column in some.values()]
    tensors = [column.values if isinstance(column, Jagged) else column for column in columns]
    return sum({id(tensor): tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)}.values())
