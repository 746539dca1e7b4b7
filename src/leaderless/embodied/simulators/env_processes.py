"""Environments of bodies in a process next to the rank that owns them. Imports no torch.

Numbers go through memory that both processes map; messages are short lines of JSON. The memory is a file without a
name as soon as both have it, so that nothing is left behind, however they end.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.leftover_processes import exit_in_words
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.protocol import (
    Continuous,
    NotAsDeclared,
    Observations,
    Spaces,
    Steps,
    check_seen,
    check_steps,
)
from leaderless.embodied.simulators.registry import BUILT_IN, open_body
from leaderless.environments.protocol import Task

START_S = 120.0
"""Seconds that a process may take to start and to make its environment."""
GRACE_S = 5.0
"""Seconds that a process gets to end by itself."""
_PR_SET_PDEATHSIG = 1
_starting = threading.Lock()


class EnvironmentLost(Exception):  # noqa: N818 - a plain word for what happened
    """A process has ended, does not answer in time, or has raised an error; its episodes have ended with it."""


@dataclass(frozen=True)
class SharedNumbers:
    """Memory that two processes share about some episodes: what is seen and done in them, by their number."""

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    actions: NDArray[np.generic]
    rewards: NDArray[np.float32]
    num_steps: NDArray[np.int64]
    ends: NDArray[np.bool_]  # [episodes, 3]: terminated, truncated, success

    @classmethod
    def over(cls, file: Path, spaces: Spaces, num: int, chunk: int) -> SharedNumbers:
        """Map a file, which is as long as needed, or made so."""
        action: tuple[tuple[int, ...], type[np.generic]]
        is_real = isinstance(spaces.actions, Continuous)
        action = ((num, chunk, spaces.actions.dim), np.float32) if is_real else ((num, chunk), np.int64)  # type: ignore[union-attr]
        images = {name: ((num, *size, 3), np.uint8) for name, size in spaces.images.items()}
        shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
            "num_steps": ((num,), np.int64),
            "actions": action,
            "state": ((num, spaces.state_size), np.float32),
            "rewards": ((num, chunk), np.float32),
            "ends": ((num, 3), np.bool_),
            **{f"image {name}": shape for name, shape in images.items()},
        }
        sizes = {name: int(np.prod(shape)) * np.dtype(kind).itemsize for name, (shape, kind) in shapes.items()}
        total = sum(-(-size // 64) * 64 for size in sizes.values())
        if file.stat().st_size < total:
            os.truncate(file, total)
        memory, begin = np.memmap(file, np.uint8, "r+", shape=(max(1, total),)), 0
        found: dict[str, NDArray[np.generic]] = {}
        for name, (shape, kind) in shapes.items():
            found[name] = memory[begin : begin + sizes[name]].view(kind).reshape(shape)
            begin += -(-sizes[name] // 64) * 64
        shown = {name: found.pop(f"image {name}") for name in spaces.images}
        return cls(images=cast("Mapping[str, NDArray[np.uint8]]", shown), **found)  # type: ignore[arg-type]

    def show(self, which: Sequence[int], observations: Observations) -> None:
        """Write what some episodes show."""
        rows = list(which)
        self.state[rows] = observations.state
        for name, image in observations.images.items():
            self.images[name][rows] = image

    def read_seen(self, which: Sequence[int], into: Observations, rows: Sequence[int]) -> None:
        """Copy it into rows of arrays; an episode's row stays until it is stepped again.

        Pixels are most of it, so they are copied image by image, which takes no memory in between.
        """
        into.state[rows] = self.state[which]
        for name, images in self.images.items():
            for row, number in zip(rows, which, strict=True):
                into.images[name][row] = images[number]

    def did(self, which: Sequence[int], steps: Steps) -> None:
        """Write what steps have done."""
        rows = list(which)
        self.show(which, steps.observations)
        self.rewards[rows], self.num_steps[rows] = steps.rewards, steps.num_steps
        self.ends[rows] = np.stack([steps.terminated, steps.truncated, steps.success], axis=1)

    def read_done(self, which: Sequence[int], into: Steps, rows: Sequence[int]) -> None:
        """Copy it into rows of arrays, likewise."""
        self.read_seen(which, into.observations, rows)
        into.rewards[rows], into.num_steps[rows] = self.rewards[which], self.num_steps[which]
        into.terminated[rows], into.truncated[rows], into.success[rows] = self.ends[which].T


@dataclass(frozen=True)
class ProcessAnswer:
    """Answer of a process about some episodes; numbers are read before these are stepped again.

    Attributes:
        which: Numbers of the episodes in the process.
        numbers: Memory with their numbers.
        instructions: Instruction of each.
        infos: Further facts of each, if the environment has any.
    """

    which: Sequence[int]
    numbers: SharedNumbers
    instructions: Sequence[str]
    infos: Sequence[Mapping[str, Json]] = ()


class EnvironmentProcess:
    """Room for several episodes in a process, which is started when it is needed, and again after it has ended."""

    def __init__(self, config: BodyConfig, spaces: Spaces, num: int, chunk: int) -> None:
        """Start nothing yet."""
        self._config, self._spaces, self._num, self._chunk = config, spaces, num, chunk
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._numbers: SharedNumbers | None = None
        self._num_asked = 0
        self._file: Path | None = None
        self._answers: dict[int, dict[str, Json]] = {}
        self._asked: dict[tuple[int, ...], int] = {}
        self._begun: set[int] = set()

    def begin_reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> None:
        """Let some episodes begin, in a process that is started if there is none; `finish_reset` waits for them."""
        self._start()
        self._begun.update(which)
        self._asked[tuple(which)] = self._send(["reset", list(which), [dict(task) for task in tasks], list(seeds)])

    def finish_reset(self, which: Sequence[int]) -> ProcessAnswer:
        """Observations of episodes that have begun.

        Raises:
            EnvironmentLost: See there.
            RecipeError: What it shows is not as declared.
        """
        if self._file is not None:
            self._receive("start", 0, START_S)
            self._forget_file()
        return self._answer_about("reset", which)

    def begin_step(self, which: Sequence[int], actions: NDArray[np.generic]) -> None:
        """Let some episodes step; `finish_step` waits for them."""
        if self._numbers is None or not self._begun.issuperset(which):
            return  # the process in which they began has been lost, which `finish_step` says
        self._numbers.actions[list(which)] = actions
        self._asked[tuple(which)] = self._send(["step", list(which)])

    def finish_step(self, which: Sequence[int]) -> ProcessAnswer:
        """Results of episodes that have begun to step.

        Raises:
            EnvironmentLost: See there.
            RecipeError: What it shows or does is not as declared.
        """
        return self._answer_about("step", which)

    def close(self) -> None:
        """End the process."""
        self._end(GRACE_S)

    def _send(self, message: Sequence[object]) -> int:
        """Ask for something; returns the number of the question."""
        assert self._connection is not None
        self._num_asked += 1
        with suppress(OSError):  # the answer, which does not come, says why
            self._connection.send_bytes(json.dumps([self._num_asked, *message]).encode())
        return self._num_asked

    def _answer_about(self, what: str, which: Sequence[int]) -> ProcessAnswer:
        """The answer to what was asked about some episodes last."""
        asked = self._asked.pop(tuple(which), None)
        if asked is None:
            raise EnvironmentLost("its process was lost while other episodes were asked for")
        answer = self._receive(what, asked)
        assert self._numbers is not None
        return ProcessAnswer(which, self._numbers, **answer)  # type: ignore[arg-type]

    def _receive(self, what: str, asked: int, limit_s: float | None = None) -> dict[str, Json]:
        """The answer to a question; those to earlier ones are kept."""
        while asked not in self._answers:
            self._receive_next(what, limit_s or self._config.step_timeout_s)
        return self._answers.pop(asked)

    def _receive_next(self, what: str, limit_s: float) -> None:
        if self._connection is None:
            raise EnvironmentLost("its process had ended before")
        try:
            if not self._connection.poll(limit_s):
                self._end()
                raise EnvironmentLost(
                    f"its process has not answered '{what}' within {limit_s:g} s, and was ended: raise "
                    "body.step_timeout_s, or let it answer faster"
                )
            number, answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EnvironmentLost(f"its process {self._end(0.2)} during '{what}'") from error
        if "refused" in answer:
            self._end()
            raise RecipeError.at("body.type", str(answer["refused"]))
        if "error" in answer:
            self._end()  # what it was doing in other episodes is not known
            raise EnvironmentLost(str(answer["error"]))
        self._answers[number] = answer

    def _start(self) -> None:
        """Start a process if there is none, without waiting until it answers."""
        if self._process is not None and self._process.is_alive():
            return
        self._end()
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112, S108 - memory, and no folder of ours
        handle, name = tempfile.mkstemp(prefix="leaderless-", dir=folder)
        os.close(handle)
        self._file = Path(name)
        try:
            self._numbers = SharedNumbers.over(self._file, self._spaces, self._num, self._chunk)
            self._connection, there = Pipe()
            self._process = _start(self._config, name, self._num, self._chunk, there)
            there.close()
        except BaseException:
            self._forget_file()
            raise

    def _forget_file(self) -> None:
        """Remove the name of the file: both processes have mapped it, or one of them has ended."""
        if self._file is not None:
            self._file.unlink()
            self._file = None

    def _end(self, notice_s: float = 0.0) -> str:
        """End the process and all that it has started, after some seconds to end by itself; how it ended."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        self._connection = self._numbers = None
        self._answers.clear()
        self._asked.clear()
        self._begun.clear()
        self._forget_file()
        if process is None:
            return "has ended"
        process.join(notice_s)
        with suppress(OSError, ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join(GRACE_S)
        return f"has ended with {exit_in_words(process.exitcode or 0)}"


def _start(config: BodyConfig, file: str, num: int, chunk: int, connection: Connection) -> BaseProcess:
    """Start a process without the main module of this one, and with it torch and the model code."""
    context = multiprocessing.get_context("forkserver")
    main = vars(sys.modules["__main__"])
    with _starting:
        context.set_forkserver_preload([__name__, BUILT_IN.get(config.type, config.type).partition(":")[0]])
        hidden: dict[str, object] = {key: main[key] for key in ("__spec__", "__file__") if key in main}
        try:
            main["__spec__"] = None
            main.pop("__file__", None)
            arguments = (config.model_dump_json(), file, num, chunk, connection, list(sys.path))
            process = context.Process(target=serve, args=arguments, daemon=True, name="body")
            process.start()
        finally:
            main.update(hidden)
    return process


def is_beside_a_rank() -> bool:
    """Whether this process was started for environments, and is not the rank itself."""
    return multiprocessing.parent_process() is not None


def serve(config: str, file: str, num: int, chunk: int, connection: Connection, path: Sequence[str]) -> None:
    """Be the process of some episodes, until the connection to the rank is closed.

    Numbers are exchanged in a file that is mapped; modules are found in the folders of `path`.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output belongs to the run
    sys.path[:] = path
    try:
        environment = open_body(BodyConfig.model_validate_json(config), num)
        numbers = SharedNumbers.over(Path(file), environment.spaces, num, chunk)
    except Exception as error:  # noqa: BLE001 - the end of the process, which reports it
        _answer(connection, 0, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(connection, 0, {})
    while True:
        try:
            asked, what, which, *rest = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            environment.close()
            return
        try:
            infos: Sequence[Mapping[str, Json]] = ()
            if what == "reset":
                seen = environment.reset(which, *rest)
                check_seen(environment.spaces, seen, len(which))
                numbers.show(which, seen)
            else:
                steps = environment.step(which, numbers.actions[which])
                check_steps(environment.spaces, steps, len(which), chunk)
                numbers.did(which, steps)
                seen, infos = steps.observations, steps.infos
            answer: dict[str, Json] = {"instructions": list(seen.instructions), "infos": [dict(one) for one in infos]}
            _answer(connection, asked, answer)
        except NotAsDeclared as error:
            _answer(connection, asked, {"refused": str(error)})
        except Exception as error:  # noqa: BLE001 - whatever it raises fails its episodes, and is reported
            _answer(connection, asked, {"error": f"{type(error).__name__}: {error}"})


def _answer(connection: Connection, asked: int, answer: Mapping[str, Json]) -> None:
    with suppress(OSError):
        connection.send_bytes(json.dumps([asked, answer]).encode())
