"""The journal of layouts, and runs that follow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import continuous, make_recipe

from leaderless.config import RecipeError
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, read_lines
from leaderless.worker.asynchronous.journal import cut_journals, journal_file
from leaderless.worker.replan.active_plan import PastLayouts, note_layout

NARROW, WIDE = continuous("0", "1-3"), continuous("0-1", "2-3")


def test_a_run_that_follows_takes_on_what_was_in_force_after_each_step(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for plan, trained, made in [(NARROW, 0, 0), (NARROW, 2, 4), (WIDE, 4, 6), (NARROW, 4, 5), (WIDE, 9, 11)]:
        note_layout(directory, plan, trained, made)
    recipe = make_recipe(channels={"rollout": {"capacity": 1, "mode": "continuous"}}, layout=NARROW.layout, steps=20)
    past = PastLayouts(directory.journal, recipe)
    assert [step for step in range(20) if past.is_due(step)] == [0, 9], "it was started again after step 4"
    assert [past.made_before_next(step) for step in (0, 4, 9)] == [11, 11, 20]
    assert past.plan_after(0, NARROW) is None
    found = past.plan_after(9, NARROW)
    assert found is not None
    assert found.layout == WIDE.layout
    shorter = PastLayouts(directory.journal, recipe.model_copy(update={"steps": 9}))
    assert not shorter.is_due(9), "ranks that generate have ended then"
    assert shorter.made_before_next(4) == 9
    note_layout(directory, WIDE, 3, 5)
    assert not PastLayouts(directory.journal, recipe).is_due(9), "what comes after a checkpoint is done again"


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    note_layout(RunDirectory(tmp_path), NARROW, 0, 0)
    other = continuous("0", "1", world_size=2)
    with pytest.raises(RecipeError, match="had 4 workers, but here 2 follow it: start as many"):
        PastLayouts(tmp_path / "journal", make_recipe()).plan_after(0, other)


def test_journals_of_ranks_that_there_are_no_more_are_cut_as_well(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    files = [journal_file(directory.journal, "rollout", shard) for shard in range(3)]
    for file in files:
        for iteration in (1, 2, 3):
            LineFile(file, "iteration").append({"iteration": iteration})
    cut_journals(directory, "rollout", 0, 2, 1)
    left = [[line["iteration"] for line in read_lines(file, "iteration")] for file in files]
    assert left == [[1], [1, 2, 3], [1]]
