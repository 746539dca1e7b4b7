r"""Retrievers, which find pages, and one on a server in the wire format of Search-R1. Imports no torch.

The request is `{"queries": [text, ...], "topk": 3, "return_scores": true}`, and the response
`{"result": [[{"document": {"contents": "title\ntext"}, "score": 1.5}, ...], ...]}`, with a list for each query.
Source: arXiv 2503.09516, `search_r1/search/retrieval_server.py`. Many projects have servers and clients for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from leaderless.base.errors import without_credentials
from leaderless.base.values import Json, is_finite_number
from leaderless.config import RecipeError


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
            raise self._error(problem) from error
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
