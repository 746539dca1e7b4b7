"""An engine that is offered to ranks elsewhere: its process is started anew for each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from leaderless.config import RecipeError
from leaderless.distributed.remote.child_server import package_command, worker_free_environment

MODULE = "leaderless.rollout.external.vllm_process.elsewhere"
"""Module that runs in the engine's interpreter."""
SOON_S, MOST_SOON = 20.0, 3
"""A process that ends with an error within this time has failed to start, and how many may in a row."""


def offer(python: str, host: str, port: int, token: str, say: Callable[[str], None]) -> None:
    """Run the process of an engine again and again, until this is interrupted.

    Args:
        python: Interpreter of an environment that has vLLM.
        host: Interface at which it listens.
        port: Number of its port.
        token: Key that ranks send; empty if they need none.
        say: Function that shows a line.

    Raises:
        RecipeError: There is no such interpreter, or its process cannot be started.
    """
    command, num_soon = package_command(python, MODULE), 0
    greeting = json.dumps({"host": host, "port": port, "token": token}).encode() + b"\n"
    while True:
        begin = time.monotonic()
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, env=worker_free_environment(), start_new_session=True
            )
        except OSError as error:
            raise RecipeError.at("--python", f"{python} cannot be started: {error.strerror}") from error
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(greeting)
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):  # what vLLM has started may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            num_soon = num_soon + 1 if time.monotonic() - begin < SOON_S else 0
            if num_soon == MOST_SOON:
                raise RecipeError.at("--python", f"the engine of {python} ends as it starts: see what it has printed")
            say(f"the engine has ended with code {code}, and is started again")
