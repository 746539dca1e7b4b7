"""A run of `benchmarks/gpu_real.py`: GRPO on real questions for some seconds, and what is measured meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpu_plan import Planned
from leaderless import Run
from leaderless.base.devices import first_device, setup_device
from leaderless.config.source import Setting
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.fit import Fit, fit_plan
from leaderless.worker.build.memory_bounds import available_memory
from leaderless.worker.supervision.stop import Interrupted
from real_size import NAMES, SPANS, _memory, _spans
from until import Row, rows_of

NAME = "gpu-real"
MANY_STEPS = 1_000_000
"""More steps than there is time for."""
SAMPLE_S = 0.02
PROGRESS_S = 10.0
SAVED_EVERY_S = 5.0
END_S = 20.0
"""Time after the limit in which a run may end by itself."""
ACCURACY = "evaluation/mean@1"

Results = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes:
        model: Folder of the model.
        train: File of questions to train on.
        held_out: File of held-out questions.
        columns: Columns of the question and of the answer.
        system: System message of each prompt; empty for none, as for a model without a chat template.
        num_held_out: Number of held-out questions.
        sizes: Prompts of a step, responses to each, and most tokens of a response.
        learning_rate: Learning rate.
        evaluate_every: Steps between evaluations.
        seconds: Time limit of everything.
        steps: Most steps.
        folder: Folder for the run.
        overrides: Further settings of the recipe, as `section.key=value`.
    """

    model: Path
    train: Path
    held_out: Path
    columns: tuple[str, str]
    system: str
    num_held_out: int
    sizes: tuple[int, int, int]
    learning_rate: float
    evaluate_every: int
    seconds: float
    steps: int
    folder: Path
    overrides: tuple[str, ...] = ()

    def recipe(self) -> Mapping[str, Setting]:
        """The recipe that is trained."""
        prompts, responses, tokens = self.sizes
        question, answer = self.columns
        data = {"prompt": question, "answer": answer, "system": self.system or None}
        return {
            "name": NAME,
            "workflow": "grpo",
            "models": {"policy": str(self.model)},
            "data": {
                "train": {"path": str(self.train), **data},
                "evaluation": {"path": str(self.held_out), **data},
            },
            "reward": {"math": 1.0},
            "batch": {
                "prompts_per_step": prompts,
                "responses_per_prompt": responses,
                "micro_batch_tokens": "auto",
            },
            "rollout": {"max_response_tokens": tokens, "max_sequences": max(prompts * responses, self.num_held_out)},
            "optimizer": {"learning_rate": self.learning_rate},
            "evaluation": {"every_steps": self.evaluate_every, "max_prompts": self.num_held_out},
            "checkpoint": {"every_minutes": 0, "asynchronous": False, "keep": 1},
            "run": {"directory": str(self.folder), "trace_steps": self.steps, "status_every_s": 1.0},
            "loggers": [],
            "steps": self.steps,
        }


