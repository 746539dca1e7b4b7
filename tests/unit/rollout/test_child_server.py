"""Servers that belong to a rank: those that answer, die, hang and do not start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from leaderless.distributed.remote.child_server import ChildServer, bound_command, worker_free_environment
from leaderless.distributed.remote.server_calls import EngineError

PROGRAM = """
import http.server, json, os, sys, time
port, token = sys.stdin.readline().split()
print("the server begins", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 0.2
    def do_GET(self): self.do_POST()
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/die":
            print("dying of this", flush=True)
            os._exit(3)
        if self.path == "/hang":
            time.sleep(60)
        is_known = self.headers["Authorization"] == "Bearer " + token
        self.send_response(500 if self.path == "/fail" else 200 if is_known else 401)
        self.send_header("Connection", "close" if self.path == "/lines" else "keep-alive")
        if self.path != "/lines":
            self.send_header("Content-Length", str(10 if self.path == "/fail" else len(body)))
        self.end_headers()
        if self.path == "/lines":
            for number in range(3):
                self.wfile.write(b"line %d\\n\\n" % number)
        else:
            self.wfile.write(b"went wrong" if self.path == "/fail" else body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def start(
    tmp_path: Path, program: str, *, start_timeout_s: float = 60.0, beats: list[int] | None = None
) -> ChildServer:
    noted = beats if beats is not None else []
    server = ChildServer("the server", tmp_path / "logs" / "server.log", start_timeout_s, 1.0, lambda: noted.append(1))
    server.prepare()
    command, greeting = bound_command(sys.executable, program), f"{server.port} {server.token}"
    server.start(command, greeting)
    return server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChildServer]:
    made = start(tmp_path, PROGRAM)
    yield made
    made.close()


def test_calls_are_answered_and_bear_the_token(server: ChildServer) -> None:
    assert server.call("/echo", {"a": [1, 2.5, "x"]}) == {"a": [1, 2.5, "x"]}
    assert list(server.stream("/lines", {})) == [b"line 0", b"line 1", b"line 2"]
    assert server._log.stat().st_mode & 0o077 == 0, "what the server prints may hold the token"
    server.token = "another"
    with pytest.raises(EngineError, match="answered /echo with 401"):
        server.call("/echo", {})


def test_asking_whether_a_server_is_ready_leaves_no_error_in_its_log(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "body = self", 'body = b"x" * 100_000 if self.path == "/health" else self'
    )  # more than is read together with the headers
    server = start(tmp_path, program)
    time.sleep(0.2)
    server.close()
    assert server._log.read_text().strip() == "the server begins"


def test_a_server_may_close_connections_between_calls(server: ChildServer) -> None:
    for number in range(2):
        assert server.call("/echo", number) == server.call_numbered("/echo", number) == number
        time.sleep(0.6)


def test_an_error_is_told_with_the_end_of_the_log(server: ChildServer) -> None:
    for call in (server.call, server.call_numbered):
        with pytest.raises(
            EngineError, match=r"(?s)answered /fail with 500: went wrong; .*server.log:\n  the server begins"
        ):
            call("/fail", {})


@pytest.mark.parametrize("name", ["call", "call_numbered"])
def test_a_server_that_dies_is_told_with_its_exit_code_and_its_last_words(server: ChildServer, name: str) -> None:
    with pytest.raises(EngineError, match=r"(?s)broke off at /die, as it has ended with code 3; .*  dying of this"):
        getattr(server, name)("/die", {})


def test_a_server_that_hangs_is_given_up_in_time(server: ChildServer) -> None:
    for call in (server.call, server.call_numbered):
        begin = time.monotonic()
        with pytest.raises(EngineError, match=r"did not answer /hang within rollout.external.answer_timeout_s=1 s"):
            call("/hang", {})
        assert time.monotonic() - begin < 30


def test_closing_ends_what_the_server_has_started_too(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
    server = start(tmp_path, f"{child}\n{PROGRAM}")
    assert server._process is not None
    processes = [psutil.Process(server._process.pid), *psutil.Process(server._process.pid).children()]
    assert len(processes) == 2
    server.close()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    server.close()


def test_a_program_whose_parent_has_ended_before_it_began_does_not_run() -> None:
    python, *command = bound_command(sys.executable, "print('it runs')")
    assert subprocess.check_output([python, *command], text=True) == "it runs\n"
    command[command.index(str(os.getpid()))] = str(2**22 + 1)
    orphan = subprocess.run([python, *command], capture_output=True, text=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (1, "")
    assert "is gone" in orphan.stderr


def test_a_server_that_ends_while_it_starts_is_told_at_once(tmp_path: Path) -> None:
    beats: list[int] = []
    program = "import sys, time; print('no such model'); sys.stdout.flush(); time.sleep(1.2); sys.exit(7)"
    with pytest.raises(EngineError, match=r"(?s)has ended with code 7 while it started; .*  no such model"):
        start(tmp_path, program, beats=beats)
    assert beats, "a rank that waits is no rank that hangs"


def test_a_server_that_does_not_come_up_is_given_up_in_time(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start within rollout.external.start_timeout_s=1 s"):
        start(tmp_path, "import time; time.sleep(300)", start_timeout_s=1.0)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    server = ChildServer("the server", tmp_path / "log", 1.0, 1.0, lambda: None)
    with pytest.raises(EngineError, match=r"cannot be started: /no/python: No such file"):
        server.start(["/no/python"], "")


def test_engines_are_not_told_which_worker_has_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    environment = worker_free_environment()
    assert environment["CUDA_HOME"] == "/cuda"
    assert not [name for name in environment if "RANK" in name or name.startswith(("MASTER", "WORLD", "TORCHELASTIC"))]
