"""The server of the live page: its addresses, and how it stops."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from hashlib import blake2b
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from typing_extensions import override

from leaderless.observability.report.page import asset, plotly
from leaderless.serving.http_server import EventStream, WebServer, is_this_machine
from leaderless.serving.live_page.pages import MAX_RUNS, RunReader, RunStore, UnknownRunError

LEAVING_S = 2
"""Longest time that browsers have to read their last answers when the server stops."""
MAX_COLUMNS = 20
"""Number of columns that a reader may add to the list of runs."""
TICK_S = 1.0
"""Time between two looks for what is new on a page."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts come from this server alone, whatever the texts of runs hold."""
SCRIPTS = ("boot.js", "charts.js", "samples.js", "live.js", "index.js", "plotly.js")
_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "content-security-policy": POLICY}

Answer = Callable[[Request], Awaitable[Response]]


class SeveralRunsError(Exception):
    """An address that is about one run names several."""


class LivePages:
    """Answers requests for pages, for what is new on them, and to stop a run."""

    def __init__(self, desk: RunStore, token: str | None, is_closing: asyncio.Event) -> None:
        """Serve the pages of a store; for the arguments see `make_app`."""
        self._desk, self._token, self._is_closing = desk, token, is_closing
        self._cookie = cookie_name(token or "")
        self._scripts = {name: plotly() if name == "plotly.js" else asset(name) for name in SCRIPTS}

    async def index(self, request: Request) -> Response:
        """The page that lists all runs."""
        return HTMLResponse(await run_in_threadpool(self._desk.index_page, _columns(request)))

    async def run(self, request: Request) -> Response:
        """The page about one run."""
        return HTMLResponse(await run_in_threadpool(self._desk.run_page, request.path_params["key"]))

    async def compare(self, request: Request) -> Response:
        """The page that lays runs over one another."""
        keys = _keys(request)
        if not 1 <= len(keys) <= MAX_RUNS:
            return _error(400, f"{len(keys)} runs are chosen: choose 1 to {MAX_RUNS}")
        return HTMLResponse(await run_in_threadpool(self._desk.compare_page, keys))

    async def samples(self, request: Request) -> Response:
        """The samples of a run."""
        return Response(await run_in_threadpool(self._desk.samples, _key(request)), media_type="application/json")

    async def stream(self, request: Request) -> Response:
        """News, as server-sent events: on a page about runs, or in the list of all."""
        keys = _keys(request)
        if len(keys) > MAX_RUNS:
            return _error(400, f"{len(keys)} runs are chosen: choose at most {MAX_RUNS}")
        for key in keys:
            await run_in_threadpool(self._desk.path, key)  # an unknown run is an answer, not an event
        return EventStream(
            self._news(keys, request.query_params.get("at", "")) if keys else self._lists(_columns(request))
        )

    async def stop(self, request: Request) -> Response:
        """Ask a run to stop."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "content-type must be application/json")  # no other page can send it
        key = _key(request)
        try:
            is_asked = await run_in_threadpool(self._desk.ask_to_stop, key)
        except OSError as error:
            remedy = "use `leaderless stop` as a user who may write there"
            return _error(403, f"the folder of run '{key}' cannot be written to ({error.strerror}): {remedy}")
        if not is_asked:
            return _error(409, f"run '{key}' is not under way")
        return JSONResponse({"is_asked": True})

    async def asset(self, request: Request) -> Response:
        """A script."""
        name = request.path_params["name"]
        if name not in self._scripts:
            return _error(404, f"there is no file '{name}'")
        script = self._scripts[name]
        tag = f'"{zlib.crc32(script.encode())}"'
        headers = {"cache-control": "no-cache", "etag": tag}  # a browser asks whether its copy is still right
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(script, media_type="text/javascript", headers=headers)

    async def _news(self, keys: list[str], at: str) -> AsyncIterator[bytes]:
        reader = RunReader(self._desk, keys, at)
        while True:
            try:
                news = await run_in_threadpool(reader.news)
            except UnknownRunError:
                news = {"reload": True}  # its folder is gone
            yield _event(news) if news else b": nothing new\n\n"
            if "reload" in news or await self._closes_within(TICK_S):
                return

    async def _lists(self, columns: list[str]) -> AsyncIterator[bytes]:
        before = None
        while True:
            now = await run_in_threadpool(self._desk.list, columns)
            yield _event(now) if now != before else b": nothing new\n\n"
            before = now
            if await self._closes_within(2 * TICK_S):
                return

    async def _closes_within(self, seconds: float) -> bool:
        """Wait, but not for longer than the server goes on; returns whether it stops."""
        try:
            await asyncio.wait_for(self._is_closing.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def guarded(self, answer: Answer) -> Answer:
        """An answer for those who may see the runs, with headers that keep a page to itself."""

        async def guarded(request: Request) -> Response:
            try:
                response = self._objection(request) or await answer(request)
            except UnknownRunError as error:
                response = _error(404, f"there is no run '{error}': see the list of all runs")
            except SeveralRunsError as error:
                response = _error(400, f"{error} runs are named: name one")
            response.headers.update(_HEADERS)
            return response

        return guarded

    def _objection(self, request: Request) -> Response | None:
        """The response to those who may not, or who come with the token in the address for the first time."""
        if self._token is None:
            name = request.headers.get("host", "")
            if is_this_machine(name):
                return None
            return _error(403, f"host '{name}' is not this machine, and the page was started without a token")
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            left = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            response = RedirectResponse(f"{request.url.path}?{urlencode(left)}" if left else request.url.path)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(self._cookie, ""), self._token) or _same(bearer, self._token):
            return None
        return _error(401, "the token is missing or wrong: open the address that `leaderless ui` has printed")


def cookie_name(token: str) -> str:
    """Name of the cookie that holds a token: browsers share cookies between the ports of a host."""
    return f"leaderless-{blake2b(token.encode(), digest_size=6).hexdigest()}"


def make_app(desk: RunStore, token: str | None, is_closing: asyncio.Event) -> Starlette:
    """The application; without a token it answers those alone who address this machine as itself."""
    pages = LivePages(desk, token, is_closing)
    addresses: Mapping[str, Answer] = {
        "/": pages.index,
        "/runs/{key:path}": pages.run,
        "/compare": pages.compare,
        "/samples": pages.samples,
        "/stream": pages.stream,
        "/assets/{name}": pages.asset,
    }
    routes = [Route(path, pages.guarded(answer)) for path, answer in addresses.items()]
    return Starlette(routes=[*routes, Route("/stop", pages.guarded(pages.stop), methods=["POST"])])


def _keys(request: Request) -> list[str]:
    return list(dict.fromkeys(request.query_params.getlist("run")))


def _columns(request: Request) -> list[str]:
    """Further columns of the list of runs that an address names."""
    return list(dict.fromkeys(name for name in request.query_params.getlist("column") if name))[:MAX_COLUMNS]


def _key(request: Request) -> str:
    """The run that an address names; empty if it names none, which no run is called."""
    keys = _keys(request)
    if len(keys) > 1:
        raise SeveralRunsError(len(keys))
    return keys[0] if keys else ""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n\n"


class PageServer(WebServer):
    """Answers requests until a signal arrives. When it stops, it ends the streams of pages that are open."""

    def __init__(self, desk: RunStore, token: str | None) -> None:
        """Prepare the server without starting anything; see `make_app`."""
        self._is_closing = asyncio.Event()
        super().__init__(make_app(desk, token, self._is_closing), LEAVING_S)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_closing.set()
        await super().shutdown(sockets)
