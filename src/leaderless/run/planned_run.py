"""A planned run: checks of what its recipe names, its folder, and the report at its end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leaderless.base.named_functions import load_own
from leaderless.config import LoadedRecipe, Problem, Recipe, RecipeError, load_section, nearest
from leaderless.config.layout import LayoutConfig, ScheduleConfig
from leaderless.config.models import ComputeType
from leaderless.config.packaged_files import find_packaged
from leaderless.observability.console import print_line, print_path
from leaderless.observability.loggers.registry import loggers_running
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Cluster, Plan, answering, make_plan
from leaderless.planner.checks.model_files import family_of
from leaderless.planner.engines import choose_engine
from leaderless.planner.graph.adapters import optimizer_of
from leaderless.planner.placement.replanning import alternatives
from leaderless.planner.placement.stage_seconds import Profile, read_profile, settings_of
from leaderless.planner.show.placement import choice_line
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.workflow import WorkflowRecipe, load_recipe, spec_of
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.planner.workflow.read import ANSWER, JUDGE, evaluation_workflow
from leaderless.run.input_files import check_rows, problem_of_model
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.settings import leaves_of

if TYPE_CHECKING:
    from leaderless.planner.placement.search import PlacementChoice

CORRECTION = "correction.type"
"""End of the key of what corrects samples."""
RATE = "optimizer.learning_rate"
FREE_KEYS = (
    "steps",
    "run.",
    "checkpoint.",
    "evaluation.",
    "layout.",
    "schedule.",
    "batch.micro_batch_tokens",
    "data.prefetch_steps",
    "rollout.max_sequences",
    "guards.",
    "algorithm.repeat.",
    "loggers",
    "online.host",
    "online.port",
    "online.feedback_timeout_s",
)
"""Settings that may differ when a run continues: they change no numbers, only how long and where it runs, and its
response to bad numbers."""


@dataclass(frozen=True)
class Planned:
    """A recipe and what the planner made of it."""

    loaded: WorkflowRecipe
    plan: Plan
    choice: PlacementChoice | None = None
    """Why the layouts are what they are, if the planner has chosen them."""

    @property
    def recipe(self) -> Recipe:
        """The settings."""
        return self.loaded.recipe

    @property
    def directory(self) -> RunDirectory:
        """The folder of the run."""
        return RunDirectory.of(self.recipe)

    def check_inputs(self) -> None:
        """Check the models, files, rewards and environment that the recipe names; no model is loaded."""
        from leaderless.distributed.one_sided.library import check_nixl
        from leaderless.environments.registry import try_environment
        from leaderless.observability.loggers.registry import check_loggers
        from leaderless.rewards.registry import check_rewards

        recipe = self.recipe
        problems: list[Problem] = []
        writer = answering(self.plan.instances).role
        for role, model in recipe.models.items():
            reads = role == writer and not model.body and family_of(model) != "leaderless_body"
            if model.path and (reason := problem_of_model(model.path, needs_tokenizer=reads)):
                problems.append(Problem(f"models.{role}", reason))
        held_out = {"data.evaluation": recipe.data.evaluation} if recipe.data.evaluation else {}
        training = recipe.data.train_sets() if recipe.online is None else {}
        for key, dataset in {**training, **held_out}.items():
            try:
                check_rows(dataset, key)
            except RecipeError as error:
                problems += error.problems
        with located(self.loaded):
            if problems:
                raise RecipeError(problems)
            if self.choice is not None:
                from leaderless.run.stage_profile import check_machine

                check_machine(self.choice.profile)
            if recipe.run.transport == "nixl":
                check_nixl()
            check_loggers(recipe.loggers)
            check_rewards(recipe.reward, in_worker=recipe.run.reward_processes == 0)
            if recipe.environment is not None:
                try_environment(recipe.environment)
            if own := PRODUCTS[recipe.product].check:
                cast("Callable[[Recipe], None]", load_own(own))(recipe)

    def is_finished(self, *, is_shown: bool = True) -> bool:
        """Whether the run is complete; if so, and if `is_shown`, print that there is nothing to do."""
        if self.directory.last_step() < self.recipe.steps:
            return False
        if is_shown:
            advice = "Raise `steps` to continue, or pass --fresh (in Python: fresh=True) to begin anew."
            print_line(f"{self.directory.path} has all of its {self.recipe.steps} steps: nothing to do. {advice}")
        return True

    @contextmanager
    def opened(self, *, fresh: bool = False, is_restart: bool = False, is_held: bool = True) -> Iterator[None]:
        """Prepare the run's folder, and keep other runs out of it if it `is_held`.

        `fresh` sets an earlier run of this name aside; the files of a run that has begun before stay. A RecipeError
        says that another process writes into the folder, or that it cannot be written, or holds a run with other
        settings.
        """
        with ExitStack() as stack:
            if is_held:
                try:
                    stack.enter_context(self.directory.held())
                except BlockingIOError as error:
                    reason = f"is the name of a run that {error} is writing now: take another name, or end that process"
                    raise self.loaded.locate(RecipeError.at("name", reason)) from error
                except OSError:
                    pass  # a folder that cannot be written is reported with its reason when it is prepared
            self._prepare(fresh=fresh and not is_restart, is_restart=is_restart)
            yield

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Let the recipe's loggers follow the run, and write the report at the end, even if the run fails.

        A report that cannot be written must not hide why.
        """
        with loggers_running(self.recipe.loggers, self.directory.path, print_line):
            try:
                yield
            except BaseException:
                try:
                    self._report()
                except OSError as error:
                    print_line(f"the report could not be written: {error}")
                raise
            self._report()

    def _report(self) -> None:
        if self.directory.config.exists() and self.directory.metrics.exists():
            from leaderless.observability.report.page import write_report

            print_path("report", write_report(self.directory.path))

    def _prepare(self, *, fresh: bool, is_restart: bool) -> None:
        directory = self.directory
        has_checkpoint = directory.last_step() > 0
        if has_checkpoint and not fresh:
            self._check_same_settings()
        elif has_checkpoint or (not is_restart and any(record["step"] for record in directory.read_metrics())):
            print_path("the earlier run is now in", directory.set_aside(keep_limits=not fresh))
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            if not is_restart:
                directory.stop.unlink(missing_ok=True)
            if not has_checkpoint and not is_restart:
                # A run without a step is not kept, and its notes do not apply to the new one.
                shutil.rmtree(directory.traces, ignore_errors=True)
                for file in (directory.events, *([directory.limits] if fresh else [])):
                    file.unlink(missing_ok=True)
            with tempfile.TemporaryFile(dir=directory.path):
                pass
        except OSError as error:
            reason = f"folder {directory.path} cannot be written: {error.strerror}"
            raise self.loaded.locate(RecipeError.at("run.directory", reason)) from error
        if self.choice is not None:
            write_atomically(directory.profile, self.choice.profile.model_dump_json(indent=1) + "\n")
            print_line(choice_line(self.choice))

    def _check_same_settings(self) -> None:
        """Refuse to continue a run with settings other than those it was begun with."""
        try:
            begun_with = load_recipe(self.directory.config).recipe
        except RecipeError as error:
            remedy = "; if the run was begun with another version, correct this file, or pass --fresh to set it aside"
            raise error.noted(remedy) from error
        before, now = (
            {".".join(path): value for path, value in leaves_of(recipe.model_dump(mode="json")) if value != {}}
            for recipe in (begun_with, self.recipe)
        )
        problems = [
            Problem(
                key,
                f"is {now.get(key)!r}, but run '{self.recipe.name}' was begun with {before.get(key)!r}: "
                "give the new run another name, or pass --fresh to set the old one aside",
            )
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key) and not key.startswith(FREE_KEYS)
        ]
        if _peaks(begun_with) == _peaks(self.recipe):  # a rate that is left out, perhaps of a default that was a number
            problems = [one for one in problems if not one.key.endswith(RATE)]
        if _corrections(begun_with) == _corrections(self.recipe):  # `auto`, which may be what was written once
            problems = [one for one in problems if not one.key.endswith(CORRECTION)]
        if problems:
            raise self.loaded.locate(RecipeError(problems))


