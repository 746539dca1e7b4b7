"""The plan that is in force: the recipe's own, one with a layout that a checkpoint names, or that of a followed run.

A run that generates continuously writes down when its layout changed, as what it has made depends on that: a run that
follows it has to change its own then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError, dump_recipe
from leaderless.config.layout import LayoutConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, read_lines, write_atomically
from leaderless.planner import Plan
from leaderless.planner.placement.replanning import with_layout

LAYOUT_FILE = "layout.json"
"""File of a checkpoint with the layout that has replaced the recipe's, if one has."""


def replacement_of(plan: Plan, recipe: Recipe) -> str:
    """Note of a checkpoint about a layout that has replaced the recipe's; an empty text if none has."""
    if plan.layout == recipe.layout:
        return ""
    sections = {"recipe": recipe.layout, "in_force": plan.layout}
    facts = {
        name: {node: config.model_dump(mode="json") for node, config in layout.items()}
        for name, layout in sections.items()
    }
    return json.dumps({"world_size": plan.world_size, **facts}, indent=1)


def plan_in_force(checkpoint: Path | None, recipe: Recipe, known: Plan, world: ProcessGroup) -> Plan:
    """The plan to continue a checkpoint with: the one that it was made under. All ranks call it together.

    Where the recipe's `layout` or the number of ranks is another one than then, the recipe's own plan is in force. Only
    the first rank reads the checkpoint; `known` is a plan of the recipe for these ranks.
    """
    is_reader = world.rank == world.ranks[0]
    file = checkpoint / LAYOUT_FILE if checkpoint is not None and is_reader else None
    text = file.read_text(encoding="utf-8") if file is not None and file.exists() else ""
    text = world.broadcast_text(text, world.ranks[0], "the layout that is in force")
    layout, facts = recipe.layout, json.loads(text) if text else {}
    if facts.get("world_size") == known.world_size and _layout_from(facts["recipe"]) == recipe.layout:
        layout = _layout_from(facts["in_force"])
    if layout == known.layout:
        return known
    try:
        return with_layout(recipe, layout, known)
    except RecipeError:  # other settings have changed since
        return with_layout(recipe, recipe.layout, known)


def _layout_from(known: Mapping[str, Mapping[str, Json]]) -> dict[str, LayoutConfig]:
    return {node: LayoutConfig.model_validate(values) for node, values in known.items()}


def write_description(directory: RunDirectory, recipe: Recipe, plan: Plan, say: Callable[[str], None]) -> None:
    """Write the resolved recipe, the plan and its picture to the folder of the run."""
    write_atomically(directory.config, dump_recipe(recipe))
    write_atomically(directory.plan, json.dumps(plan.to_json(), indent=1))
    try:
        from leaderless.planner.show.picture import draw_plan
    except ModuleNotFoundError as error:
        say(f"the plan is not drawn: {error.name} is not installed")
    else:
        write_atomically(directory.picture, draw_plan(plan))


LAYOUTS_FILE = "layouts.jsonl"
"""File among the journals of a run."""


def note_layout(directory: RunDirectory, plan: Plan, trained: int, made: int) -> None:
    """Write down that a plan is in force after a step of training, where another layout was before. One rank calls it.

    All ranks that generate have handed over `made` iterations then.
    """
    file = directory.journal / LAYOUTS_FILE
    journal = LineFile(file, "iteration", directory.may_fail)
    with directory.may_fail(file):
        journal.cut_after(trained)
    line: dict[str, Json] = {
        "iteration": trained,
        "made": made,
        "world_size": plan.world_size,
        "layout": {node: config.model_dump(mode="json") for node, config in plan.layout.items()},
    }
    before = [*read_lines(file, "iteration")]
    if not before or _place(before[-1]) != _place(line):
        journal.append(line)


class PastLayouts:
    """The changes of layout in a run that is followed."""

    def __init__(self, journal: Path, recipe: Recipe) -> None:
        """Read past layouts from the folder of the run's journals; a run of an earlier version has none."""
        self._journal, self._recipe = journal, recipe
        # Of several lines about a step the last one counts: the run was started again there.
        lines = {int(str(line["iteration"])): line for line in read_lines(journal / LAYOUTS_FILE, "iteration")}
        before: tuple[Json, Json] | None = None
        self._lines: dict[int, Mapping[str, Json]] = {}
        for step, line in lines.items():
            if _place(line) != before:
                self._lines[step], before = line, _place(line)

    def is_due(self, trained: int) -> bool:
        """Whether the run took on another layout after a step of training that is not the last one here."""
        return trained in self._lines and trained < self._recipe.steps

    def made_before_next(self, trained: int) -> int:
        """Iterations to hand over before the layout changes again after a step of training; all if it does not."""
        found = (int(str(line["made"])) for step, line in self._lines.items() if step > trained)
        return min([self._recipe.steps, *found])

    def plan_after(self, trained: int, like: Plan) -> Plan | None:
        """The plan that was in force after a step of training, for the cluster of another one; None if it is that one.

        Raises:
            RecipeError: The run went on with another number of workers, or its layout does not fit here.
        """
        line = self._lines.get(trained)
        if line is None:
            return None
        if line["world_size"] != like.world_size:
            raise RecipeError.at(
                "run.follow",
                f"from step {trained} on the run in {self._journal.parent} had {line['world_size']} workers, but here "
                f"{like.world_size} follow it: start as many",
            )
        layout = _layout_from(cast("Mapping[str, Mapping[str, Json]]", line["layout"]))
        return None if layout == like.layout else with_layout(self._recipe, layout, like)


def _place(line: Mapping[str, Json]) -> tuple[Json, Json]:
    return line["world_size"], line["layout"]
