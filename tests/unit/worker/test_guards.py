"""The decision of each guard about an update, what it remembers, and what a run does about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console
from tests.unit.recipes import make_recipe

from leaderless.config.run import GuardsConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.console import Display
from leaderless.observability.events import GUARDS, GuardEvent, GuardStop, strongest
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.stages.context import Grader, StageContext
from leaderless.stages.mini_batches import (
    NORM_WINDOW,
    STEPS_BETWEEN_WARNINGS,
    GuardedNumbers,
    find_breaches,
    guarded_step,
)
from leaderless.training.engine import Trainable, UpdateInfo
from leaderless.worker.agreement import StepEnd, agree
from leaderless.worker.supervision.guards import Guards, RollBack

GROUP = ProcessGroup((0,), 0)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("settings", "numbers", "said"),
    [
        ({}, (0.5, 1e9, GuardedNumbers(0.0, 0.5)), []),
        ({}, (NAN, 1.0), [("non_finite_loss", "skip")]),
        ({"non_finite_loss": "warn"}, (-INF, 1.0), [("non_finite_loss", "warn")]),
        ({}, (0.5, INF), [("non_finite_gradient", "skip")]),
        ({"non_finite_gradient": "stop"}, (NAN, NAN), [("non_finite_loss", "skip"), ("non_finite_gradient", "stop")]),
        ({"grad_norm_limit": 2.0}, (0.5, 2.0), []),
        ({"grad_norm_limit": 2.0}, (0.5, 2.1), [("grad_norm_limit", "skip")]),
        ({"grad_norm_limit": 2.0, "grad_norm_action": "roll_back"}, (0.5, 2.1), [("grad_norm_limit", "roll_back")]),
        ({"grad_norm_factor": 3.0}, (0.5, 1e9), []),
        ({"grad_norm_factor": 3.0}, (0.5, 6.0, GuardedNumbers(), 2.0), []),
        ({"grad_norm_factor": 3.0}, (0.5, 6.1, GuardedNumbers(), 2.0), [("grad_norm_factor", "skip")]),
        (
            {"grad_norm_factor": 3.0, "grad_norm_limit": 9.0},
            (0.5, 6.1, GuardedNumbers(), 2.0),
            [("grad_norm_factor", "skip")],
        ),
        (
            {"grad_norm_factor": 3.0, "grad_norm_limit": 9.0},
            (0.5, INF, GuardedNumbers(), 2.0),
            [("non_finite_gradient", "skip")],
        ),
        ({"entropy_limit": 0.1}, (0.5, 1.0, GuardedNumbers(0.1)), []),
        ({"entropy_limit": 0.1}, (0.5, 1.0, GuardedNumbers(0.09)), [("entropy_limit", "warn")]),
        (
            {"entropy_limit": 0.1, "entropy_action": "stop"},
            (0.5, 1.0, GuardedNumbers(0.09)),
            [("entropy_limit", "stop")],
        ),
        ({"entropy_limit": 0.1}, (0.5, 1.0), []),
        ({}, (0.5, 1.0, GuardedNumbers(None, 0.49)), [("effective_samples_limit", "warn")]),
        ({"effective_samples_limit": None}, (0.5, 1.0, GuardedNumbers(None, 0.01)), []),
        (
            {"effective_samples_limit": 0.9},
            (0.5, 1.0, GuardedNumbers(None, 0.89)),
            [("effective_samples_limit", "warn")],
        ),
        (
            {"effective_samples_action": "skip"},
            (0.5, 1.0, GuardedNumbers(2.0, 0.1)),
            [("effective_samples_limit", "skip")],
        ),
    ],
)
def test_a_guard_speaks_beyond_its_limit_and_not_at_it(settings, numbers, said) -> None:
    breaches = find_breaches(GuardsConfig(**settings), *numbers)
    assert [(breach.guard, breach.action) for breach in breaches] == said


class Engine:
    """An engine with given gradient norms, one after the other."""

    def __init__(self, *norms: float) -> None:
        self.norms = list(norms)
        self.made: list[bool] = []

    def optimizer_step(self, allow: Callable[[float], bool]) -> UpdateInfo:
        norm = self.norms.pop(0)
        self.made.append(allow(norm))
        return UpdateInfo(norm, 1.0, is_made=self.made[-1])


def updates(
    engine: Engine,
    state: dict[str, float] | None = None,
    step: int = 7,
    watched: GuardedNumbers = GuardedNumbers(1.0),  # noqa: B008
    **guards: object,
) -> StageContext:
    """Make an update for each gradient of an engine."""
    recipe = make_recipe(guards=guards)
    plan = make_plan(recipe, resolve_workflow("grpo"), Cluster(1))
    context = StageContext(
        recipe=recipe,
        node=plan["policy"],
        step=step,
        process_group=GROUP,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=None,
        grade=cast("Grader", None),
        state={} if state is None else state,
        num_roll_backs=2,
    )
    while engine.norms:
        guarded_step(cast("Trainable", engine), context, 0.5, watched)
    return context


def test_numbers_of_a_mini_batch_are_those_of_all_ranks() -> None:
    assert GuardedNumbers.of([6.0, 4.0, 5.0, 9.0, 4.0]) == (1.5, 25 / 36)
    assert GuardedNumbers.of([0.0] * 5) == (None, None)


def test_too_few_effective_samples_are_a_warning_once_per_some_steps() -> None:
    state: dict[str, float] = {}
    warned = list[int]()
    for step in range(1, 2 * STEPS_BETWEEN_WARNINGS + 2):
        engine = Engine(1.0, 1.0)
        context = updates(engine, state, step, GuardedNumbers(1.0, 0.4))
        assert engine.made == [True, True], "a warning changes nothing"
        warned += [step for _ in context.events]
    assert warned == [1, 1 + STEPS_BETWEEN_WARNINGS, 1 + 2 * STEPS_BETWEEN_WARNINGS]
    event = context.events[0]
    assert "effective_samples_limit=0.5: 0.4 is below it; training continues" in str(event)
    assert "algorithm.correction" in event.remedy
    assert len(updates(Engine(1.0), state, 3, GuardedNumbers(1.0, 0.4)).events) == 1, (
        "a roll-back has led to an earlier step"
    )
    skipped = [
        updates(Engine(1.0), state, 50 + n, GuardedNumbers(1.0, 0.4), effective_samples_action="skip") for n in (0, 1)
    ]
    assert [len(one.events) for one in skipped] == [1, 1], "what has been done is always said"


def test_more_skips_in_a_row_than_allowed_stop_the_run() -> None:
    context = updates(Engine(NAN, NAN, 1.0, NAN, NAN), max_skips=2)
    assert [event.action for event in context.events] == ["skip"] * 4
    assert context.metrics.reduce(GROUP)["guard/skipped/policy"] == 4
    context = updates(Engine(NAN, NAN, NAN), max_skips=2)
    last = context.events[-1]
    assert (last.guard, last.value, last.limit, last.action) == ("max_skips", 3, 2, "stop")
    assert (last.step, last.node, last.role, last.num_roll_backs) == (7, "policy", "policy", 2)
    assert updates(Engine(NAN), max_skips=0).events[-1].action == "stop"


def test_what_a_guard_remembers_is_in_the_state_of_its_node() -> None:
    first = updates(Engine(NAN, NAN), max_skips=2)
    again = updates(Engine(NAN), dict(first.state), max_skips=2)
    assert again.events[-1].guard == "max_skips", "a run that goes on counts on"
    assert again.metrics.reduce(GROUP)["guard/skipped/policy"] == 3
    assert "guard/skipped/policy" not in updates(Engine(1.0)).metrics.reduce(GROUP)


def test_a_norm_is_compared_with_the_median_of_those_before() -> None:
    engine = Engine(1.0, 1.0, 0.0, 50.0, 1.0, 1.0, 50.0, 9.0)
    context = updates(engine, grad_norm_factor=10.0)
    expected = [True, True, False, True, True, True, False, True]
    assert engine.made == expected, "0 says nothing and is not made, and too little is known of the first 50"
    assert context.metrics.reduce(GROUP)["policy/updates_without_signal"] == 1
    assert [event.value for event in context.events] == [50.0], "in multiples of the median"
    engine = Engine(*[1.0] * NORM_WINDOW, *[9.0] * NORM_WINDOW, 80.0)
    state = updates(engine, grad_norm_factor=10.0).state
    assert engine.made[-1], "what is usual changes"
    assert [state[f"guard/norm/{i}"] for i in range(NORM_WINDOW)] == [80.0, *[9.0] * (NORM_WINDOW - 1)]
    assert not [name for name in updates(Engine(1.0, 2.0)).state if "norm" in name]


def event(step: int = 3, guard: str = "grad_norm_limit", **changes: object) -> GuardEvent:
    values = {"value": 5.0, "limit": 2.0, "action": "skip", "node": "policy", "role": "policy", "num_roll_backs": 0}
    return GuardEvent(step, guard, **(values | changes))  # type: ignore[arg-type]


def test_an_event_names_value_limit_place_and_remedy() -> None:
    text = "step 3, node 'policy' of role 'policy': guards.grad_norm_limit=2: 5 is above it; the update was left out"
    assert str(event()) == text
    low = event(guard="entropy_limit", value=0.01, limit=0.1, action="warn")
    assert "guards.entropy_limit=0.1: 0.01 is below it; training continues" in str(low)
    assert "the value is nan" in str(event(guard="non_finite_loss", value=NAN, limit=None))
    assert all(event(guard=guard).remedy for guard in GUARDS)
    assert {*GUARDS} <= {*GuardsConfig.model_fields}
    assert strongest(["skip", "stop", "warn", "roll_back"]) == "stop"
    assert strongest([]) is None


def test_ranks_agree_on_the_very_events() -> None:
    mine = StepEnd(True, False, 12, (event(value=NAN, limit=None), event(value=-INF)))
    agreed = agree(mine, GROUP)
    assert (agreed.is_stopping, agreed.data_position) == (True, 12)
    assert math.isnan(agreed.events[0].value)
    assert agreed.events[1] == mine.events[1]
    assert agree(StepEnd(False, True, 6), GROUP) == StepEnd(False, True, 6)


def no_checkpoint() -> None:
    """The newest checkpoint of a run that has none."""


def guards_of(directory: RunDirectory, **settings: object) -> Guards:
    display = Display(Console(quiet=True), is_shown=False)
    return Guards(GuardsConfig(**settings), directory, display, is_first=True)  # type: ignore[arg-type]


def test_roll_backs_are_remembered_by_those_who_come_after(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    step_4 = directory.checkpoints / "step-000004"
    guards = guards_of(directory, max_roll_backs=2)
    end = StepEnd(False, False, 42, (event(6, action="roll_back"),))
    assert guards.must_roll_back(6, end, lambda: step_4)
    again = guards_of(directory, max_roll_backs=2)
    assert again.num_roll_backs == 1
    assert again.resumed(4) == RollBack(6, 4, 42)
    assert again.resumed(6) is None, "a newer checkpoint knows its place in the data"
    assert again.must_roll_back(5, StepEnd(False, False, 54, (event(5, action="roll_back"),)), lambda: step_4)
    assert again.resumed(4) == RollBack(5, 4, 54)
    with pytest.raises(GuardStop, match=r"guards\.max_roll_backs=2: 3 is above it"):
        again.must_roll_back(6, StepEnd(False, False, 60, (event(6, action="roll_back"),)), lambda: step_4)
    assert again.resumed(2) is None
    assert guards_of(directory).num_roll_backs == 0, "steps before are done again, from the data of their own"


def test_the_strongest_action_of_a_step_is_taken(tmp_path: Path) -> None:
    guards = guards_of(RunDirectory(tmp_path))
    assert not guards.must_roll_back(3, StepEnd(False, False, 0), no_checkpoint)
    assert not (tmp_path / "events.jsonl").exists()
    assert not guards.must_roll_back(3, StepEnd(False, False, 0, (event(action="warn"), event())), no_checkpoint)
    both = (event(4, action="roll_back"), event(4, action="stop"))
    with pytest.raises(GuardStop, match=r"guards\.grad_norm_limit=2: 5 is above it; the run stops: lower the learning"):
        guards.must_roll_back(4, StepEnd(False, False, 0, both), no_checkpoint)
    with pytest.raises(GuardStop, match="there is no checkpoint to go back to"):
        guards.must_roll_back(5, StepEnd(False, False, 0, (event(5, action="roll_back"),)), no_checkpoint)
    assert [one.step for _, one in RunDirectory(tmp_path).read_events() if one] == [3, 3, 4, 4, 5, 5]


def test_events_of_steps_that_are_done_again_are_forgotten_and_history_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    kept = [
        event(2, num_roll_backs=1),
        event(4, action="roll_back", num_roll_backs=0),
        event(4, action="stop", num_roll_backs=1),
    ]
    directory.append_event("restart", {"rank": 1, "lost_steps": 3})
    for one in (*kept, event(3, num_roll_backs=1), event(9, value=NAN, num_roll_backs=1)):
        directory.append_event("guard", one.to_json())
    with directory.events.open("a") as file:
        file.write('{"time": "", "event": "guard", "step": 3, "guard": "grad_n')
    directory.forget_events(lambda _: 2, num_roll_backs=1)
    assert [one for _, one in directory.read_events()] == [None, *kept]


def test_a_share_of_failed_rewards_is_judged_by_its_pool(tmp_path: Path) -> None:
    nodes = make_plan(make_recipe(), resolve_workflow("grpo"), Cluster(1)).nodes
    guards = guards_of(RunDirectory(tmp_path), reward_failures_limit=0.25, reward_failures_action="warn")
    assert guards.judge(3, {"reward/failed_share": 0.25}, nodes) == []
    assert guards.judge(3, {}, ()) == []
    (said,) = guards.judge(3, {"reward/failed_share": 0.3}, nodes)
    assert (said.guard, said.value, said.limit, said.action, said.node) == (
        *("reward_failures_limit", 0.3, 0.25),
        *("warn", "reward"),
    )


def test_a_kind_of_failure_above_its_share_is_named_and_warned_of_once_in_twenty_steps(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    recipe = make_recipe(environment={"type": "tests.unit.environments.breaks:Breaks", "tool_format": "hermes"})
    nodes = make_plan(recipe, resolve_workflow("grpo"), Cluster(1)).nodes
    guards = guards_of(directory, failures_limit=0.25)
    shares = {"failure/tool": 0.5, "failure/grader": 0.3, "failure/policy": 1.0, "failure/sandbox": 0.25}
    found = guards.judge(3, shares, nodes)
    assert [(one.kind, one.node, one.value, one.guard, one.action) for one in found] == [
        ("tool", "rollout", 0.5, "failures_limit", "warn"),
        ("grader", "reward", 0.3, "failures_limit", "warn"),
    ], "the policy's own are no alarm, and a share at the limit is none"
    assert "guards.failures_limit=0.25: 0.5 (episodes with a failure of the kind 'tool') is above it" in str(found[0])
    assert GuardEvent.from_json(found[0].to_json()) == found[0]
    assert guards.judge(22, shares, nodes) == []
    assert [one.kind for one in guards.judge(22, shares | {"failure/sandbox": 0.3}, nodes)] == ["sandbox"]
    assert {one.kind for one in guards.judge(23, shares, nodes)} == {"tool", "grader"}
    assert guards_of(directory, failures_limit=None).judge(3, shares, nodes) == []
    stopping = guards_of(directory, failures_limit=0.25, failures_action="stop")
    assert len(stopping.judge(3, shares, nodes)) == len(stopping.judge(4, shares, nodes)) == 2
    directory.note_failure(1, 0, "grader", "math: no answer")
    directory.note_failure(2, 0, "tool", "the tool 'x' raised OSError")
    directory.note_failure(2, 1, "tool", "another one")
    assert directory.first_failure("tool") == "the tool 'x' raised OSError"
    with pytest.raises(GuardStop, match=r"mend what fails.*the first was the tool 'x' raised OSError"):
        stopping.must_roll_back(3, StepEnd(False, False, 0, tuple(stopping.judge(3, shares, nodes))), lambda: None)
