"""Environments of the package verifiers, as programs that lead episodes. Imports neither torch nor verifiers.

The package does not go together with others that this one needs, so it lives in a Python environment of its own. Each
rank keeps a process of that Python, which plays all of its episodes and asks the policy by its address.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from threading import Lock, Thread
from weakref import finalize

from leaderless.base.leftover_processes import exit_in_words
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.failures import FailureKind
from leaderless.environments.guarded_environment import EnvironmentFailure
from leaderless.environments.programs.chat import Chat
from leaderless.environments.protocol import EpisodeFailed, Task

_SCRIPT = Path(__file__).with_name("verifiers_worker.py")
_SPLITS = ("train", "eval")
_KINDS: Mapping[str, FailureKind] = {
    "InvalidModelResponseError": "infrastructure",
    "ModelError": "infrastructure",
    "InfraError": "infrastructure",
    "TunnelError": "infrastructure",
    "SandboxError": "sandbox",
    "BrowserSandboxError": "sandbox",
    "ToolCallError": "tool",
    "ToolError": "tool",
}
"""Kinds of the errors of verifiers; any other is the environment's."""
_CHECK_S = 30.0
_LEAVING_S = 2.0
"""Seconds that the process has to end by itself once its input has ended."""


class Verifiers:
    """Plays an example of an environment, and returns what its rubric gives.

    Args:
        environment: Name of the environment, a package that is installed next to verifiers.
        args: Arguments of its function `load_environment`.
        python: Python in which verifiers is installed; by default the one that runs this.

    Raises:
        RecipeError: There is no such Python, or it has no verifiers.
    """

    def __init__(self, environment: str, *, args: Mapping[str, Json] | None = None, python: str | None = None) -> None:
        self._command = _command(environment, args or {}, python)

    async def __call__(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Play the example that the task names.

        Raises:
            EpisodeFailed: The task names none, or verifiers reports an error.
            EnvironmentFailure: The process has ended.
        """
        example, split = task.get("example"), task.get("split")
        if not isinstance(example, int) or split not in _SPLITS:
            raise EpisodeFailed("the row is no example of verifiers: make rows with make_rows")
        address = {"base_url": chat.base_url, "api_key": chat.api_key}
        found = await shared(self._command).ask({"example": example, "split": split, **address})
        # A question that was refused because of the recipe's limits is an error to verifiers, and here the end.
        if "error" in found and (chat.overflow is None or "reward" not in found):
            raise EpisodeFailed(f"verifiers: {found['error']}", _KINDS.get(str(found.get("type"))))
        return found


def make_rows(
    environment: str,
    count: int,
    *,
    first: int = 0,
    split: str = "train",
    args: Mapping[str, Json] | None = None,
    python: str | None = None,
) -> Iterator[dict[str, Json]]:
    """Examples of an environment as rows of a dataset.

    Args:
        environment: Name of the environment.
        count: Number of examples.
        first: Number of the first one.
        split: Dataset of the environment, `train` or `eval`; one without an `eval` gives its `train`.
        args: Arguments of its function `load_environment`.
        python: Python in which verifiers is installed.

    Raises:
        RecipeError: The environment cannot be loaded, or has fewer examples.
    """
    if split not in _SPLITS:
        raise RecipeError.at("split", f"is {split!r}: must be 'train' or 'eval'")
    question = json.dumps({"number": 0, "rows": [first, count], "split": split})
    command = _command(environment, args or {}, python)
    done = subprocess.run(command, input=question + "\n", stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    last = (done.stdout.splitlines() or ["{}"])[-1]
    found = json.loads(last)
    if "rows" not in found:
        reason = found.get("fatal") or found.get("error") or f"its process ended with code {done.returncode}"
        raise RecipeError.at("environment", f"verifiers gives no rows of '{environment}': {reason}")
    yield from found["rows"]


def _command(environment: str, args: Mapping[str, Json], python: str | None) -> list[str]:
    """The command of a worker.

    Raises:
        RecipeError: There is no such Python, or it has no verifiers.
    """
    interpreter = python or sys.executable
    if problem := _refusal(interpreter):
        raise RecipeError.at("environment.options.python", problem)
    # -P: the modules next to the script have names of packages.
    return [interpreter, "-P", str(_SCRIPT), environment, json.dumps(dict(args))]


@lru_cache
def _refusal(python: str) -> str | None:
    """Why a Python cannot play; None if it can."""
    if shutil.which(python) is None:
        return f"'{python}' is no program that can be run: give the path of a Python"
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('verifiers') is None)"
    command = [python, "-P", "-c", check]
    if subprocess.run(command, capture_output=True, check=False, timeout=_CHECK_S).returncode == 0:  # noqa: S603
        return None
    remedy = "python -m venv verifiers-env && verifiers-env/bin/pip install 'verifiers>=0.3,<0.4'"
    return f"'{python}' has no package verifiers: {remedy}, and set it to verifiers-env/bin/python"


def shared(command: Sequence[str]) -> PackageWorker:
    """The worker of a command, which all episodes of this process share; a new one if it has ended."""
    worker = _SHARED.get(tuple(command))
    if worker is None or worker.has_ended:
        worker = _SHARED[tuple(command)] = PackageWorker(command)
    return worker


class PackageWorker:
    """A process to which questions are written as lines of JSON with a `number`, and which answers in any order.

    It may be asked from one event loop after the other, and ends with this object. An answer with `fatal` says why it
    is about to end.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process."""
        self._process = subprocess.Popen(  # noqa: S603 - the recipe's own program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            bufsize=1,
            start_new_session=True,
        )
        self._numbers, self._answers = count(), _Answers()
        finalize(self, _stop, self._process)
        Thread(target=self._answers.read, args=(self._process,), name="worker answers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._answers.end is not None

    async def ask(self, question: Mapping[str, Json]) -> Mapping[str, Json]:
        """The answer to a question. Who gives up waiting cancels it.

        Raises:
            EnvironmentFailure: The process has ended.
        """
        number = next(self._numbers)
        answer = self._answers.expect(number)
        try:
            self._write({"number": number, **question})
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._write({"number": next(self._numbers), "cancel": number})
            raise
        finally:
            self._answers.forget(number)

    def _write(self, question: Mapping[str, Json]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which whoever waits for an answer learns
            self._process.stdin.write(json.dumps(question) + "\n")


_SHARED: dict[tuple[str, ...], PackageWorker] = {}


class _Answers:
    """Who waits for which answer. A thread reads them, which does not keep the worker alive.

    Attributes:
        end: Reason why there are no more; None while there are.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Future[Mapping[str, Json]]] = {}
        self._lock = Lock()
        self.end: str | None = None

    def expect(self, number: int) -> Future[Mapping[str, Json]]:
        """The answer of a number, once it is there."""
        with self._lock:
            if self.end is not None:
                raise EnvironmentFailure("infrastructure", self.end)
            future = self._waiting[number] = Future()
        return future

    def forget(self, number: int) -> None:
        """Wait for an answer no longer."""
        with self._lock:
            self._waiting.pop(number, None)

    def read(self, process: subprocess.Popen[str]) -> None:
        """Give each answer to whoever waits for it, and in the end the reason why there are no more."""
        reason = "its output above may say why"
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            reason = answer.get("fatal", reason)
            with self._lock:
                future = self._waiting.pop(answer.get("number", -1), None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)
        code = process.wait()
        with self._lock:
            self.end = f"the process ended with {exit_in_words(code)}: {reason}"
            left = list(self._waiting.values())
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(EnvironmentFailure("infrastructure", self.end))


def _stop(process: subprocess.Popen[str]) -> None:
    """End a process, and what it has started."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
