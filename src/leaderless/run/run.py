"""A training run as one object."""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from leaderless.base.leftover_processes import leftovers_ended
from leaderless.config import Recipe, RecipeError
from leaderless.config.source import Setting
from leaderless.observability.console import print_line
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.planner import Plan
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.metrics_table import MetricsTable
from leaderless.run.planned_run import Planned, located, plan_evaluation, plan_machines, plan_training
from leaderless.run.settings import check_importable, read_settings
from leaderless.run.worker import WorkerJob, evaluate_as_worker, train_as_worker
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import WorkersFailed
from leaderless.worker.supervision.stop import Interrupted

if TYPE_CHECKING:
    from leaderless.run.standalone_model import Prompt


class Run:
    """A training run: a recipe, the folder that it writes, and what can be done with both.

    The folder belongs to the run's name. Where it holds a checkpoint, training continues from the newest one.
    """

    def __init__(
        self, recipe: Recipe | Mapping[str, Setting] | str | Path, /, *overrides: str, **settings: Setting
    ) -> None:
        """Read a recipe; nothing is started.

        Where a YAML file names a function or a file, a program may give the object: a function, a `Workflow`, a dataset
        as a list of rows or of the library `datasets`, a model as a pair `(model, tokenizer)` of `transformers`.

        Args:
            recipe: YAML file, the folder of a run, the name of a built-in workflow, or settings by section.
            overrides: Settings as `section.key=value`.
            settings: Settings by section, or by dotted key as in `**{"optimizer.learning_rate": 1e-5}`; a section
                changes the settings that it names.

        Raises:
            RecipeError: Something in the recipe is wrong; all problems are named, each with its place.
        """
        self.loaded = read_settings(recipe, overrides, settings)

    def __repr__(self) -> str:
        """The run's name and its newest saved step."""
        return f"Run({self.recipe.name!r}: step {self.directory.last_step()} of {self.recipe.steps})"

    @property
    def recipe(self) -> Recipe:
        """All settings."""
        return self.loaded.recipe

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run, which need not exist yet."""
        return RunDirectory.of(self.recipe)

    def plan(self, world_size: int = 1) -> Plan:
        """Plan of the work of a number of workers; nothing is started."""
        return plan_training(self.loaded, world_size).plan

    @property
    def metrics(self) -> MetricsTable:
        """Metrics that have been logged so far, one row for each step."""
        return MetricsTable(list(self.directory.read_metrics()))

    def train(
        self,
        workers: int = 1,
        *,
        fresh: bool = False,
        nodes: Nodes | None = None,
        apart: bool = False,
        in_process: bool = True,
    ) -> MetricsTable:
        """Train to the last step, from the newest checkpoint if there is one.

        Args:
            workers: Number of workers on this machine.
            fresh: Whether to set an earlier run of this name aside.
            nodes: Machines that train together; each makes this call.
            apart: Whether this process exists for the run alone, so that signals may end it.
            in_process: Whether a single worker is this process itself, where a debugger sees it, rather than a process
                of its own, which is started again when it fails. Several workers always have processes of their own.

        Returns:
            The metrics of all steps.

        Raises:
            RecipeError: Something is wrong that can be seen before the first step.
            Interrupted: A signal has stopped the run, after a checkpoint if there was time for one.
            WorkersFailed: A worker has failed, and restarts did not help.
            RuntimeError: torchrun has started this process as one worker of several.
        """
        if RankInfo.is_given():
            raise RuntimeError(
                "torchrun has started this process as one of several workers: call work() in each of them"
            )
        is_alone = in_process and workers == 1 and nodes is None
        if not is_alone:
            check_importable(self.loaded)
        planned = (
            plan_training(self.loaded, workers, fresh=fresh)
            if nodes is None
            else plan_machines(self.loaded, nodes, workers)
        )
        planned.check_inputs()
        # With several machines, the first worker opens the run, as no launcher could do so for all.
        with planned.opened(fresh=fresh) if nodes is None else nullcontext():
            if planned.is_finished():
                return self.metrics
            step_before = self.directory.last_step()
            try:
                with planned.reporting() if nodes is None else nullcontext():
                    self._start(planned, workers, nodes, apart=apart, is_alone=is_alone)
            except (Interrupted, KeyboardInterrupt) as error:
                if self.directory.last_step() >= self.recipe.steps:
                    return self.metrics
                if self.directory.last_step() == step_before:
                    goes_on = f": the same command continues from step {step_before}" if step_before else ""
                    print_line(f"stopped before another checkpoint was written{goes_on}")
                raise error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT) from None
            except Exception as error:
                if isinstance(error, WorkersFailed) and error.failure.trace:
                    error.add_note(error.failure.trace)
                if saved := self.directory.last_step():
                    print_line(f"saved up to step {saved}: the same command continues from there")
                raise
        return self.metrics

    def work(self, place: RankInfo | None = None, *, fresh: bool = False, is_restart: bool = False) -> None:
        """Act as one of the workers that torchrun or a similar launcher has started.

        Args:
            place: Place of this worker; the one that torchrun has given to this process if None.
            fresh: Whether to set an earlier run of this name aside.
            is_restart: Whether workers of this run have been started before.
        """
        place = place or RankInfo.from_environment()
        planned = plan_training(self.loaded, place.world_size, fresh=fresh and not is_restart)
        # Every worker finds out for itself: none may wait for others that have nothing to do.
        is_done = not (fresh and not is_restart) and planned.is_finished(is_shown=place.rank == 0)
        with ExitStack() as stack:
            if place.rank == 0:
                planned.check_inputs()
                stack.enter_context(planned.opened(fresh=fresh, is_restart=is_restart))
                if not is_done:
                    stack.enter_context(planned.reporting())
            if not is_done:
                stack.enter_context(_kept_generators())
                train_as_worker(planned, place)

    def evaluate(
        self, checkpoint: str | Path | None = "newest", *, role: str | None = None, workers: int = 1
    ) -> dict[str, float]:
        """Answer the held-out prompts and grade the responses.

        Args:
            checkpoint: Checkpoint whose weights answer; "newest" for the run's newest one, or the untrained model where
                there is none; None for the untrained model.
            role: Role that answers; by default `evaluation.role`, or the policy if the recipe does not set it.
            workers: Number of workers on this machine. A single worker is this process itself.

        Returns:
            mean@k, and for several responses to a prompt pass@k and maj@k, by name as `evaluation/mean@1`.

        Raises:
            RecipeError: There are no held-out prompts, no reward, or no such checkpoint.
        """
        planned = plan_evaluation(self.loaded, role, workers)
        path = self._checkpoint(checkpoint)
        if workers == 1:
            with _kept_generators():
                return evaluate_as_worker(planned, RankInfo.alone(), path)
        with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
            file = Path(folder) / "scores.json"
            checkpoint = str(path) if path else None
            job = WorkerJob("evaluate", self.loaded.source, role=role, checkpoint=checkpoint, scores=str(file))
            self._launch(job, RunDirectory(Path(folder)), workers)
            scores: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return scores

    def generate(
        self,
        prompts: Sequence[Prompt],
        checkpoint: str | Path | None = "newest",
        *,
        role: str = "policy",
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> list[str]:
        """Have the model answer prompts, which are written as the dataset's are.

        The model is loaded for each call, so ask all prompts at once.

        Args:
            prompts: Texts, chats as lists of messages, or rows of a dataset.
            checkpoint: Checkpoint whose weights answer, as for `evaluate`.
            role: Role that answers.
            temperature: Temperature of sampling; from `evaluation` if None.
            max_tokens: Length at which a response is cut; `rollout.max_response_tokens` if None.

        Returns:
            One response for each prompt. Where the temperature is above 0, equal prompts have responses of their own.

        Raises:
            RecipeError: A prompt cannot be written as the dataset's are, or is too long for the model.
        """
        from leaderless.run.standalone_model import answer

        with located(self.loaded), _kept_generators():
            return answer(self.recipe, prompts, self._checkpoint(checkpoint), role, temperature, max_tokens)

    def report(self) -> Path:
        """Write `report.html`, curves, timing, graph and samples in one file; returns its path."""
        from leaderless.observability.report.page import write_report

        return write_report(self.directory.path)

    def export(
        self, path: str | Path, checkpoint: str | Path = "newest", *, role: str = "policy", merge: bool = False
    ) -> Path:
        """Write a model as a Hugging Face folder, which transformers and vLLM load, or its adapters as `peft` does.

        Args:
            path: Folder to write.
            checkpoint: Checkpoint whose weights are written; "newest" for the run's newest one.
            role: Role whose weights are written.
            merge: Whether adapters are merged into their model, which is written then.
        """
        from leaderless.worker.checkpoint.export import export_model

        source = self._checkpoint(checkpoint) or newest_checkpoint(self.directory.path)
        return export_model(source, role, Path(path), merge=merge)

    def _start(self, planned: Planned, workers: int, nodes: Nodes | None, *, apart: bool, is_alone: bool) -> None:
        if is_alone:
            # A process that exists for the run alone may end all that are left over.
            with _kept_generators(), leftovers_ended() if apart else nullcontext():
                stopped_by = train_as_worker(planned, RankInfo.alone(is_guest=not apart))
            if stopped_by is not None:
                raise Interrupted(stopped_by)
            return
        job = WorkerJob("train", self.loaded.source, has_prepared=nodes is None)
        shown_rank = planned.plan.leading.ranks[0]
        self._launch(job, self.directory, workers, self.recipe.run.max_restarts, nodes, shown_rank)

    def _launch(
        self,
        job: WorkerJob,
        directory: RunDirectory,
        workers: int,
        max_restarts: int = 0,
        nodes: Nodes | None = None,
        shown_rank: int = 0,
    ) -> None:
        """Do a job with workers on this machine, of which one writes to the terminal."""
        from leaderless.run.launch.agent import Agent, Launch
        from leaderless.run.launch.restarts import Restarts

        entry, run = "leaderless.run.worker", self.recipe.run
        launch = Launch(entry, job.to_text(), workers, directory.logs, run.grace_s, self.recipe.name, nodes, shown_rank)
        Agent(launch, Restarts(directory, max_restarts, print_line)).run()

    def _checkpoint(self, checkpoint: str | Path | None) -> Path | None:
        if checkpoint is None or (checkpoint == "newest" and not self.directory.last_step()):
            return None
        return newest_checkpoint(self.directory.path if checkpoint == "newest" else Path(checkpoint))


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Give the program its global generators back as they were; training seeds them at each step."""
    import numpy as np
    import torch

    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    devices = range(torch.accelerator.device_count())
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the program's own
    try:
        with torch.random.fork_rng(devices, device_type=accelerator.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run's folder."""
    if (path / "state.json").exists():
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise RecipeError.at("", f"{path} is neither a checkpoint nor the folder of a run that has one")
    return checkpoints[-1]
