"""Interface between environments and retrievers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class RetrieverError(RuntimeError):
    """A retriever cannot answer; the message says where it is and what to do."""


@dataclass(frozen=True)
class Page:
    """A document as Search-R1's files and servers have it.

    Attributes:
        contents: Title in the first line, and text in the others.
        id: Name of the document in its corpus; empty if it has none.
    """

    contents: str
    id: str = ""

    @property
    def title(self) -> str:
        """The first line."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """All lines but the first."""
        return self.contents.partition("\n")[2]


@dataclass(frozen=True)
class Hit:
    """A page that was found, and how well it fits: more is better, and only scores of one retriever can be compared."""

    page: Page
    score: float


class Retriever(Protocol):
    """Finds the pages that fit a query. Several threads may ask at the same time."""

    def search(self, query: str, topk: int) -> list[Hit]:
        """The pages that fit best, the best first.

        Args:
            query: Text of the search.
            topk: Most pages to return, at least 1.

        Raises:
            RetrieverError: The retriever does not answer.
        """