@dataclass
class Watch:
    """Watches a run in this process: its memory, its log, and the clock.

    Attributes:
        directory: Folder of the run.
        seconds: Time limit of everything.
        path: File of the results, which is written now and then.
        known: Results that are known from the beginning.
        begin: Time at which everything began.
        peak: Most bytes so far, and the time at which there were as many.
        is_late: Whether the run was asked to stop for lack of time.
    """

    directory: RunDirectory
    seconds: float
    path: Path
    known: Results
    begin: float
    peak: tuple[int, float] = (0, 0.0)
    is_late: bool = False
    loaded_s: float | None = None
    """Seconds until the run was loaded and its untrained model had answered."""
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._threads = [
            threading.Thread(target=one, name="watch", daemon=True) for one in (self._sample, self._follow, self._limit)
        ]
        self._is_training = True

    @property
    def spent(self) -> float:
        return time.time() - self.begin

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def trained(self) -> None:
        """Take no more notice of memory: training has ended."""
        self._is_training = False

    def _sample(self) -> None:
        while not self.ended.wait(SAMPLE_S) and self._is_training:
            used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _memory(os.getpid())
            if used > self.peak[0]:
                self.peak = used, time.time()

    def _follow(self) -> None:
        """Say how far the run is, keep what it has measured, and ask it to stop in time."""
        said = saved = 0.0
        while not self.ended.wait(0.5):
            rows = rows_of(self.directory.path)
            if rows and self.loaded_s is None:
                self.loaded_s = self.spent
            if self._is_training and not self.is_late and self.spent > self.seconds - self.reserve(rows):
                self.is_late = True
                (self.directory.path / "stop").touch()
            if self.spent - saved > SAVED_EVERY_S:
                saved = self.spent
                write(self.path, self.known | measured(rows))
            if self.spent - said > PROGRESS_S:
                said = self.spent
                print(f"{said:.0f} of {self.seconds:.0f} s: {progress(rows)}, {self._doing()}", flush=True)

    def reserve(self, rows: Sequence[Row]) -> float:
        """Seconds for the rest of a step, and for what follows it: a checkpoint, which is loaded, and an evaluation."""
        if self.loaded_s is None:
            return 0.0
        longest = max((row.get("time/step", 0.0) for row in rows), default=0.0)
        return longest + 1.3 * self.loaded_s

    def _doing(self) -> str:
        with suppress(OSError, ValueError):
            return str(json.loads((self.directory.live / "rank-0.json").read_text(encoding="utf-8"))["doing"])
        return "loading" if self._is_training else "evaluating"

    def _limit(self) -> None:
        """End what does not end in time."""
        if self.ended.wait(max(0.0, self.seconds - self.spent)):
            return
        self.is_late = True
        for _ in range(2):  # the second one interrupts a step
            os.kill(os.getpid(), signal.SIGINT)
            if self.ended.wait(END_S / 2):
                return
        problem = f"it did not end within {END_S:.0f} s after its limit"
        write(self.path, self.known | measured(rows_of(self.directory.path)) | {"problem": problem})
        print(f"stopped: {problem}; {self.path} has what was measured", flush=True)
        os._exit(1)


def progress(rows: Sequence[Row]) -> str:
    """What is known, in one line."""
    found = measured(rows)
    accuracies = list(found["accuracy_by_step"].values())
    text = f"step {found['steps']}"
    if found["rewards"]:
        text += f", reward {found['rewards'][-1]:.3f}, generation {found['generation_tokens_per_s']:,.0f} tokens/s"
    return text + (f", accuracy {accuracies[-1]:.3f}" if accuracies else "")


def measured(rows: Sequence[Row]) -> Results:
    """What the log of a run says. Speeds are medians without the first step, in which kernels are compiled."""
    steps = [row for row in rows if row["step"]]
    later = steps[1:] or steps

    def median(name: str) -> float | None:
        found = [row[name] for row in later if name in row]
        return statistics.median(found) if found else None

    parts = ("load", "rollout", "reward", "old", "advantage", "policy")
    return {
        "steps": int(steps[-1]["step"]) if steps else 0,
        "accuracy_by_step": {str(int(row["step"])): row[ACCURACY] for row in rows if ACCURACY in row},
        "rewards": [row["reward/mean"] for row in steps],
        "truncated": [row["rollout/truncated"] for row in steps],
        "generation_tokens_per_s": median("rollout/tokens_per_s"),
        "tokens_per_s": median("throughput/tokens_per_s"),
        "response_tokens": median("rollout/response_tokens"),
        "step_s": median("time/step"),
        "part_s": {part: seconds for part in parts if (seconds := median(f"time/{part}")) is not None},
        "mismatch": {
            "abs_mean": median("mismatch/abs_mean"),
            "abs_max": max((row["mismatch/abs_max"] for row in steps), default=None),
            "kl": median("mismatch/kl"),
        },
    }