def _corrections(recipe: Recipe) -> dict[str, str]:
    """What corrects the samples of the roles that a recipe names."""
    found = {role: recipe.as_seen_by(role).algorithm.correction for role in (*recipe.models, *recipe.roles)}
    return {role: one.type if one.has_weights else "none" for role, one in found.items()}


def _peaks(recipe: Recipe) -> dict[str, float]:
    """The peak learning rates of the roles that a recipe names, and of others, as ""."""
    models = {role: recipe.model_of(role) for role in (*recipe.models, *recipe.roles)}
    known = {role: optimizer_of(recipe.as_seen_by(role), model).peak for role, model in models.items() if model}
    return {**known, "": recipe.optimizer.peak}


@contextmanager
def located(loaded: LoadedRecipe) -> Iterator[None]:
    """Let errors about a recipe name the file and line of the setting."""
    try:
        yield
    except RecipeError as error:
        raise loaded.locate(error) from None  # the error says all that a user needs


def on_devices(loaded: WorkflowRecipe, compute_dtype: ComputeType) -> WorkflowRecipe:
    """A recipe for other devices than this machine's: models that name no type compute in theirs."""
    update = {"compute_dtype": compute_dtype}
    models = {
        role: one if update.keys() <= one.model_fields_set else one.model_copy(update=update)
        for role, one in loaded.recipe.models.items()
    }
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"models": models}))


def plan_training(loaded: WorkflowRecipe, num_workers: int, *, fresh: bool = False) -> Planned:
    """Plan a run; a RecipeError gives every reason why it does not work with this number of workers.

    A run that continues, and is not begun `fresh`, has layouts chosen by the seconds that it was begun with.
    """
    with located(loaded):
        planned = _plan(loaded, num_workers, fresh=fresh)
        alternatives(planned.recipe, planned.plan)  # report their problems now
        return planned


def plan_machines(loaded: WorkflowRecipe, nodes: Nodes, workers: int) -> Planned:
    """Plan a run for the largest number of machines; the smallest number must have a plan as well."""
    for number in dict.fromkeys((nodes.smallest, nodes.largest)):
        try:
            planned = plan_training(loaded, number * workers)
        except RecipeError as error:
            raise error.noted(f" (planned for {number} machines of --nodes with {workers} workers each)") from error
    return planned


