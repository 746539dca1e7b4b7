"""Environments of the package verifiers, as programs that lead episodes. Imports neither torch nor verifiers.

The package does not go together with others that this one needs, so it lives in a Python environment of its own. Each
rank keeps a process of that Python, which plays all of its episodes and asks the policy by its address.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters.worker import shared
from leaderless.environments.programs.chat import Chat
from leaderless.environments.protocol import EpisodeFailed, Task

_SCRIPT = Path(__file__).with_name("verifiers_worker.py")
_SPLITS = ("train", "eval")
_CHECK_S = 30.0


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
            Failure: The process has ended.
        """
        example, split = task.get("example"), task.get("split")
        if not isinstance(example, int) or split not in _SPLITS:
            raise EpisodeFailed("the row is no example of verifiers: make rows with make_rows")
        address = {"base_url": chat.base_url, "api_key": chat.api_key}
        found = await shared(self._command).ask({"example": example, "split": split, **address})
        # A question that was refused because of the recipe's limits is an error to verifiers, and here the end.
        if "error" in found and (chat.overflow is None or "reward" not in found):
            raise EpisodeFailed(f"verifiers: {found['error']}")
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
