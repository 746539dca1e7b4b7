"""A server that finds pages, in the wire format of Search-R1."""

from __future__ import annotations

import asyncio
import json

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from leaderless.base.values import Json
from leaderless.environments.search.retriever import Retriever, answer_of
from leaderless.serving.http_server import ApiError, Guard, health, read_body

DEFAULT_TOPK = 3
"""Pages for each query if a request does not say how many."""
MAX_BODY_BYTES = 1 << 22
"""Largest size of a request."""


def make_retriever_app(retriever: Retriever) -> Starlette:
    """Make the web application of a retriever; programs on this machine are answered."""

    async def retrieve(request: Request) -> Response:
        try:
            queries, topk, with_scores = _question(await read_body(request, MAX_BODY_BYTES))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        found = await asyncio.to_thread(lambda: [retriever.search(query, topk) for query in queries])
        return JSONResponse(answer_of(found, with_scores=with_scores))

    routes = [Route("/health", health), Route("/retrieve", retrieve, methods=["POST"])]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=None)],
        exception_handlers={HTTPException: _refuse, ApiError: _refuse},
    )


def _question(body: bytes) -> tuple[list[str], int, bool]:
    """Queries, most pages for each, and whether scores are wanted; a ValueError if a request is malformed."""
    question: Json = json.loads(body)
    if not isinstance(question, dict):
        raise ValueError("the request must be an object with 'queries'")
    queries, topk = question.get("queries"), question.get("topk")
    texts = [query for query in queries if isinstance(query, str)] if isinstance(queries, list) else []
    if not isinstance(queries, list) or len(texts) < len(queries):
        raise ValueError("'queries' must be a list of texts")
    if topk is None:
        topk = DEFAULT_TOPK
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ValueError(f"topk={topk!r} must be a whole number of at least 1")
    return texts, topk, question.get("return_scores") is True


async def _refuse(request: Request, error: Exception) -> Response:
    status, said = (error.status, error.message) if isinstance(error, ApiError) else (500, str(error))
    if isinstance(error, HTTPException):
        status, said = error.status_code, error.detail
    return JSONResponse({"detail": f"{request.method} {request.url.path}: {said}"}, status)
