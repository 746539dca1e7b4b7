"""A training run as one object."""

from __future__ import annotations

import json
import signal
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from leaderless.config import LoadedRecipe, Recipe, RecipeError
from leaderless.launch.nodes import Nodes
from leaderless.observability.console import print_line
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.planner import Plan
from leaderless.run.folder import check_inputs, is_finished, open_run, reporting
from leaderless.run.planned import Planned, plan_evaluation, plan_training
from leaderless.run.worker import Job, evaluate_as_worker, train_as_worker
from leaderless.supervision.stop import Interrupted
from leaderless.worker.place import Place
from leaderless.workflow import load_recipe


class Run:
    """A training run: a recipe, the folder that it writes, and what can be done with both.

    The folder belongs to the run's name. Where it holds a checkpoint, training continues from the newest one.
    """

    def __init__(self, recipe: str | Path, *overrides: str) -> None:
        """Read a recipe; nothing is started.

        Args:
            recipe: YAML file, or the folder of a run.
            overrides: Settings as `section.key=value`.

        Raises:
            RecipeError: Something in the recipe is wrong; all problems are named, each with its place.
        """
        path = Path(recipe)
        self.loaded: LoadedRecipe = load_recipe(path / "config.yaml" if path.is_dir() else path, overrides)

    @property
    def recipe(self) -> Recipe:
        """All settings."""
        return self.loaded.recipe

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run, which need not exist yet."""
        return RunDirectory.of(self.recipe)

    def plan(self, world_size: int = 1) -> Plan:
        """What every worker would do; nothing is started.

        Args:
            world_size: Number of workers.
        """
        return plan_training(self.loaded, world_size).plan

    def train(self, workers: int = 1, *, fresh: bool = False, nodes: Nodes | None = None) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        Args:
            workers: Workers on this machine. One worker is this process itself, where a debugger sees it.
            fresh: An earlier run of this name is set aside.
            nodes: Machines that train together; each makes this call.

        Raises:
            RecipeError: Something is wrong that can be seen before the first step.
            Interrupted: A signal has stopped the run, after a checkpoint if there was time for one.
            WorkersFailed: A worker has failed, and restarts did not help.
        """
        planned = self._plan_for(workers, nodes)
        check_inputs(planned)
        # Of several machines, the first worker opens the run: no launcher does so for all of them.
        with open_run(planned, fresh=fresh) if nodes is None else nullcontext():
            if is_finished(planned):
                return
            step_before = self.directory.last_step()
            try:
                with reporting(self.directory) if nodes is None else nullcontext():
                    self._start(planned, workers, nodes)
            except (Interrupted, KeyboardInterrupt) as error:
                if self.directory.last_step() >= self.recipe.steps:
                    return
                if self.directory.last_step() == step_before:
                    goes_on = f": the same command goes on from step {step_before}" if step_before else ""
                    print_line(f"stopped before another checkpoint was written{goes_on}")
                raise error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT) from None
            except Exception:
                if saved := self.directory.last_step():
                    print_line(f"saved up to step {saved}: the same command goes on from there")
                raise

    def work(self, place: Place, *, fresh: bool = False, is_restart: bool = False) -> None:
        """Be one of the workers that torchrun, or something like it, has started.

        Args:
            place: Place of this worker.
            fresh: An earlier run of this name is set aside.
            is_restart: Workers of this run have been started before.
        """
        planned = plan_training(self.loaded, place.world_size)
        # Every worker looks for itself: none may wait for others that see that there is nothing to do.
        is_done = not (fresh and not is_restart) and is_finished(planned, is_shown=place.rank == 0)
        with ExitStack() as stack:
            if place.rank == 0:
                check_inputs(planned)
                stack.enter_context(open_run(planned, fresh=fresh, is_restart=is_restart))
                if not is_done:
                    stack.enter_context(reporting(self.directory))
            if not is_done:
                train_as_worker(planned, place)

    def evaluate(
        self, checkpoint: str | Path | None = "newest", *, role: str = "policy", workers: int = 1
    ) -> dict[str, float]:
        """Answer the held-out prompts and grade the responses.

        Args:
            checkpoint: Checkpoint whose weights answer; "newest" for the run's newest one, or the untrained model where
                there is none; None for the untrained model.
            role: Role that answers.
            workers: Workers on this machine. One worker is this process itself.

        Returns:
            mean@k, and for several responses to a prompt pass@k and maj@k, by name as `evaluation/mean@1`.

        Raises:
            RecipeError: There are no held-out prompts, no reward, or no such checkpoint.
        """
        planned = plan_evaluation(self.loaded, role, workers)
        path = self._checkpoint(checkpoint)
        if workers == 1:
            return evaluate_as_worker(planned, Place.alone(), path)
        with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
            job = Job("evaluate", self.loaded.source, folder, role=role, checkpoint=str(path) if path else None)
            self._launch(job, RunDirectory(Path(folder)), workers)
            scores: dict[str, float] = json.loads(job.scores.read_text(encoding="utf-8"))
        return scores

    def export(self, path: str | Path, checkpoint: str | Path = "newest", *, role: str = "policy") -> Path:
        """Write a model as a Hugging Face folder, which transformers and vLLM load.

        Args:
            path: Folder to write.
            checkpoint: Checkpoint whose weights are written; "newest" for the run's newest one.
            role: Role whose weights are written.

        Returns:
            The folder.
        """
        from leaderless.checkpoint.export import export_model

        source = self.directory.path if checkpoint == "newest" else Path(checkpoint)
        return export_model(newest_checkpoint(source), role, Path(path))

    def _plan_for(self, workers: int, nodes: Nodes | None) -> Planned:
        """The plan. Where the number of machines may change, it is for all of them, and must fit the fewest as well."""
        if nodes is None:
            return plan_training(self.loaded, workers)
        for number in dict.fromkeys((nodes.smallest, nodes.largest)):
            try:
                planned = plan_training(self.loaded, number * workers)
            except RecipeError as error:
                note = f" (planned for {number} machines of --nodes with {workers} workers each)"
                raise RecipeError([replace(one, message=one.message + note) for one in error.problems]) from error
        return planned

    def _start(self, planned: Planned, workers: int, nodes: Nodes | None) -> None:
        if workers == 1 and nodes is None:
            stopped_by = train_as_worker(planned, Place.alone())
            if stopped_by is not None:
                raise Interrupted(stopped_by)
            return
        with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
            job = Job("train", self.loaded.source, folder, has_prepared=nodes is None)
            self._launch(job, self.directory, workers, self.recipe.run.max_restarts, nodes)

    def _launch(
        self, job: Job, directory: RunDirectory, workers: int, max_restarts: int = 0, nodes: Nodes | None = None
    ) -> None:
        """Do a job in workers of this machine."""
        from leaderless.launch.local import Launch, launch_workers
        from leaderless.launch.restarts import Restarts

        arguments = ["-m", "leaderless.run.worker", str(job.write())]
        launch = Launch(arguments, workers, directory.logs, self.recipe.run.grace_s, self.recipe.name, nodes)
        launch_workers(launch, Restarts(directory, max_restarts, print_line))

    def _checkpoint(self, checkpoint: str | Path | None) -> Path | None:
        if checkpoint is None or (checkpoint == "newest" and not self.directory.last_step()):
            return None
        return newest_checkpoint(self.directory.path if checkpoint == "newest" else Path(checkpoint))


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means.

    Args:
        path: A checkpoint, or the folder of a run.

    Raises:
        RecipeError: It is neither.
    """
    if (path / "state.json").exists():
        return path
    checkpoints = list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise RecipeError.at("", f"{path} is neither a checkpoint nor the folder of a run that has one")
    return checkpoints[-1]
