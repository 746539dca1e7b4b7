"""A stage that notes which prompts are used, in a module that kills the worker it is loaded into at a chosen moment.

The moments are in `kills.json` of the folder that `CHAOS` names, in their order. A worker is killed, as by the system,
some time after it has entered a phase: an entry of its chain, or part of a checkpoint or of a start.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch

import leaderless
from leaderless.observability.clock import Tracer
from leaderless.observability.run_directory import write_atomically
from leaderless.worker.checkpoint import checkpointer
from leaderless.worker.checkpoint.writer import CheckpointWriter

VARIABLE = "CHAOS"
RESUME, WRITE, COMMIT = "resume", "write a checkpoint", "commit a checkpoint"
"""Phases that are not entries of a chain: looking for a checkpoint, and what threads do to write one."""

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Kill:
    """Moment at which a worker is killed.

    Attributes:
        rank: Rank of the worker.
        phase: Phase that it has entered.
        step: Earliest step of the run.
        delay_s: Seconds after it entered the phase.
    """

    rank: int
    phase: str
    step: int
    delay_s: float


class Killer:
    """Waits for this worker's moment."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Read the kills.

        Args:
            folder: Folder with `kills.json`; kills that have happened are noted there.
            rank: Rank of this worker.
        """
        self._folder, self._rank, self._since = folder, rank, time.time()
        self._kills = [Kill(**kill) for kill in json.loads((folder / "kills.json").read_text())]
        self._entered: list[str] = []
        self._step, self._is_armed = 0, False

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Mark what happens inside as a phase.

        Args:
            name: Name of the phase.
            step: Step of the run, if it begins with this phase.
        """
        self._step = self._step if step is None else step
        self._entered.append(name)
        number = next((n for n in range(len(self._kills)) if not self._done(n).exists()), None)
        if number is not None and not self._is_armed and self._is_due(number, name):
            self._is_armed = True
            timer = threading.Timer(self._kills[number].delay_s, self._die, [number])
            timer.daemon = True
            timer.start()
        yield
        self._entered.remove(name)

    def _is_due(self, number: int, phase: str) -> bool:
        kill = self._kills[number]
        # A worker that has just seen another die would not be killed while at work.
        is_new = number == 0 or self._done(number - 1).stat().st_mtime < self._since
        return is_new and (kill.rank, kill.phase) == (self._rank, phase) and self._step >= kill.step

    def _done(self, number: int) -> Path:
        return self._folder / f"killed-{number}.json"

    def _die(self, number: int) -> None:
        note = {"rank": self._rank, "step": self._step, "phases": list(self._entered)}
        write_atomically(self._done(number), json.dumps(note))
        os.kill(os.getpid(), signal.SIGKILL)


def _as_phase(killer: Killer, phase: str, function: Callable[Given, Result]) -> Callable[Given, Result]:
    @functools.wraps(function)
    def within(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with killer.phase(phase):
            return function(*args, **kwargs)

    return within


def _install(killer: Killer) -> None:
    span = Tracer.span

    @contextmanager
    def watched(self: Tracer, name: str, step: int, lane: int = 0) -> Iterator[dict[str, object]]:
        with killer.phase(name, step), span(self, name, step, lane) as facts:
            yield facts

    Tracer.span = watched  # type: ignore[method-assign]
    checkpointer.newest_good = _as_phase(killer, RESUME, checkpointer.newest_good)  # type: ignore[attr-defined]
    writer = CheckpointWriter
    writer._write_files = _as_phase(killer, WRITE, writer._write_files)  # type: ignore[method-assign]
    writer.commit = _as_phase(killer, COMMIT, writer.commit)  # type: ignore[method-assign]


if VARIABLE in os.environ and "RANK" in os.environ:
    _install(Killer(Path(os.environ[VARIABLE]), int(os.environ["RANK"])))


@leaderless.stage(reads=["rewards", "rows"], writes=["rewards"])
def note_prompts(batch: leaderless.Batch, context: leaderless.StageContext) -> leaderless.Batch:
    """Write which prompts this rank has in this step, and random numbers that it draws."""
    prompts = {str(row["question"]) for row in batch.objects("rows") if isinstance(row, dict)}
    note = {"prompts": sorted(prompts), "draws": [random.random(), float(np.random.rand()), float(torch.rand(()))]}  # noqa: NPY002
    folder = Path(os.environ[VARIABLE]) / "used"
    write_atomically(folder / f"step-{context.step:06d}.rank-{context.process_group.rank}.json", json.dumps(note))
    return batch.with_columns(rewards=batch.dense("rewards"))
