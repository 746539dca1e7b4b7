"""The choice of a layout: the fastest of those that fit into memory, by measured seconds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from leaderless.config import Recipe, RecipeError
from leaderless.planner.engines import engine_of
from leaderless.planner.layout import Cluster
from leaderless.planner.make_plan import make_plan
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.fit import fit_plan
from leaderless.planner.placement.candidates import Allowed, Candidate, Rough, candidates_of
from leaderless.planner.placement.node_seconds import StepSeconds
from leaderless.planner.placement.stage_seconds import Profile, check_profile
from leaderless.planner.placement.step_seconds import Predicted, predict
from leaderless.planner.plan import Plan
from leaderless.planner.simulate.cluster import GIB
from leaderless.planner.workflow import Workflow

NUM_SHOWN = 4
"""Number of layouts that are explained: the choice and the next best."""
NUM_PLANNED = 16
"""Number of candidates, the best by a first estimate, for which a plan is made."""
MANY_RANKS, FEW_PLANS = 128, 6
"""From this number of ranks on, plans are made for this number of candidates."""
EQUAL = 1.02
"""A simpler layout, a smaller lag or fewer windows, is taken where it needs at most this many times the seconds."""


@dataclass(frozen=True)
class Option:
    """A layout with its plan and predicted seconds."""

    candidate: Candidate
    recipe: Recipe
    plan: Plan
    predicted: Predicted


@dataclass(frozen=True)
class PlacementChoice:
    """Chosen layout, with the reason.

    Attributes:
        best: The choice.
        others: The next best, in order of their seconds; the first may be a little faster, but is less simple.
        refused: Layouts that looked promising but cannot run, each with the reason.
        num_candidates: Number of layouts that were compared.
        profile: Seconds by which they were compared.
        without: Best layout of the workers that have a device of their own; None if all of them do.
    """

    best: Option
    others: tuple[Option, ...]
    refused: tuple[tuple[Candidate, str], ...]
    num_candidates: int
    profile: Profile
    without: Option | None = None


def choose_layout(recipe: Recipe, workflow: Workflow, cluster: Cluster, profile: Profile) -> PlacementChoice:
    """Choose the ranks of each node, and how far generation is ahead: a pure function, equal on every rank.

    `PlacementChoice.best.recipe` is the recipe with `layout`, `channels` and windows written out and without
    `placement`; `best.plan` is its plan. To plan again with newly measured seconds, give a profile that holds them. A
    layout of the recipe is not looked at, and a channel is kept.

    Raises:
        RecipeError: The profile is one of other settings, or nothing fits into memory.
    """
    check_profile(profile, recipe)
    plain = recipe.model_copy(update={"layout": {}, "placement": None})
    base = make_plan(plain.model_copy(update={"channels": {}}), workflow, cluster)
    _check_known(base, profile)
    steps = StepSeconds(profile, recipe)
    allowed = allowed_by(recipe, base)
    candidates = list(candidates_of(base, allowed))
    if not candidates:
        left = cluster.world_size - allowed.helpers
        raise RecipeError.at(
            "placement.helpers",
            f"is {allowed.helpers}, but it leaves {left} of {cluster.world_size} workers a device, of which one must "
            f"generate, and {allowed.helpers} train, in a workflow with one node that generates: start at least "
            f"{2 * allowed.helpers + 1} workers with as many prompts or more, or leave helpers out",
        )
    candidates, refused = without_impossible(candidates, plain, workflow, cluster)
    lockstep = Rough(base, profile, steps)
    ahead = Rough(_plan_ahead(candidates, plain, workflow, cluster) or base, profile, steps)
    ranked = sorted(candidates, key=lambda one: (ahead if one.lag else lockstep).seconds(one))
    options: list[Option] = []
    num_planned = NUM_PLANNED if cluster.world_size < MANY_RANKS else FEW_PLANS
    for candidate in sorted(ranked, key=lambda one: bool(one.pools)):  # the one without pools is always compared
        if len(options) >= num_planned:
            break
        try:
            option = _plan(candidate, plain, workflow, cluster, profile, steps)
        except RecipeError as error:
            refused.append((candidate, str(error)))
            continue
        if candidate.windows == 1 or option.plan.windowed is not None:
            options.append(option)
    if not options:
        raise RecipeError.at("placement", f"no layout fits {cluster.world_size} ranks: {refused[0][1]}")
    options.sort(key=lambda option: option.predicted.seconds)
    best = _simplest(options)
    others = tuple(option for option in options if option is not best)[: NUM_SHOWN - 1]
    without = None
    if allowed.helpers and recipe.placement is not None:
        alone = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"helpers": 0})})
        own_devices = replace(cluster, world_size=cluster.world_size - allowed.helpers)
        without = choose_layout(alone, workflow, own_devices, profile).best
    return PlacementChoice(best, others, tuple(refused[: NUM_SHOWN - 1]), len(candidates), profile, without)


def predict_step(recipe: Recipe, plan: Plan, profile: Profile) -> Predicted:
    """The seconds of a step of a plan, whoever has chosen its layouts.

    Raises:
        RecipeError: The profile is one of other settings, lacks a node, or the plan repeats nodes.
    """
    check_profile(profile, recipe)
    _check_known(plan, profile)
    return predict(plan, profile, StepSeconds(profile, recipe))


def _check_known(plan: Plan, profile: Profile) -> None:
    """Refuse a plan with a node that was not measured."""
    unknown = sorted(node.name for node in plan.nodes if node.name not in profile.stages)
    if unknown:
        ahead = ", with placement.max_lag as it is here" * bool(plan.channels)
        raise RecipeError.at(
            "placement.profile",
            f"has no seconds of node '{unknown[0]}': run `leaderless profile` with this recipe{ahead}",
        )
    if plan.repeat is not None:
        raise RecipeError.at(
            "workflow",
            f"'{plan.workflow}' repeats nodes as often as rewards ask for, which no profile tells: take a workflow "
            "without `repeat`, or write `layout` out",
        )


def _plan_ahead(candidates: list[Candidate], plain: Recipe, workflow: Workflow, cluster: Cluster) -> Plan | None:
    """A plan in which generation is ahead: it may have other nodes. None if no candidate allows one."""
    for candidate in (one for one in candidates if one.lag):
        recipe = plain.model_copy(update={"layout": candidate.layout, "channels": candidate.channels})
        with suppress(RecipeError):
            return make_plan(recipe, workflow, cluster)
    return None


def _simplest(options: list[Option]) -> Option:
    """Of the options that are about as fast as the first, the one of the smallest lag, fewest pools and windows.

    Generation that is not continuous is simpler: its numbers do not depend on time.
    """
    enough = EQUAL * options[0].predicted.seconds
    near = [option for option in options if option.predicted.seconds <= enough]

    def complexity(option: Option) -> tuple[float, ...]:
        candidate = option.candidate
        num_pools = len(set(candidate.pools.values()))
        return (bool(candidate.cache), candidate.lag, num_pools, candidate.windows, option.predicted.seconds)

    return min(near, key=complexity)


def _plan(
    candidate: Candidate, plain: Recipe, workflow: Workflow, cluster: Cluster, profile: Profile, steps: StepSeconds
) -> Option:
    """A candidate with its plan; a RecipeError if it cannot run, or does not fit into memory."""
    channels = candidate.channels or plain.channels
    recipe = plain.model_copy(update={"layout": candidate.layout, "channels": channels})
    if candidate.windows > 1:
        batch = plain.batch.model_copy(update={"windows_per_step": candidate.windows})
        recipe = recipe.model_copy(update={"batch": batch})
    plan = replace(make_plan(recipe, workflow, cluster), profile_hash=profile.digest())
    _check_known(plan, profile)
    is_cpu, available = profile.machine.accelerator is None, int(profile.machine.memory_gib * GIB)
    if plan.helpers and not is_cpu:  # a rank that helps has memory of an accelerator on which another one trains
        helping = estimate_memory(recipe, plan, plan.batch.micro_batch_tokens, among=tuple(plan.helpers))
        available -= 0 if helping is None else helping.accelerator.peak
    fit = fit_plan(recipe, plan, available, is_cpu=is_cpu)
    if fit.is_hopeless:
        raise RecipeError.at("placement", fit.problem)
    return Option(candidate, recipe, plan, predict(plan, profile, steps))


def allowed_by(recipe: Recipe, base: Plan) -> Allowed:
    """Choices that a recipe leaves to the planner, which keeps the channels and windows that it sets itself.

    Raises:
        RecipeError: Generation may be continuous, but not ahead; or there are helpers next to the recipe's channels.
    """
    placement = recipe.placement
    if placement is None:
        return Allowed()
    max_windows = placement.max_windows if recipe.batch.windows_per_step == 1 else 1
    if recipe.open_channels and placement.helpers:
        raise RecipeError.at(
            "placement.helpers",
            f"is {placement.helpers}, but the recipe has channels of its own, which say who helps: leave one of the "
            "two out",
        )
    if recipe.open_channels:
        return Allowed(max_windows=max_windows)
    max_ahead = placement.max_ahead(recipe.batch.updates_per_step)
    if placement.continuous and not max_ahead:
        raise RecipeError.at(
            "placement.max_staleness",
            f"is {placement.max_staleness}, but with batch.updates_per_step={recipe.batch.updates_per_step} rows of an "
            f"iteration ahead are older: set at least {recipe.batch.updates_per_step}, or leave continuous out",
        )
    engines = [instance.engine for instance in base.instances if instance.generates]
    keeps = all("keep" in engine_of(engine).updates for engine in engines)
    cache: Literal["keep", "recompute"] = "keep" if keeps else "recompute"
    return Allowed(placement.max_lag, max_windows, (), max_ahead, cache, placement.helpers)


def without_impossible(
    candidates: list[Candidate], plain: Recipe, workflow: Workflow, cluster: Cluster
) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """The candidates without those that generate continuously, and why, if this recipe cannot do so."""
    first = next((one for one in candidates if one.cache), None)
    if first is None:
        return candidates, []
    try:
        make_plan(plain.model_copy(update={"layout": first.layout, "channels": first.channels}), workflow, cluster)
    except RecipeError as error:
        problem = error.problems[0]
        if problem.key.startswith("channels."):
            return [one for one in candidates if not one.cache], [(first, str(error))]
    return candidates, []
