"""A retriever in this process: BM25 over the pages of a file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.config import RecipeError
from leaderless.config.packaged_files import how_to_install
from leaderless.environments.search.retriever import Hit, Page

WORD = r"(?u)\b\w+\b"
"""Pattern of a word; unlike in the library's own pattern, it may be one letter."""
KEPT_INDEXES = 4
"""Files whose indexes a process keeps."""


class Bm25Retriever:
    """Finds pages by the words of a query, with the `bm25s` library. Equal scores keep the order of the pages."""

    def __init__(self, pages: Sequence[Page]) -> None:
        """Index pages; a RecipeError if there are none, or the library is missing."""
        if not pages:
            raise RecipeError.at("", "there are no pages to search: give at least one")
        if find_spec("bm25s") is None:
            remedy = f"{how_to_install('search')}, or name a server's address"
            raise RecipeError.at("", f"searching pages needs the package bm25s: {remedy}")
        import bm25s

        self._pages, self._index = pages, bm25s.BM25()
        self._index.index(_words([page.contents for page in pages]), show_progress=False)

    def __len__(self) -> int:
        """Number of pages."""
        return len(self._pages)

    def search(self, query: str, topk: int) -> list[Hit]:
        """Find pages by BM25; pages without a word of the query are not found."""
        words = _words([query])[0]
        if not words:
            return []
        scores: NDArray[np.float32] = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:topk]
        return [Hit(self._pages[place], float(scores[place])) for place in best.tolist() if scores[place] > 0]


def open_pages(path: str) -> Bm25Retriever:
    """The retriever of a file of pages; a process indexes each file once, and again when it has changed.

    Raises:
        RecipeError: The file cannot be read, or a line of it is no page.
    """
    try:
        changed_ns = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise RecipeError.at("", f"the pages '{path}' cannot be read: {error.strerror}; name a .jsonl file") from error
    return _open(path, changed_ns)


@lru_cache(maxsize=KEPT_INDEXES)
def _open(path: str, changed_ns: int) -> Bm25Retriever:  # noqa: ARG001 - part of the key
    return Bm25Retriever(read_pages(Path(path)))


def read_pages(path: Path) -> list[Page]:
    """The pages of a file in Search-R1's format: JSON lines with `contents`, and `id` if they like.

    Raises:
        RecipeError: The file cannot be read, or a line of it is no page.
    """
    pages: list[Page] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    pages.append(_page(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError.at("", f"the pages '{path}' cannot be read: {error}; name a .jsonl file") from error
    return pages


def _page(line: str, place: str) -> Page:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RecipeError.at("", f"{place} is not JSON: {error}") from error
    contents = value.get("contents") if isinstance(value, dict) else None
    if not isinstance(contents, str):
        raise RecipeError.at("", f"{place} is no page: it must be an object whose 'contents' is text, the title first")
    return Page(contents, str(value.get("id", "")))


def _words(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    words: list[list[str]] = bm25s.tokenize(list(texts), token_pattern=WORD, return_ids=False, show_progress=False)
    return words
