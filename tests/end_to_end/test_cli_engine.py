"""`leaderless engine` as a command: it offers an engine again and again, until a signal comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.alone import refused, run_alone
from tests.end_to_end.test_restarts import free_port
from tests.engines import settings_of

from leaderless.distributed.remote.elsewhere import ServerElsewhere
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.rollout.external import offered

DEADLINE_S = 60.0


def child() -> psutil.Process:
    """The process of the engine that is offered, once it is there."""
    end = time.monotonic() + DEADLINE_S
    while True:
        for process in psutil.Process().children():
            if offered.MODULE in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_engine_that_has_ended_is_offered_again_until_a_signal_comes(tmp_path: Path) -> None:
    port, seen = free_port(), list[str]()

    def client() -> None:
        try:
            for _ in range(2):
                server = ServerElsewhere("the engine", f"127.0.0.1:{port}", "", DEADLINE_S, DEADLINE_S, lambda: None)
                with pytest.raises(EngineError) as caught:  # the interpreter of the tests has no vLLM
                    server.start({**vars(settings_of("model"))})
                seen.append(str(caught.value))
                process = child()
                process.kill()
                while child() == process:  # to wait for it would take its exit code from the command
                    time.sleep(0.05)
        finally:
            child()
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    outcome = run_alone(tmp_path, "engine", "--python", sys.executable, "--port", port)
    thread.join()
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert outcome.output == "the engine has ended with code -9, and is started again\n" * 2 + "stopped\n"
    assert all(f"the engine at 127.0.0.1:{port} answered /start with 500" in text for text in seen)
    assert all("No module named 'vllm'" in text for text in seen)
    assert not [one for one in psutil.Process().children() if offered.MODULE in " ".join(one.cmdline())]


def test_an_engine_that_cannot_be_offered_is_refused_in_words(tmp_path: Path) -> None:
    port = free_port()
    assert "--python: /no/python cannot be started" in refused(tmp_path, "engine", "--python", "/no/python")
    other = refused(tmp_path, "engine", "--host", "0.0.0.0", "--port", port)
    assert "can be reached from other machines, so clients need a token: set LEADERLESS_TOKEN" in other
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert "ends as it starts: see what it has printed" in refused(tmp_path, "engine", "--python", broken)