def plan_evaluation(loaded: WorkflowRecipe, role: str | None, num_workers: int) -> Planned:
    """Plan an evaluation, in which one role answers on all workers, whatever the recipe says about training.

    Without a role it is `evaluation.role`, or the policy. A RecipeError says that the recipe has no held-out prompts,
    no reward or no such role.
    """
    recipe = loaded.recipe
    role = role or recipe.evaluation.role or "policy"
    model = recipe.model_of(role)
    with located(loaded):
        if recipe.data.evaluation is None:
            raise RecipeError.at("data.evaluation", "must name the held-out prompts")
        if recipe.data.evaluation.preferences is not None:
            raise RecipeError.at(
                "data.evaluation",
                "has responses that are compared, not prompts to answer: training itself evaluates them "
                "(evaluation.every_steps); name a dataset of prompts, and a reward",
            )
        if not recipe.reward_names:
            raise RecipeError.at("reward", "must name a reward, or the recipe an environment, to tell what is correct")
        if model is None:
            raise RecipeError.at("models", f"has no model for the role '{role}'{nearest(role, recipe.models)}")
        batch = recipe.batch.model_copy(update={"prompts_per_step": max(recipe.batch.prompts_per_step, num_workers)})
        checkpoint = recipe.checkpoint.model_copy(update={"best_metric": None})
        evaluation = recipe.evaluation.model_copy(update={"role": role})
        judges = {*recipe.reward.roles().values()}
        layout = _engine_layouts(loaded, role, num_workers)
        update = {
            "models": {role: model} | {name: one for name, one in recipe.models.items() if name in judges},
            "layout": layout,
            "batch": batch,
            "checkpoint": checkpoint,
            "roles": {name: one for name, one in recipe.roles.items() if name in judges},
            "placement": None,
            "schedule": ScheduleConfig(),
            "evaluation": evaluation,
        }
        recipe = recipe.as_seen_by(role).model_copy(update=update)
        workflow = evaluation_workflow(role, is_judged=bool(judges))
        return _plan(replace(loaded, recipe=recipe, workflow=workflow), num_workers)


def _engine_layouts(loaded: WorkflowRecipe, role: str, num_workers: int) -> dict[str, LayoutConfig]:
    """The layouts of an evaluation on all workers: engines that span ranks in training do so, if there are enough.

    The engine of the role that answers may span other ranks than the judges' engines.
    """
    recipe, layouts = loaded.recipe, dict[str, LayoutConfig]()
    for node in loaded.workflow.nodes:
        spec, given = spec_of(node), recipe.layout.get(node.name, LayoutConfig())
        generates = any(own == role and spec.roles[name] == "generate" for name, own in spec.roles_of(node).items())
        judges = spec.grades and bool(recipe.reward.roles())
        sizes = {"tp": given.tp, "pp": given.pp, "cp": given.cp}
        fitting = {**sizes, "ep": given.ep} if num_workers % prod(sizes.values()) == 0 else {}
        for name in [ANSWER] * generates + [JUDGE] * judges:
            layouts.setdefault(name, LayoutConfig(**fitting))
    return layouts


def _plan(loaded: WorkflowRecipe, num_workers: int, *, fresh: bool = False) -> Planned:
    recipe, workflow = loaded.recipe, loaded.workflow
    cluster = Cluster(num_workers, choose_engine(recipe.rollout))
    if recipe.placement is not None:
        from leaderless.planner.placement.search import choose_layout  # it imports numpy

        choice = choose_layout(recipe, workflow, cluster, _seconds(loaded, cluster, fresh=fresh))
        return Planned(replace(loaded, recipe=choice.best.recipe), choice.best.plan, choice)
    return Planned(loaded, make_plan(recipe, workflow, cluster))


def _seconds(loaded: WorkflowRecipe, cluster: Cluster, *, fresh: bool) -> Profile:
    """Seconds by which layouts are chosen: those that a run was begun with, else measured ones, else modeled ones."""
    recipe, placement, directory = loaded.recipe, loaded.recipe.placement, RunDirectory.of(loaded.recipe)
    assert placement is not None, "checked by the caller"
    if not fresh and directory.last_step() and directory.profile.exists():
        saved = read_profile(directory.profile)
        if saved.settings == settings_of(recipe):
            return saved
    if placement.cluster is None or Path(placement.profile).exists():
        return read_profile(Path(placement.profile))
    from leaderless.planner.placement.modeled_seconds import modeled_profile  # it imports numpy

    try:
        constants = load_section(find_packaged(Path(placement.cluster)), ClusterConfig)
    except RecipeError as error:
        keys = (".".join(filter(None, ("placement.cluster", one.key))) for one in error.problems)
        raise RecipeError([replace(one, key=key) for one, key in zip(error.problems, keys, strict=True)]) from error
    described = on_devices(loaded, constants.device.compute_dtype).recipe
    return modeled_profile(described, loaded.workflow, cluster, constants)
