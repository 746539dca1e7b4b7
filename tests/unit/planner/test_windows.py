"""Which entries of a schedule run window by window."""

from __future__ import annotations

import pytest

from leaderless.config import Recipe, RecipeError
from leaderless.planner import Cluster, Plan, Reshard, RunNode, Windowed, make_plan
from leaderless.planner.workflow import Workflow, resolve_workflow, stage

APART = {"sample": {"ranks": "0-1"}, "score": {"ranks": "2-3"}, "all": {"ranks": "2-3"}}


@stage(reads=["prompt_tokens"], writes=["level"], streams=True)
def level(batch: object, context: object) -> object:
    """Adds columns to the data's rows."""
    return batch


@stage(reads=["prompt_tokens"], writes=["tokens"], rows="expand", streams=True)
def sample(batch: object, context: object) -> object:
    """Makes samples."""
    return batch


@stage(reads=["tokens"], writes=["score"], streams=True)
def score(batch: object, context: object) -> object:
    """Works on any rows."""
    return batch


@stage(reads=["score"], has_effect=True)
def use_all(batch: object, context: object) -> object:
    """Needs all rows."""
    return batch


@stage(reads=["score", "level"], has_effect=True)
def use_level(batch: object, context: object) -> object:
    """Needs all rows, and the columns added to the data's rows."""
    return batch


def plan_of(layout: dict[str, dict[str, str]], windows: int, *, with_level: bool = False) -> Plan:
    workflow = Workflow("streams")
    if with_level:
        workflow = workflow.node("level", run=f"{__name__}:level")
    workflow = workflow.node("sample", run=f"{__name__}:sample", after="level" if with_level else ())
    workflow = workflow.node("score", run=f"{__name__}:score", after="sample")
    workflow = workflow.node("all", run=f"{__name__}:{'use_level' if with_level else 'use_all'}", after="score")
    recipe = Recipe.model_validate(
        {
            "name": "streams",
            "workflow": "streams",
            "models": {},
            "steps": 1,
            "data": {"train": {"path": "none.jsonl"}},
            "batch": {"prompts_per_step": 8, "windows_per_step": windows},
            "layout": layout,
        }
    )
    return make_plan(recipe, workflow, Cluster(4))


def test_nodes_that_stream_run_one_window_behind_each_change_of_layout() -> None:
    windowed = plan_of(APART, 2).windowed
    assert windowed is not None
    assert [str(action) for action in windowed.body] == ["sample", "reshard(sample->2-3)", "score"]
    assert windowed.delays == (0, 0, 1)
    assert [(str(action), window) for action, window in windowed.turns()] == [
        ("sample", 0),
        ("reshard(sample->2-3)", 0),
        ("sample", 1),
        ("reshard(sample->2-3)", 1),
        ("score", 0),
        ("score", 1),
    ]


def test_each_rank_walks_its_part_of_the_stream() -> None:
    plan = plan_of(APART, 3)
    (first,) = (action for action in plan.chain(0) if isinstance(action, Windowed))
    (last,) = (action for action in plan.chain(3) if isinstance(action, Windowed))
    assert [type(action) for action in first.body] == [RunNode, Reshard]
    assert (first.delays, last.delays) == ((0, 0), (0, 1))
    assert [window for action, window in last.turns() if isinstance(action, RunNode)] == [0, 1, 2]


@pytest.mark.parametrize(("layout", "windows"), [({}, 4), (APART, 1)])
def test_nothing_streams_where_no_rows_change_ranks_or_one_window_is_asked_for(
    layout: dict[str, dict[str, str]], windows: int
) -> None:
    assert plan_of(layout, windows).windowed is None


def test_the_data_s_own_rows_come_in_windows_of_each_layout_s_own_and_do_not_stream() -> None:
    layout = APART | {"level": {"ranks": "2-3"}}
    plan = plan_of(layout, 2, with_level=True)
    assert "reshard(level->0-1)" in [str(action) for action in plan.schedule], (
        "windows of one layout are not the other's"
    )
    assert plan.windowed is None, "what reads such a column waits for all of it"


def test_plans_with_other_windows_do_not_start_together() -> None:
    assert plan_of(APART, 2).hash() != plan_of(APART, 3).hash()


def test_repeated_nodes_refuse_windows() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "repeat",
            "workflow": "dapo",
            "models": {"policy": "none"},
            "steps": 1,
            "data": {"train": {"path": "none.jsonl"}},
            "batch": {"windows_per_step": 2},
            "reward": {"math": 1.0},
        }
    )
    with pytest.raises(RecipeError, match=r"batch.windows_per_step.* is 2, but the workflow 'dapo' repeats nodes"):
        make_plan(recipe, resolve_workflow("dapo"), Cluster(2))
