"""Processes that start in milliseconds, because they are forked from one that has already imported torch.

`Forked` is a `subprocess.Popen` for `python -m MODULE ARGUMENTS`. The process is a child of the caller, with a folder,
an environment and standard streams of its own. Three things tell it from a real one: it shares its hash seed with all
that come from the same nursery, the system does not know its command line, and it ends without taking the interpreter
down, which would copy most of the nursery's memory.

A nursery is a process that has imported what takes seconds, and forks when it is asked to. It has no threads: they
would not live on in a forked process, but the locks they hold would. A forked `leaderless` has a nursery of its own,
so that the workers of a launcher are forked, too.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib.metadata
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
MODULES = (
    "leaderless.worker.build.process",
    "leaderless.cli.main",
    "leaderless.observability.report.page",
    "leaderless.planner.show.picture",
    "pytest",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.tensor.debug",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What a nursery imports: nothing that starts a thread, or reads variables that tests set."""
MODULES_VARIABLE = "NURSERY_MODULES"
"""Variable that names other modules, separated by spaces."""
PACKAGE = "leaderless"
LAUNCHERS = (PACKAGE, "torch.distributed.run")
"""Programs that start workers."""
NUM_NURSERIES = 2
"""Nurseries take turns: what depends on the order of a set must differ between ranks, as it does in reality."""
MAX_REQUEST_BYTES = 1 << 18
SIGNATURE = inspect.signature(subprocess.Popen._execute_child)
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True)
class _Request:
    """A process to fork.

    Attributes:
        arguments: Module, and what follows it on the command line.
        folder: Working directory.
        environment: All variables.
        is_leader: The process leads a session of its own.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    is_leader: bool


class Forked(subprocess.Popen):
    """A forked process.

    Args:
        args: `[sys.executable, "-m", MODULE, *ARGUMENTS]`.
        nursery: Number of the nursery; processes of different nurseries have different hash seeds.
        **options: Options of `subprocess.Popen`.
    """

    def __init__(self, args, *, nursery: int = 0, **options) -> None:
        self.nursery = nursery
        super().__init__(args, **options)

    def _execute_child(self, args, *options) -> None:
        _execute_forked(self, args, *options)


def _execute_forked(process: subprocess.Popen, args: Sequence[str], *options: object) -> None:
    """Take the place of `subprocess.Popen._execute_child`."""
    given = SIGNATURE.bind(process, args, *options).arguments
    python, flag, *arguments = args
    assert (python, flag) == (sys.executable, "-m"), args
    pipes = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    streams = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
    folder, environment = Path(given["cwd"] or ".").absolute(), dict(given["env"] or os.environ)
    request = _Request(arguments, str(folder), environment, bool(given["start_new_session"]))
    nursery = getattr(process, "nursery", 0)
    if (known := _NURSERIES.get(nursery)) is not None and known.poll() is not None:
        _nursery.cache_clear()  # it was killed, as by a launcher that ends all processes started since
    connection = _nursery(nursery)
    with _adopting():
        socket.send_fds(connection, [pickle.dumps(request)], streams)
        answer = connection.recv(MAX_REQUEST_BYTES)
    assert answer, "the nursery has ended"
    process.pid = int(answer)
    process._child_created = True
    process._close_pipe_fds(
        *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


@functools.cache
def _nursery(number: int) -> socket.socket:
    """The connection to a nursery, which ends with this process."""
    connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT / "src"), str(ROOT), *given])),
        "OMP_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # the allocator of pyarrow would start a thread
    }
    with other:
        _NURSERIES[number] = subprocess.Popen(
            [sys.executable, "-m", "tests.forking"], stdin=other.fileno(), env=environment, cwd="/", process_group=0
        )
    return connection


_NURSERIES: dict[int, subprocess.Popen[bytes]] = {}
"""Keeps processes, since a `Popen` that is garbage-collected while its process runs warns about it."""


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before.value)


def live() -> None:
    """The life of a nursery, and of all processes forked from it."""
    given = os.environ.pop(MODULES_VARIABLE, "")
    # Reading the metadata of all packages takes a quarter of a second, in each run of each rank.
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    gc.disable()  # modules stay, so that looking for garbage among them takes a sixth of the time for nothing
    for name in given.split() or MODULES:
        import_module(name)
    gc.enable()
    if not given:
        _read_versions()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
    _name_events_cheaply()
    gc.collect()
    gc.freeze()  # shared objects are not inspected, and so not copied, by each collection
    connection = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    born = _serve(connection)
    if born is not None and born[0].arguments[0] in LAUNCHERS:
        born = _with_a_nursery_of_its_own(*born)
    if born is not None:
        request, descriptors = born
        _settle(request, descriptors)
        _run(request.arguments[0])


def _read_versions() -> None:
    """Keep the versions of the packages that each run checks."""
    from leaderless.base.versions import unfit_versions

    for _ in unfit_versions():
        pass


def _name_events_cheaply() -> None:
    """Keep torch elastic from inspecting its whole stack for each event.

    The frames of `runpy`, which have no file, make it search thousands of modules: .1 s an event.
    """
    if (rendezvous := sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous")) is not None:
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _serve(connection: socket.socket) -> tuple[_Request, Sequence[int]] | None:
    """Fork until the other side closes; in a forked process, return the process to become and its standard streams."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        if not content:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between, child = os.getpid(), os.fork()
            if child == 0:
                for end in (reader, writer):
                    os.close(end)
                connection.close()
                while os.getppid() == between:  # it ends, and the process that asked becomes the parent
                    time.sleep(0.0005)
                return pickle.loads(content), descriptors
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reader, MAX_REQUEST_BYTES))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _with_a_nursery_of_its_own(request: _Request, descriptors: Sequence[int]) -> tuple[_Request, Sequence[int]] | None:
    """Fork a nursery for the workers that this process starts; in a worker, return the process to become."""
    connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        return _serve(other)
    other.close()
    execute = subprocess.Popen._execute_child

    def execute_worker(self, args, *options) -> None:
        words = [word for word in args if word != "-u"]
        if words[:2] == [sys.executable, "-m"] and words[2].partition(".")[0] == PACKAGE:
            _execute_forked(self, words, *options)
        else:
            execute(self, args, *options)

    subprocess.Popen._execute_child = execute_worker
    globals()["_nursery"] = lambda _: connection
    return request, descriptors


def _settle(request: _Request, descriptors: Sequence[int]) -> None:
    """Give this process its folder, environment and streams."""
    if request.is_leader:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path[:1] = [request.folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[1:] = request.arguments[1:]
    tempfile.tempdir = None  # to be looked up in the environment again
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(module: str) -> NoReturn:
    """Run a program, and end this process like the interpreter, as far as a program can tell."""
    code: object = 0
    sys.modules.pop(module, None)  # what is run is no module that was imported: `runpy` warns of both at once
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  (as the interpreter does)
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    assert isinstance(code, int | None), code
    os._exit(code or 0)


if __name__ == "__main__":
    from tests import forking

    forking.live()
