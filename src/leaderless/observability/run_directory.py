"""The folder of a run, and what lies in it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.observability.events import GuardEvent

if TYPE_CHECKING:
    from leaderless.config import Recipe

MANIFEST = "manifest.json"
"""List of the files of a checkpoint; a folder without it is not a checkpoint."""
SAY_EVERY_S = 60.0
"""Shortest time between two messages about the same file."""


class RunDirectory:
    """Names of the files of a run, and how they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.say: Callable[[str], None] | None = None
        """Called if a file for people to read cannot be written, and training continues; if None, errors are raised."""
        self._said: dict[str, float] = {}
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.picture = path / "plan.svg"
        self.profile = path / "profile.json"
        self.metrics = path / "metrics.jsonl"
        self.proof = path / "proof.jsonl"
        self.events = path / "events.jsonl"
        self.roll_backs = path / "roll_backs.json"
        self.journal = path / "journal"
        self.doors = path / "doors"
        self.limits = path / "limits.json"
        self.samples = path / "samples"
        self.episodes = path / "episodes"
        self.traces = path / "trace"
        self.checkpoints = path / "checkpoints"
        self.errors = path / "errors"
        self.answers = path / "answers"
        self.data = path.with_name(".data")  # shared by all runs next to this one
        self.logs = path / "logs"
        self.loggers = path / "loggers"
        self.live = path / "live"
        self.offload = path / "offload"
        self.stop = path / "stop"

    @classmethod
    def of(cls, recipe: Recipe) -> RunDirectory:
        """The folder that a recipe names; a RecipeError if it is a link, which may have come with the recipe."""
        path = Path(recipe.run.directory) / recipe.name
        if path.is_symlink():
            raise RecipeError.at(
                "name", f"folder {path} is a link to {path.readlink()}: remove it, or name its target in run.directory"
            )
        return cls(path)

    @classmethod
    def offload_of(cls, recipe: Recipe) -> Path:
        """The folder of files for what is offloaded to the disk."""
        own = recipe.run.offload_folder
        return cls.of(recipe).offload if own is None else Path(own)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here; a BlockingIOError names the process that does so now.

        When a process is killed, others may write.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        path = self.path.with_name(f".{self.path.name}.lock")
        is_mine = False
        while not is_mine:
            with path.open("a+", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    file.seek(0)
                    raise BlockingIOError(file.read()) from error
                # Whoever held it before removes the file, perhaps after it was opened here.
                is_mine = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
                if is_mine:
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}")
                    file.flush()
                    try:
                        yield
                    finally:
                        path.unlink(missing_ok=True)

    def last_step(self) -> int:
        """The step of the newest checkpoint; 0 when there is none."""
        checkpoints = list_checkpoints(self.checkpoints)
        return step_of(checkpoints[-1]) if checkpoints else 0

    def set_aside(self, *, keep_limits: bool = False) -> Path:
        """Rename the folder, so that a new run can take its name and begin from the same `config.yaml`.

        Args:
            keep_limits: Whether the new run is the same, and keeps bounds that were lowered for lack of memory.

        Returns:
            The new path.
        """
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(target)
        for file in (self.config, *([self.limits] if keep_limits else ())):
            if (target / file.name).exists():
                self.path.mkdir(exist_ok=True)
                shutil.copy(target / file.name, file)
        return target

    def append_event(self, event: str, details: Mapping[str, Json]) -> None:
        """Add an event to `events.jsonl`. Any process may call this; a line is written at once."""
        record = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details}
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def note_reward_error(self, step: int, rank: int, reward: str, error: str) -> None:
        """Add an error of a reward to `events.jsonl`, if it is the first of the run."""
        if not self.first_reward_error():
            with self.may_fail(self.events):
                self.append_event("reward_failed", {"step": step, "rank": rank, "reward": reward, "error": error})

    def first_reward_error(self) -> str:
        """Name and error of the first reward that failed, as `note_reward_error` wrote them; empty if none did."""
        for line, _ in self.read_events():
            event = json.loads(line)
            if event["event"] == "reward_failed":
                return f"{event.get('reward')}: {event.get('error')}"
        return ""

    def note_failure(self, step: int, rank: int, kind: str, error: str) -> None:
        """Add a failure of an episode to `events.jsonl`, if it is the first of its kind in the run."""
        if not self.first_failure(kind):
            with self.may_fail(self.events):
                self.append_event("episode_failed", {"step": step, "rank": rank, "kind": kind, "error": error})

    def first_failure(self, kind: str) -> str:
        """Error of the first failure of a kind, as `note_failure` wrote it; empty if there was none."""
        for line, _ in self.read_events():
            event = json.loads(line)
            if event["event"] == "episode_failed" and event.get("kind") == kind:
                return str(event.get("error"))
        return ""

    def journal_of(self, channel: str) -> Path:
        """The journal of a channel; its arrow would mean something else to a shell."""
        return self.journal / f"{channel.replace('->', '-to-').replace('=>', '-to-')}.jsonl"

    def metrics_of(self, log: str) -> Path:
        """The file of a log with a name; the training loop's has none."""
        return self.metrics.with_name(f"metrics-{log}.jsonl") if log else self.metrics

    def read_metrics(self) -> Iterator[dict[str, float]]:
        """The steps of `metrics.jsonl`, each with what other logs know about it, null as NaN.

        Steps that only other logs have are left out, but for what was measured before the first one. A line that was
        cut off by a crash is skipped.
        """
        others: dict[Json, dict[str, Json]] = {}
        for path in sorted(self.path.glob("metrics-*.jsonl")):
            for record in read_lines(path, "step"):
                others.setdefault(record["step"], {}).update(record)
        if 0 in others:
            yield _numbers(others.pop(0))
        for record in read_lines(self.metrics, "step"):
            yield _numbers(others.get(record["step"], {}) | record)

    def read_events(self) -> Iterator[tuple[str, GuardEvent | None]]:
        """The lines of `events.jsonl`, each with the guard's event if it is one; cut-off lines are skipped."""
        for line in self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else ():
            try:
                record = json.loads(line)
                is_guard = record.pop("event") == "guard"
                del record["time"]
                yield line, GuardEvent.from_json(record) if is_guard else None
            except (json.JSONDecodeError, TypeError, AttributeError, KeyError):
                continue

    def forget_events(self, last_of: Callable[[str], int], num_roll_backs: int = 0) -> None:
        """Drop the events of iterations that are about to be done again, given the last one of each node.

        Those that ended an attempt at these, and those before the last roll-back, are history and stay.
        """
        lines = list(self.read_events())
        history = [
            line
            for line, event in lines
            if event is None
            or event.step <= last_of(event.node)
            or event.num_roll_backs < num_roll_backs
            or event.action == "stop"
        ]
        if len(history) < len(lines):
            write_atomically(self.events, "".join(f"{line}\n" for line in history))

    def forget_samples(self, step: int, evaluated: int, is_own: Callable[[int], bool] = lambda _: True) -> None:
        """Drop the samples of later steps and later evaluations, of ranks for which a function says that it is due."""
        for file in self.samples.glob("*-*.jsonl") if self.samples.exists() else ():
            kind, _, rest = file.name.partition("-")
            number, _, rank = rest.removesuffix(".jsonl").partition(".rank-")
            if int(number) > (step if kind == "step" else evaluated) and is_own(int(rank)):
                file.unlink()

    def write_samples(
        self,
        step: int,
        rank: int,
        samples: Iterable[Mapping[str, Json]],
        kind: Literal["step", "evaluation"] = "step",
    ) -> list[str]:
        """Write the prompts, responses and rewards of a training step, or of the evaluation after it; returns lines."""
        lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
        with self.may_fail(self.samples):
            path = self.samples / f"{kind}-{step:06d}.rank-{rank}.jsonl"
            write_atomically(path, "".join(f"{line}\n" for line in lines))
        return lines

    @contextmanager
    def may_fail(self, what: Path) -> Iterator[None]:
        """Let training continue when a file for people to read cannot be written, if `say` is set."""
        try:
            yield
        except OSError as error:
            if self.say is None:
                raise
            if time.monotonic() - self._said.get(str(what), -math.inf) > SAY_EVERY_S:
                self._said[str(what)] = time.monotonic()
                self.say(f"{what} cannot be written: {error.strerror}; training continues: make room")


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return sorted((path for path in named if (path / MANIFEST).exists()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written after, by the name of its folder."""
    return int(checkpoint.name.removeprefix("step-"))


def finite_or_none(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """The same numbers for JSON, which has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def read_lines(path: Path, number: str) -> Iterator[dict[str, Json]]:
    """The lines of a file that have an integer under the name `number`; those that a crash cut off are left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get(number), int):
                yield record


def _numbers(record: Mapping[str, Json]) -> dict[str, float]:
    return {name: math.nan if value is None else cast("float", value) for name, value in record.items()}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, of text or bytes, so that it is complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
