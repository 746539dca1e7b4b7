"""The live page in a thread, and a browser that is driven by the WebDriver protocol of chromedriver."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from leaderless.serving.listen import take_port
from leaderless.serving.live_page.app import PageServer
from leaderless.serving.live_page.pages import RunStore

CHROMEDRIVER = shutil.which("chromedriver")


@contextmanager
def served(*roots: Path, token: str | None = None) -> Iterator[str]:
    """The address of the live page about some folders."""
    with take_port("127.0.0.1", 0, token) as listener:
        server, has_started = PageServer(RunStore(roots), token), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(server.answer(listener, has_started.set)), daemon=True)
        thread.start()
        assert has_started.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


def ask(address: str, *, method: str = "GET", **headers: str) -> tuple[int, str, Mapping[str, str]]:
    """Status, body and headers of a response; redirects are not followed."""
    request = Request(address, method=method, headers={name.replace("_", "-"): text for name, text in headers.items()})
    if method == "POST":
        request.data = b"{}"
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except HTTPError as error:
        return error.code, error.read().decode(), error.headers


def events(address: str, enough: Callable[[list[Any]], bool]) -> list[Any]:
    """What a stream sends, until there is enough."""
    found: list[Any] = []
    with urlopen(address, timeout=60) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if enough(found):
                    return found
    raise AssertionError(f"the stream has ended after {found}")


class Browser:
    """A browser with one page."""

    def __init__(self, address: str) -> None:
        self._address = address

    def do(self, command: str, **values: object) -> Any:
        """The answer to a command of the protocol."""
        body = json.dumps(values).encode()
        request = Request(f"{self._address}/{command}", body, {"content-type": "application/json"})
        try:
            with urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from error

    def open(self, address: str) -> None:
        """Load a page."""
        self.do("url", url=address)

    def run(self, script: str, *arguments: object) -> Any:
        """What a script of the page returns."""
        return self.do("execute/sync", script=script, args=list(arguments))

    def wait(self, script: str, *arguments: object) -> Any:
        """Wait until an expression of the page is true, and return it."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            value = self.run(f"return {script}", *arguments)
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"never true: {script}; {self.run('return document.body.innerText')[:2000]}")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def dark(self, *, is_dark: bool) -> None:
        """Prefer dark or light colors."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.do("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def errors(self) -> str:
        """What went wrong on the page, or was blocked."""
        return str(self.run("const d = document.documentElement.dataset; return (d.error || '') + (d.blocked || '')"))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser without a window."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [str(CHROMEDRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        arguments += ["--window-size=1400,1600", "--disable-background-networking", "--no-first-run"]
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}}
        for _ in range(300):
            try:
                session = Browser(f"http://127.0.0.1:{port}").do("session", capabilities=wanted)["sessionId"]
                break
            except OSError:
                time.sleep(0.1)
        found = Browser(f"http://127.0.0.1:{port}/session/{session}")
        try:
            yield found
        finally:
            urlopen(Request(f"http://127.0.0.1:{port}/session/{session}", method="DELETE"), timeout=60).close()
    finally:
        driver.terminate()
        driver.wait()


def write_status(run: Path, rank: int, **changes: object) -> None:
    """What a rank of a run says about itself."""
    known = {"rank": rank, "world_size": 8, "host": "node-a", "time": 0, "every_s": 2.0, "step": 41, "doing": "rollout"}
    known |= {"waiting_for": "", "idle_s": 0.5, "host_bytes": 3 << 30, "cpu_percent": 99.0, "cpus": 8}
    known |= {"device_bytes": 60 << 30, "device_total_bytes": 80 << 30}
    (run / "live").mkdir(exist_ok=True)
    (run / f"live/rank-{rank}.json").write_text(json.dumps(known | changes))
