"""Runs functions of test modules on several ranks.

The processes are forked when they are first needed (see `tests.forking`), and stay for the whole test session; only the
process group is made anew for each call. A test asks for the fixture `ranks` and calls

    results = ranks.run(4, check_something, argument)

where `check_something` is a function at the top level of a test module. It runs on each rank as under torch elastic:
the environment names its rank, and the default process group (gloo) is ready. Arguments and results are pickled.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tests.forking import NUM_NURSERIES, Forked
from tests.transports import VARIABLE, moved_by

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.tensor._op_schema import OpSchema

MAX_WORLD_SIZE = 4
START_S = 300.0
"""Longest wait for a process to import torch."""
GRACE_S = 1.0
"""Seconds for other ranks to report a failure after the first one, which may have caused theirs."""

Result = TypeVar("Result")


class RankError(AssertionError):
    """A function failed, died or hung on some rank."""


@dataclass(frozen=True)
class _Task:
    """A call on one rank.

    Attributes:
        function: Name of the function, `module:function`.
        args: Arguments of the function.
        environment: Variables that torch elastic would set.
        timeout_s: Longest wait in a collective, in seconds.
        number: Number of the call, the same on all ranks.
        init_group: Whether the default process group is made.
    """

    function: str
    args: tuple[object, ...]
    environment: Mapping[str, str]
    timeout_s: float
    number: int
    init_group: bool


@dataclass(frozen=True)
class _Answer:
    """Outcome of a call on one rank.

    Attributes:
        result: Value that the function returned.
        error: Traceback; empty when the function returned.
        time_s: End of the call, on a clock that all processes share.
    """

    result: object
    error: str
    time_s: float


class RankPool:
    """Processes that play the ranks."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._workers: list[_Worker] = []
        self._num_calls = 0
        self._kept: dict[bytes, bytes] = {}
        atexit.register(self.close)

    def run(
        self,
        world_size: int,
        function: Callable[..., Result],
        *args: object,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
        init_group: bool = True,
    ) -> list[Result]:
        """Call a function on every rank of a fresh process group.

        Args:
            world_size: Number of ranks, 1 to 4.
            function: Function at the top level of a module.
            *args: Arguments, the same for every rank.
            timeout_s: Longest wait in a collective of the default process group, in seconds.
            deadline_s: Longest time for the call; then the stacks of ranks that have not returned are shown, and all
                processes are killed.
            init_group: Whether the default process group is made; else the function may make it, from the environment.

        Returns:
            The results, by rank.

        Raises:
            RankError: The function failed on some rank. All processes have been killed; the next call starts new ones.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: must be 1 to {MAX_WORLD_SIZE}")
        name = f"{function.__module__}:{function.__qualname__}"
        if "<" in name:
            raise ValueError(f"{name} must be at the top level of its module, to be found by name in other processes")
        try:
            self._start(world_size)
            self._num_calls += 1
            # A function that makes the group itself uses plain keys, so it needs a store without those of others.
            store = self._store if init_group else _make_store()
            for rank, worker in enumerate(self._workers[:world_size]):
                environment = _environment(rank, world_size, store.port)
                worker.send(_Task(name, args, environment, timeout_s, self._num_calls, init_group))
            answers = self._collect(name, world_size, deadline_s)
            for worker in self._workers[:world_size]:
                worker.send(None)
        except BaseException:
            self._kill()
            raise
        return [answer.result for answer in answers]

    def once(self, world_size: int, function: Callable[..., Result], *args: object) -> list[Result]:
        """Results of `run`, of a function that depends on its arguments alone: it is called once for equal arguments.

        Each caller gets a copy of its own. Tests that compare with the same numbers of one rank share them.
        """
        __tracebackhide__ = True
        key = pickle.dumps((world_size, function.__module__, function.__qualname__, args))
        if key not in self._kept:
            self._kept[key] = pickle.dumps(self.run(world_size, function, *args))
        results: list[Result] = pickle.loads(self._kept[key])
        return results

    def close(self) -> None:
        """End all processes, and what they have started."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    @cached_property
    def _store(self) -> TCPStore:
        """The address where ranks meet."""
        return _make_store()

    def _start(self, world_size: int) -> None:
        """Start processes until there are enough."""
        port = self._store.port
        missing = range(len(self._workers), world_size)
        new = [_Worker.start(rank, self._folder / f"{rank}.txt", port) for rank in missing]
        self._workers += new
        for worker in new:
            if not worker.connection.poll(START_S):
                raise RankError(f"a process did not start within {START_S:.0f} s")
            worker.connection.recv_bytes()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _collect(self, name: str, world_size: int, deadline_s: float) -> list[_Answer]:
        __tracebackhide__ = True
        rank_of = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        answers: dict[int, _Answer] = {}
        end = time.monotonic() + deadline_s
        while len(answers) < world_size:
            has_failed = any(answer.error for answer in answers.values())
            missing = [connection for connection, rank in rank_of.items() if rank not in answers]
            ready = wait(missing, GRACE_S if has_failed else max(0.0, end - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of[connection]
                answers[rank] = self._workers[rank].receive()
            if not ready:
                break
        failed = sorted((answer.time_s, rank) for rank, answer in answers.items() if answer.error)
        if failed:
            first = failed[0][1]
            others = [rank for _, rank in failed[1:]]
            later = f" (then on {_ranks(others)})" if others else ""
            raise RankError(f"{name} failed on rank {first} of {world_size}{later}:\n{answers[first].error}")
        hung = [rank for rank in range(world_size) if rank not in answers]
        if hung:
            stacks = "".join(f"\nrank {rank}:\n{self._workers[rank].stacks()}" for rank in hung)
            raise RankError(f"{name} did not return within {deadline_s:g} s on {_ranks(hung)} of {world_size}:{stacks}")
        return [answers[rank] for rank in range(world_size)]


@dataclass(frozen=True)
class _Worker:
    """One process, seen from outside.

    Attributes:
        process: Leader of a session, so that what it starts ends with it, and Ctrl-C reaches only the test session.
        connection: Connection for tasks and answers.
        stack_file: File for the stacks of its threads, written on SIGUSR1.
    """

    process: Forked
    connection: Connection
    stack_file: Path

    @classmethod
    def start(cls, rank: int, stack_file: Path, port: int) -> _Worker:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.distributed.ranks", str(stack_file), str(port)]
        with theirs:
            process = Forked(command, nursery=rank % NUM_NURSERIES, stdin=theirs.fileno(), start_new_session=True)
        return cls(process, Connection(ours.detach()), stack_file)

    def send(self, task: _Task | None) -> None:
        self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> _Answer:
        try:
            answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            code = self.process.wait(START_S)
            return _Answer(None, f"the process ended with exit code {code}", 0.0)
        assert isinstance(answer, _Answer)
        return answer

    def stacks(self) -> str:
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(GRACE_S)
        return self.stack_file.read_text()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it may have ended, or not lead its session yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _make_store() -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torch elastic sets for a worker whose agent has the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def serve(stack_file: str, port: int) -> None:
    """The life of one process, whose standard input is the connection to the test session."""
    connection = Connection(os.dup(0))
    threading.Thread(target=_end_with_session, args=(connection.fileno(),), daemon=True).start()
    with Path(stack_file).open("w") as stacks, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        from torch.distributed import TCPStore

        _keep_shapes()
        # One connection serves all calls: where names resolve slowly, each new one may take seconds.
        store = TCPStore("127.0.0.1", port, is_master=False)
        connection.send_bytes(b"ready")
        with suppress(EOFError):
            while True:
                task = pickle.loads(connection.recv_bytes())
                if isinstance(task, _Task):
                    connection.send_bytes(_answer(task, store))
                else:
                    _leave_group()


def _end_with_session(connection: int) -> None:
    """End with the test session, even when it is killed."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    os.killpg(0, signal.SIGKILL)


def _keep_shapes() -> None:
    """Keep the shapes of what sharded operations give, beyond a call: they do not depend on its groups.

    Torch finds them with tensors without numbers, which takes a tenth of the time of a small update.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._pytree import tree_flatten

    find, kept = ShardingPropagator._propagate_tensor_meta_non_cached, {}

    def keep(propagator: object, schema: OpSchema) -> object:
        given = schema.args_schema, schema.kwargs_schema
        leaves, structure = tree_flatten(given, is_leaf=lambda part: isinstance(part, DTensorSpec))
        values = [(type(leaf), leaf.tensor_meta if isinstance(leaf, DTensorSpec) else leaf) for leaf in leaves]
        key = schema.op, *values, str(structure)
        if key not in kept:
            kept[key] = find(propagator, schema)
        return kept[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = keep


def _answer(task: _Task, store: TCPStore) -> bytes:
    """Run a task. The process group stays until all ranks have answered, because others may still use it."""
    import torch
    from torch import distributed

    os.environ.update(task.environment)
    random.seed(0)
    torch.manual_seed(0)
    try:
        module, _, function = task.function.partition(":")
        run = getattr(import_module(module), function)
        if task.init_group:
            rank, world_size = (int(task.environment[name]) for name in ("RANK", "WORLD_SIZE"))
            own_store = distributed.PrefixStore(f"call {task.number}", store)
            # Imports may take different times on ranks; that must not count against a short limit of the group.
            own_store.set(f"ready {rank}", "")
            own_store.wait([f"ready {other}" for other in range(world_size)], timedelta(seconds=START_S))
            distributed.init_process_group(
                "gloo",
                store=own_store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=task.timeout_s),
            )
        with moved_by(os.environ.get(VARIABLE, "torch")):
            return pickle.dumps(_Answer(run(*task.args), "", time.monotonic()))
    except BaseException:  # noqa: BLE001  (whatever it is, the test session shows it)
        return pickle.dumps(_Answer(None, traceback.format_exc(), time.monotonic()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _leave_group() -> None:
    """Undo what a task has changed."""
    from torch import distributed
    from torch.distributed.tensor import debug

    if distributed.is_initialized():
        distributed.destroy_process_group()
    # Its cache of sharded tensors keeps the groups of the task alive.
    debug._clear_sharding_prop_cache()
    # So do cycles of references. Each group of gloo that stays polls with three threads.
    gc.collect()
    gc.freeze()  # else each task would look through all modules once more
    for name in _environment(0, 1, 0):
        os.environ.pop(name, None)


if __name__ == "__main__":
    from tests.distributed import ranks  # its classes belong to the test session

    ranks.serve(sys.argv[1], int(sys.argv[2]))
