"""The folder of a run and what lies in it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from leaderless.config import Json, Recipe, RecipeError


class RunDirectory:
    """Names of the files of a run, and how they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.picture = path / "plan.svg"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.traces = path / "trace"
        self.checkpoints = path / "checkpoints"
        self.errors = path / "errors"
        self.data = path / "data"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def of(cls, recipe: Recipe) -> RunDirectory:
        """The folder that a recipe names.

        Args:
            recipe: Its name, and `run.directory`.

        Raises:
            RecipeError: It is a link, which may come with a recipe and lead anywhere.
        """
        path = Path(recipe.run.directory) / recipe.name
        if path.is_symlink():
            raise RecipeError.at(
                "name", f"folder {path} is a link to {path.readlink()}: remove it, or name its target in run.directory"
            )
        return cls(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing here; one that is killed lets go.

        Raises:
            BlockingIOError: Another process holds it; the error says which.
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
        return int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0

    def set_aside(self) -> Path:
        """Rename the folder, so that a new run can take its name; the new one may begin from the same `config.yaml`.

        Returns:
            Where it is now.
        """
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(target)
        if (target / self.config.name).exists():
            self.path.mkdir()
            shutil.copy(target / self.config.name, self.config)
        return target

    def append_metrics(self, record: Mapping[str, float]) -> None:
        """Add one step to `metrics.jsonl`.

        Args:
            record: With `step`.
        """
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(_to_line(record))

    def read_metrics(self) -> Iterator[dict[str, float]]:
        """The steps of `metrics.jsonl`, null as NaN; a line that was cut off by a crash is passed over."""
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield {name: math.nan if value is None else value for name, value in record.items()}

    def forget_after(self, step: int) -> None:
        """Drop what was logged of later steps, which are about to be done again.

        Args:
            step: The last one that is kept.
        """
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        write_atomically(self.metrics, "".join(map(_to_line, kept)))
        for file in self.samples.glob("step-*.jsonl") if self.samples.exists() else ():
            if int(file.name.removeprefix("step-").partition(".")[0]) > step:
                file.unlink()

    def write_samples(self, step: int, rank: int, samples: Iterable[Mapping[str, Json]]) -> None:
        """Keep what was asked, answered and rewarded.

        Args:
            step: That the samples belong to.
            rank: That writes them.
            samples: One mapping each.
        """
        self.samples.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        write_atomically(self.samples / f"step-{step:06d}.rank-{rank}.jsonl", text)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first.

    Args:
        folder: Of the run's checkpoints.
    """
    found = {path: re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*") if path.is_dir()}
    numbers = {path: int(match[1]) for path, match in found.items() if match}
    return sorted(numbers, key=lambda path: numbers[path])


def finite_or_none(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON can hold them, which has neither NaN nor infinity.

    Args:
        numbers: By name.
    """
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _to_line(record: Mapping[str, float]) -> str:
    return json.dumps(finite_or_none(record), allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    Args:
        path: The file.
        text: Its content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
