r"""Retrievers, which find pages: by BM25 in this process, or on a server in the wire format of Search-R1. No torch.

The request is `{"queries": [text, ...], "topk": 3, "return_scores": true}`, and the response
`{"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, ...], ...]}`, with a list for each query.
Source: arXiv 2503.09516, `search_r1/search/retrieval_server.py`. Many projects have servers and clients for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
from numpy.typing import NDArray

from leaderless.base.errors import without_credentials
from leaderless.base.values import Json, is_finite_number
from leaderless.config import RecipeError
from leaderless.config.packaged_files import how_to_install


class RetrieverError(RuntimeError):
    """A retriever cannot answer; the message says where it is and what to do."""


class UnreachableRetrieverError(RetrieverError, ConnectionError):
    """The server of a retriever gives no answer, or not in time."""


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


MAX_ANSWER_BYTES = 1 << 24
"""Largest answer that is read."""


class RemoteRetriever:
    """Asks a server, such as `leaderless retriever` or Search-R1's; proxies are not used."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        """Ask nothing yet.

        Args:
            address: Address to post to, such as `http://127.0.0.1:8000/retrieve`.
            timeout_s: Seconds without a sign of the server after which it counts as not answering.

        Raises:
            RecipeError: The address is none of a web server.
        """
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise RecipeError.at("", f"address='{address}' must be like http://127.0.0.1:8000/retrieve")
        self._address, self._timeout_s = address, timeout_s
        self._opener = build_opener(ProxyHandler({}))

    def search(self, query: str, topk: int) -> list[Hit]:
        """Ask the server for the best pages."""
        asked: Json = {"queries": [query], "topk": topk, "return_scores": True}
        try:
            found = hits_in(json.loads(self._post(json.dumps(asked).encode())), num_queries=1)[0]
        except ValueError as error:
            raise self._error(f"its answer is not in the format of Search-R1: {error}") from error
        return found[:topk]

    def _post(self, body: bytes) -> bytes:
        request = Request(self._address, body, {"content-type": "application/json"})  # noqa: S310 - http, see above
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer: bytes = response.read(MAX_ANSWER_BYTES + 1)
        except HTTPError as error:
            with error:
                text = error.read(300).decode(errors="replace")
            raise self._error(f"it answered with status {error.code}: {text}") from error
        except (OSError, HTTPException) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                problem = f"no answer within {self._timeout_s:g} s; raise timeout_s, or look at its load"
            elif isinstance(error, URLError):
                problem = f"{error.reason}; is it running, and is the address right?"
            else:
                problem = f"the connection broke: {error!r}; see its log"
            raise UnreachableRetrieverError(str(self._error(problem))) from error
        if len(answer) > MAX_ANSWER_BYTES:
            raise self._error(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes; ask for fewer pages")
        return answer

    def _error(self, what: str) -> RetrieverError:
        return RetrieverError(without_credentials(f"the retriever at {self._address}: {what}"))


def hits_in(answer: Json, num_queries: int) -> list[list[Hit]]:
    """Hits for each query.

    Raises:
        ValueError: The answer is not in the format.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != num_queries:
        raise ValueError(f"'result' must be a list with one entry for each of {num_queries} queries")
    if not all(isinstance(found, list) for found in result):
        raise ValueError("each entry of 'result' must be a list of documents")
    return [[_hit(one) for one in found] for found in result if isinstance(found, list)]


def _hit(one: Json) -> Hit:
    document, score = (one.get("document"), one.get("score")) if isinstance(one, dict) else (None, None)
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str) or not isinstance(document, dict):
        raise ValueError("a document must be like {'document': {'contents': 'title\\ntext'}, 'score': 1.5}")
    if not is_finite_number(score):
        raise ValueError(f"score={score!r} must be a finite number")
    return Hit(Page(contents, str(document.get("id", ""))), float(score))


def answer_of(found: Sequence[Sequence[Hit]], *, with_scores: bool) -> Json:
    """The server's answer; without scores, the documents alone."""
    result: list[Json] = []
    for hits in found:
        documents: list[Json] = [{"id": hit.page.id, "contents": hit.page.contents} for hit in hits]
        scored: list[Json] = [{"document": one, "score": hit.score} for one, hit in zip(documents, hits, strict=True)]
        result.append(scored if with_scores else documents)
    return {"result": result}


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
