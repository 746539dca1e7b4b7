"""The python tool keeps what an episode has made, tells what went wrong, and lets nothing out."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.unit.rewards.sandbox.boxes import boxes

from leaderless.environments.python_tool import PythonTool
from leaderless.environments.tools import Toolbox
from leaderless.environments.tools.calls import Call
from leaderless.environments.tools.function_tool import ToolOwner, tools_of
from leaderless.rewards.sandbox.sandboxes import Sandbox

PATIENCE_S = 30.0
LOST = "variables and files of earlier calls are lost"
every_box = pytest.mark.parametrize("box", boxes())


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = set(psutil.Process().children(recursive=True))
    yield
    assert list(tmp_path.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= children


@contextmanager
def episode(box: Sandbox, **limits: float) -> Iterator[PythonTool]:
    limits = {"timeout_s": 20.0} | limits
    found = PythonTool(sandbox=box.name, **limits)
    try:
        yield found
    finally:
        asyncio.run(found.close())


def wait_for_rest(outer: psutil.Process, num_alive: int) -> None:
    """Wait until so many processes are alive, one of which is stopped: the interpreter with its threads."""
    deadline = time.monotonic() + PATIENCE_S
    states: list[str] = []
    while states.count(psutil.STATUS_STOPPED) != 1 or len(states) - states.count(psutil.STATUS_ZOMBIE) != num_alive:
        assert time.monotonic() < deadline, states
        time.sleep(0.01)
        states = [process.status() for process in outer.children(recursive=True)]


@every_box
def test_state_is_kept_and_answers_are_those_of_an_interpreter(box: Sandbox) -> None:
    with episode(box) as tool:
        assert tool.python("import math\nx = 20\nprint('one')\nx + 1") == "one\n21"
        assert tool.python("def f(n):\n    return n / (x - 20)\n") == "(no output)"
        assert tool.python("_ * 2, math.floor(2.5)") == "(42, 2)"
        told = tool.python("f(3)")
        assert told.startswith('Traceback (most recent call last):\n  File "<call 4>", line 1, in <module>\n    f(3)\n')
        assert "    return n / (x - 20)\n" in told
        assert told.endswith("ZeroDivisionError: division by zero")
        assert tool.python("x = ").endswith("SyntaxError: invalid syntax")
        assert tool.python("raise SystemExit(3)").endswith("SystemExit: 3")
        assert tool.python("import sys\nsys.stdout.close()\nsys.stdout = None") == "(no output)"
        assert tool.python("open('note', 'w').write('é\\ud800'[:1])") == "1"
        assert tool.python("import os\nos.listdir(), open('note').read(), x") == "(['note'], 'é', 20)"
        assert tool.python("import sys\nprint('warned', file=sys.stderr)\nNone") == "warned"
        assert tool.python("input()").endswith("EOFError: EOF when reading a line")


@every_box
def test_a_call_that_is_ended_says_so_and_the_next_one_begins_anew(box: Sandbox) -> None:
    with episode(box, timeout_s=2.0, max_output_bytes=2**14) as tool:
        for code, said in {
            "print('begun', flush=True)\nwhile True: pass": "begun\nError: the call took more than 2 s and was ended.",
            "import os\nos._exit(7)": "Error: the call ended the interpreter with exit code 7.",
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)": "ended the interpreter with the signal SIGSEGV.",
            "print('x' * 10_000_000)": "x [...]\nError: the call printed more than 16,384 bytes and was ended.",
        }.items():
            assert tool.python("kept = open('kept', 'w').write('k')") == "(no output)"
            told = tool.python(code)
            assert said in told
            assert told.endswith(LOST + ".")
            assert len(told) < 1300
            assert tool.python("import os\nos.listdir(), 'kept' in globals()") == "([], False)"


@every_box
def test_memory_and_processes_are_limited(box: Sandbox) -> None:
    with episode(box, memory_mib=256, max_processes=4) as tool:
        assert tool.python("bytearray(2**29)").endswith("MemoryError")
        begin = time.monotonic()
        assert "Resource temporarily unavailable" in tool.python("import os\nwhile True: os.fork()")
        assert time.monotonic() - begin < PATIENCE_S
        assert tool.python("2 + 2") == "4"


@every_box
def test_what_a_call_starts_does_not_run_on(box: Sandbox) -> None:
    with episode(box, max_processes=2) as tool:
        begin = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos.getpid()"
        for _ in range(3):  # those of earlier calls do not count
            assert tool.python(begin).isdigit()
        assert tool._interpreter is not None
        wait_for_rest(psutil.Process(tool._interpreter._supervisor.pid), 3 if box.name == "bubblewrap" else 1)
        count = "import threading, time\nn = 0\ndef run():\n    global n\n    while True:\n        n += 1\n"
        create = "        try: open('z', 'w').close()\n        except OSError: pass\n"
        assert tool.python(f"{count}{create}threading.Thread(target=run, daemon=True).start()") == "(no output)"
        assert int(tool.python("time.sleep(0.05)\nn")) > 0


@every_box
@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "import os\nos.listdir('/home')",
        "open('/tmp/mine', 'w')",
        "open({secret!r}).read()",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "import subprocess\nsubprocess.run(['/bin/ls'])",
        "import os\nos.kill({pid}, 9)",
        "open('/proc/{pid}/environ').read()",
    ],
)
def test_nothing_else_is_in_reach(box: Sandbox, code: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("other") / "secret"
    secret.write_text("4711")
    with episode(box) as tool:
        told = tool.python(code.format(secret=str(secret), pid=os.getpid())).splitlines()[-1]
        assert told.split(":")[0] in {"PermissionError", "FileNotFoundError", "OSError"}, told


@every_box
def test_episodes_share_nothing(box: Sandbox) -> None:
    with episode(box) as one, episode(box) as other:
        folder = one.python("import os\nopen('mine', 'w').write('m')\nshared = 1\nprint(os.getcwd())").splitlines()[0]
        assert other.python("shared").endswith("NameError: name 'shared' is not defined")
        assert other.python("import os\nos.listdir()") == "[]"
        told = other.python(f"open('{folder}/mine').read()")
        assert told.splitlines()[-1].split(":")[0] in {"PermissionError", "FileNotFoundError"}
        assert one.python("open('mine').read()") == "'m'"


@every_box
def test_a_program_that_pretends_to_be_done_hurts_only_itself(box: Sandbox) -> None:
    pretend = "import os, time\nfor fd in range(3, 12):\n    try: os.write(fd, b'.' * 3)\n    except OSError: pass\n"
    with episode(box, timeout_s=1.0) as tool:
        tool.python(pretend + "time.sleep(1000)")
        answers = [tool.python("1 + 1") for _ in range(4)]
        assert answers[-1] == "2" or LOST in answers[-1]
        assert "2" in [tool.python("1 + 1") for _ in range(2)]
    with episode(box) as tool:
        assert tool.python("3") == "3"


def test_an_unknown_sandbox_is_refused() -> None:
    with pytest.raises(ValueError, match="sandbox='docker' must be auto, builtin or bubblewrap"):
        PythonTool(sandbox="docker")  # type: ignore[arg-type]


def test_it_is_a_tool_and_ends_with_its_episode() -> None:
    async def use() -> None:
        python = PythonTool()
        (found,) = tools_of(ToolOwner(PythonTool, {}))
        box = Toolbox([found.of_instance(python)])
        assert "no network" in str(found.schema)
        results = await box.run([Call("python", {"code": "a = 1"}), Call("python", {"code": "a"})], 30.0)
        assert [result.text for result in results] == ["(no output)", "1"]
        await python.close()
        await python.close()
        with pytest.raises(RuntimeError, match="is over"):
            python.python("1")

    asyncio.run(use())