def write(path: Path, results: Results) -> None:
    write_atomically(path, json.dumps(results, indent=1) + "\n")


def planned(run: Run) -> tuple[Fit, Planned]:
    """What `plan` says of the run with the memory that there is now."""
    device, plan = setup_device(0, 1).device, run.plan()
    is_cpu = device.type == "cpu"
    fit = fit_plan(run.recipe, plan, available_memory(device, 1), is_cpu=is_cpu, has_pages=device.type == "cuda")
    estimate = estimate_memory(run.recipe, plan, fit.pass_tokens, room=fit.room)
    assert estimate is not None, "the size of the model is known"
    return fit, Planned(estimate.cpu if is_cpu else estimate.accelerator, 0)


def planned_bytes(memory: Planned) -> Mapping[str, int]:
    """Bytes by phase: of the process on a CPU, and on a GPU those that torch allocates."""
    if not torch.cuda.is_available():
        return {phase: memory.memory.totals[phase] for phase in memory.memory.phases}
    return {phase: memory.allocated(phase) for phase in memory.memory.phases}


def measure(options: Options, path: Path) -> Results:
    """Train for some time, and write what was measured.

    Raises:
        RecipeError: The model or the questions cannot be used.
    """
    begin = time.time()
    shutil.rmtree(options.folder / NAME, ignore_errors=True)
    run = Run(options.recipe(), *options.overrides)
    fit, memory = planned(run)
    sizes = planned_bytes(memory)
    device = first_device()
    known: Results = {
        "model": options.model.name,
        "device": "CPU" if device is None else device.name,
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "questions": options.num_held_out,
        "prompts": options.sizes[0],
        "responses": options.sizes[1],
        "longest_response": options.sizes[2],
        "pass_tokens": fit.pass_tokens,
        "seconds": options.seconds,
        "planned_phase": max(sizes, key=sizes.__getitem__),
        "planned_bytes": max(sizes.values()),
        "planned": memory.memory.to_json(),
    }
    with _ended_by_sigterm(), Watch(run.directory, options.seconds, path, known, begin) as watch:
        problem, error = "", None
        try:
            run.train(fresh=True)
        except (Interrupted, KeyboardInterrupt):
            problem = "" if watch.is_late else "stopped by a signal"
        except Exception as failure:  # noqa: BLE001 - it is raised again when what was measured is written
            problem, error = f"{type(failure).__name__}: {failure}", failure
        watch.trained()
        results = known | measured(rows_of(run.directory.path)) | _peak(watch, run.directory)
        if not problem:
            results["accuracy_by_step"] |= _final_accuracy(run, results, watch)
    results["spent_s"] = round(watch.spent, 1)
    if problem:
        results["problem"] = problem
    write(path, results)
    shutil.rmtree(run.directory.checkpoints, ignore_errors=True)
    if error is not None:
        raise error
    return results


def _final_accuracy(run: Run, results: Results, watch: Watch) -> dict[str, float]:
    """The accuracy after the last step that was saved; nothing if it is known, or if time is over before."""
    step = str(run.directory.last_step())
    if step == "0" or step in results["accuracy_by_step"]:
        return {}
    write(watch.path, results)
    try:
        return {step: run.evaluate()[ACCURACY]}
    except KeyboardInterrupt:
        return {}


def _peak(watch: Watch, directory: RunDirectory) -> Results:
    """The most memory, and the phase in which it was in use."""
    size, at = watch.peak
    spans = _spans(directory.traces / "rank-0.json") if (directory.traces / "rank-0.json").exists() else []
    names = {short: long for long, short in NAMES.items()}
    inside = [SPANS.get(name, name) for name, begin, end in spans if begin <= at <= end]
    if inside:
        phase = names.get(inside[0], inside[0])
    else:  # spans are written at their ends
        phase = "loading" if not spans or at < spans[0][1] else "after the last stage that ended"
    found: Results = {"peak_bytes": size, "peak_phase": phase}
    if torch.cuda.is_available():
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
