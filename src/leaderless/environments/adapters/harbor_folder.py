"""Harbor's format of tasks: a folder with task.toml, instruction.md, environment/, tests/ and solution/. No torch."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leaderless.base.values import Json
from leaderless.config import RecipeError

TESTS, SOLUTION = Path("tests/test.sh"), Path("solution/solve.sh")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<has_default>:-(?P<default>[^}]*))?\}")
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)
"""Lines at the beginning of an instruction that keep tasks out of training texts; they are not shown to policies."""


@dataclass(frozen=True)
class HarborTask:
    """A task.

    Attributes:
        folder: Its folder.
        instruction: Text that the policy is given.
        settings: Content of its task.toml.
    """

    folder: Path
    instruction: str
    settings: Mapping[str, Json]

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a folder.

        Raises:
            ValueError: It is no task, or one that cannot be played or judged; the text names it.
        """
        name = folder.name
        try:
            settings = tomllib.loads((folder / "task.toml").read_text())
            instruction = (folder / "instruction.md").read_text()
        except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"the task '{name}' cannot be read: {error}") from error
        task = cls(folder.resolve(), _CANARY.sub("", instruction), settings)
        if problem := task._problem():
            raise ValueError(f"the task '{name}' {problem}")
        return task

    @property
    def name(self) -> str:
        """Name for people."""
        return self.folder.name

    def table(self, name: str) -> Mapping[str, Json]:
        """A table of the settings; empty if there is none."""
        found = self.settings.get(name)
        return found if isinstance(found, Mapping) else {}

    def number(self, table: str, name: str, default: float) -> float:
        """A number of a table."""
        found = self.table(table).get(name)
        return float(found) if isinstance(found, int | float) else default

    def variables(self, table: str) -> Mapping[str, str]:
        """Environment variables of a table, in which `${NAME}` and `${NAME:-DEFAULT}` stand for the run's own.

        Raises:
            ValueError: One of the run's is not set.
        """
        found = self.table(table).get("env")
        return {
            name: self._resolved(str(value)) for name, value in (found if isinstance(found, Mapping) else {}).items()
        }

    def _resolved(self, text: str) -> str:
        if (found := _VARIABLE.fullmatch(text)) is None:
            return text
        value = os.environ.get(found["name"], found["default"])
        if value is None:
            raise ValueError(f"the task '{self.name}' needs the environment variable {found['name']}, which is not set")
        return value

    def _problem(self) -> str | None:
        """Reason why it cannot be played here, with the remedy; None if it can."""
        environment, verifier = self.table("environment"), self.table("verifier")
        if self.settings.get("steps"):
            return "has several steps ([[steps]]): only tasks of one step can be played"
        if environment.get("os", "linux") != "linux":
            return f"is for {environment['os']}: only tasks for linux can be played"
        if not (self.folder / TESTS).is_file():
            return f"has no verifier: it needs {TESTS}, which writes the reward"
        if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
            return "is verified in an environment of its own: only tasks that are verified in the agent's can be played"
        if any((self.folder / "environment").glob("*compose.y*ml")):
            return "has several containers: only tasks of one Dockerfile or image can be played"
        needs = next((key for key in ("gpus", "tpu", "mcp_servers", "healthcheck") if environment.get(key)), None)
        return needs and f"needs environment.{needs}: only tasks without can be played"


def read_tasks(folder: str | Path) -> Iterator[HarborTask]:
    """All tasks in a folder, by name.

    Raises:
        RecipeError: There is none, or some cannot be played or judged; each is named.
    """
    problems, tasks = list[str](), list[HarborTask]()
    for file in sorted(Path(folder).glob("*/task.toml")):
        try:
            tasks.append(HarborTask.read(file.parent))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise RecipeError.at("folder", "; ".join(problems))
    if not tasks:
        raise RecipeError.at("folder", f"'{folder}' holds no tasks: each is a folder in it, with a task.toml")
    yield from tasks
