"""The process of one worker: `python -m leaderless.run.worker JOB`."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Self

from leaderless.base.values import Json
from leaderless.config.source import RecipeSource
from leaderless.observability.clock import in_short, total_seconds
from leaderless.observability.console import Display, console, errors
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner.workflow import load_recipe
from leaderless.run.planned_run import Planned, located, plan_evaluation, plan_training
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import STOPPED, leave_mark, reported_failures
from leaderless.worker.supervision.stop import follow_launcher


@dataclass(frozen=True)
class WorkerJob:
    """The job of the workers of one machine, which they read from a file.

    A launcher that `has_prepared` the run's folder also writes the report; with several machines, the first worker does
    both. An evaluation may name the role that answers, names a checkpoint if the weights come from one, and a file for
    scores.
    """

    task: Literal["train", "evaluate"]
    source: RecipeSource
    has_prepared: bool = True
    role: str | None = None
    checkpoint: str | None = None
    scores: str = ""

    def to_text(self) -> str:
        """The job as JSON, together with `sys.path`, as the recipe may name functions."""
        places: list[Json] = [[list(path), place] for path, place in self.source.places.items()]
        values = asdict(self) | {"source": {"settings": self.source.settings, "places": places}, "path": sys.path}
        return json.dumps(values)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a job, and look for modules where its launcher does."""
        values = json.loads(text)
        sys.path[:] = values.pop("path")
        source = values.pop("source")
        places = {tuple(key): place for key, place in source["places"]}
        return cls(source=RecipeSource(source["settings"], places), **values)


def train_as_worker(planned: Planned, place: RankInfo) -> int | None:
    """Act as one worker of a training run; return the signal that stopped it before the last step, if one did."""
    from leaderless.worker.build.process import train

    display = Display(console, is_shown=place.rank == planned.plan.leading.ranks[0])
    with located(planned.loaded), display:
        stopped_by = train(planned.recipe, planned.plan, place, display)
    if display.is_shown:
        rows = list(RunDirectory.of(planned.recipe).read_metrics())
        for row in rows if len(planned.plan.loops) > 1 else ():
            display.note(row)  # the loop that generates knows accuracies and rewards
        display.summary(f"{planned.recipe.name}: what has changed")
        for pool, seconds in total_seconds(rows).items():
            display.say(f"time of {'ranks' if '-' in pool or ',' in pool else 'rank'} {pool}: {in_short(seconds)}")
    return stopped_by


def evaluate_as_worker(planned: Planned, place: RankInfo, checkpoint: Path | None) -> dict[str, float]:
    """Act as one worker of an evaluation, of the untrained model without a checkpoint; each rank gets the scores."""
    from leaderless.worker.build.process import evaluate

    with located(planned.loaded), Display(errors, is_shown=place.rank == 0) as display:
        return evaluate(planned.recipe, planned.plan, place, display, checkpoint)


def _import_for_good() -> None:
    """Import what workers need, and never look for garbage among it: modules stay to the end of the process.

    Looking for it takes a sixth of the time of the import. Later, each look would keep the other ranks waiting.
    """
    gc.disable()
    try:
        import_module("leaderless.worker.build.process")
        gc.freeze()
    finally:
        gc.enable()


def _work(job: WorkerJob, place: RankInfo) -> None:
    loaded = load_recipe(job.source)
    _import_for_good()
    if job.task == "evaluate":
        checkpoint = Path(job.checkpoint) if job.checkpoint else None
        scores = evaluate_as_worker(plan_evaluation(loaded, job.role, place.world_size), place, checkpoint)
        if place.rank == 0:
            write_atomically(Path(job.scores), json.dumps(scores))
        return
    planned = plan_training(loaded, place.world_size)
    with ExitStack() as stack:
        if place.rank == 0 and not job.has_prepared:
            planned.check_inputs()
            stack.enter_context(planned.opened(is_restart=True, is_held=False))
            stack.enter_context(planned.reporting())
        stopped_by = train_as_worker(planned, place)
    if stopped_by is not None:
        leave_mark(STOPPED)


def main() -> None:
    """Run the job that the command line names."""
    path = Path(sys.argv[1])
    follow_launcher(path.parent)
    place = RankInfo.from_environment()
    with reported_failures(place.rank):
        _work(WorkerJob.from_text(path.read_text(encoding="utf-8")), place)


if __name__ == "__main__":
    main()
