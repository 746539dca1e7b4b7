"""Servers of OpenEnv in processes of their own, and a record of what they say.

    python -m tests.openenv_worlds     # writes the record anew, with the package

The record is what the tests without the package play with.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "fakes/openenv_environment/recorded.json"
SESSIONS: Mapping[str, list[dict[str, Any]]] = {
    "guess": [
        {"type": "reset", "data": {"seed": 3, "high": 4}},
        {"type": "step", "data": {"text": "1"}},
        {"type": "step", "data": {"text": "2"}},
        {"type": "state"},
        {"type": "step", "data": {"text": "boom"}},
        {"type": "step", "data": {"tex": "2"}},
        {"type": "what"},
    ],
    "moves": [
        {"type": "reset", "data": {"seed": 1}},
        {"type": "step", "data": {"column": 2}},
    ],
    "tools": [
        {"type": "step", "data": {"type": "list_tools"}},
        {"type": "reset", "data": {"seed": 1}},
        *(
            {"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": a, "b": b}}}
            for a, b in ((1, 2), (13, 1), (2, 2))
        ),
        {"type": "step", "data": {"type": "call_tool", "tool_name": "none", "arguments": {}}},
    ],
}
"""What is asked of each environment for the record."""


@contextmanager
def served(name: str, sessions: int = 8) -> Iterator[str]:
    """The address of a server of the package in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.fakes.openenv_served", name, str(port), str(sessions)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health").close()
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def said_by(name: str) -> dict[str, Any]:
    """What a server of the package says of itself, and to the messages of a session."""
    from websockets.asyncio.client import connect

    async def ask(url: str) -> list[Any]:
        found = []
        async with connect(f"{url.replace('http', 'ws')}/ws") as connection:
            for message in SESSIONS[name]:
                await connection.send(json.dumps(message))
                found.append([message, json.loads(await connection.recv())])
        return found

    with served(name) as url:
        with urllib.request.urlopen(f"{url}/schema") as answer:
            schema = json.load(answer)
        return {"schema": schema, "session": asyncio.run(ask(url))}


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: said_by(name) for name in SESSIONS}, indent=1) + "\n")
