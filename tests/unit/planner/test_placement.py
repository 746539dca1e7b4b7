"""Layouts that the planner chooses by measured seconds."""

from __future__ import annotations

import heapq
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.placement.candidates import Allowed, candidates_of
from leaderless.planner.placement.node_seconds import StepSeconds, fit_seconds, fullest_place
from leaderless.planner.placement.search import choose_layout, predict_step
from leaderless.planner.placement.stage_seconds import (
    MachineIdentity,
    Point,
    Profile,
    StageSeconds,
    read_profile,
    settings_of,
)
from leaderless.planner.placement.step_seconds import _pace
from leaderless.planner.show.placement import reason
from leaderless.planner.workflow import resolve_workflow
from leaderless.run.stage_profile import Spans, check_machine, profile_of

GRPO = resolve_workflow("grpo")
TAIL = [10] * 56 + [200] * 8
"""Lengths of eight groups of eight: the responses to one prompt are long."""
JUDGED = {"models": {"policy": "/no/such/model", "judge": "/no/such/judge"}, "reward": {"judge": {"role": "judge"}}}


def auto_recipe(max_lag: int = 0, **sections: object):
    batch = {"prompts_per_step": 16, "responses_per_prompt": 8}
    return make_recipe(**({"batch": batch, "placement": {"max_lag": max_lag}} | sections))


def make_profile(recipe, rollout: StageSeconds, policy: StageSeconds, **changes: object) -> Profile:
    """A profile in which only two nodes take time."""
    names = [node.name for node in make_plan(recipe.model_copy(update={"placement": None}), GRPO, Cluster(1)).nodes]
    settings: dict[str, object] = {
        "machine": MachineIdentity(processor="made up", memory_gib=64),
        "settings": settings_of(recipe),
        "world_size": 2,
        "stages": dict.fromkeys([*names, "old"], StageSeconds()) | {"rollout": rollout, "policy": policy},
        "lengths": TAIL,
    }
    return Profile.model_validate(settings | changes)


def test_the_law_of_a_stage_is_found_from_what_it_took():
    law = StageSeconds(fixed_s=0.1, row_s=0.01, longest_s=0.001)
    sizes = [(4, 40, 20), (8, 90, 33), (8, 60, 10), (4, 33, 15), (4, 70, 40)]
    found = fit_seconds([Point(*size, law.of(*size)) for size in sizes])
    assert found.of(16, 300, 50) == pytest.approx(law.of(16, 300, 50))
    assert found.error < 1e-9


def test_a_stage_that_was_measured_at_one_size_is_in_proportion_to_its_tokens():
    found = fit_seconds([Point(4, 40, 10, 0.2), Point(4, 40, 10, 0.2)])
    assert found.of(8, 80, 10) == pytest.approx(0.4)


def turns(lengths: list[int], places: int, pause: float) -> float:
    """Tokens of the fullest place, worked out response by response."""
    busy = [0.0] * places
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length + pause)
    return max(busy)


def test_the_fullest_place_is_that_of_responses_that_take_turns():
    lengths = np.random.default_rng(0).integers(1, 100, size=(3, 30)).astype(float)
    expected = [turns(row.tolist(), 4, 0) for row in lengths]
    assert fullest_place(lengths, 4).tolist() == expected
    assert fullest_place(np.pad(lengths, ((0, 0), (0, 5))), 4).tolist() == expected
    # Of very many rows only the last turns are followed.
    many = np.random.default_rng(1).integers(1, 100, size=1000).astype(float)
    assert fullest_place(many, 4) == pytest.approx(turns(many.tolist(), 4, 0), rel=0.01)


def test_a_law_of_responses_that_take_turns_holds_for_more_rows_than_were_measured():
    draw = np.random.default_rng(0)
    points = []
    for rows in (4, 8, 16) * 6:
        lengths = np.minimum(96, draw.lognormal(2.8, 1.1, size=rows).round() + 1).astype(int).tolist()
        seconds = 0.05 + 0.005 * turns(lengths, 4, 0)
        points.append(Point(rows, sum(lengths), max(lengths), seconds, lengths))
    law = fit_seconds(points)
    assert (law.places, law.pause_tokens) == (4, 0)
    assert law.error < 1e-6
    recipe = auto_recipe()
    lengths = [length for point in points for length in point.lengths]
    profile = make_profile(recipe, law, StageSeconds(), lengths=lengths)
    steps = StepSeconds(profile, recipe)
    plan = make_plan(recipe.model_copy(update={"placement": None}), GRPO, Cluster(1))
    drawn = steps._lengths.reshape(steps.num_draws, -1)
    for num_shards in (1, 2):
        found = steps.of(plan["rollout"], num_shards, is_balanced=False)
        expected = [
            max(0.05 + 0.005 * turns(shard.tolist(), 4, 0) for shard in np.split(row, num_shards)) for row in drawn
        ]
        assert found.tolist() == pytest.approx(expected, rel=1e-3 if num_shards == 2 else 0.02)


def test_work_that_is_divided_by_all_ranks_is_left_on_all_ranks():
    recipe = auto_recipe()
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.01))
    choice = choose_layout(recipe, GRPO, Cluster(4), profile)
    assert choice.best.recipe.layout == {}
    assert choice.best.predicted.seconds == pytest.approx(2 * 0.01 * 128 / 4)


def test_generation_ahead_gets_the_ranks_that_balance_the_two_pools():
    recipe = auto_recipe(max_lag=1)
    profile = make_profile(recipe, StageSeconds(row_s=0.03), StageSeconds(fixed_s=0.64, row_s=0.001), sync_s=0.01)
    choice = choose_layout(recipe, GRPO, Cluster(8), profile)
    # 7 ranks generate in 0.03 * 19 prompts' share, 1 trains; alone on all ranks the fixed part is not hidden.
    assert choice.best.candidate.lag == 1
    assert choice.best.recipe.layout["rollout"].ranks == "0-5"
    assert choice.best.plan.loop_of(7).lag == 0
    assert choice.best.plan.loop_of(0).lag == 1
    assert choice.best.recipe.placement is None


def test_a_lag_is_not_chosen_where_none_is_allowed():
    recipe = auto_recipe(max_lag=0)
    profile = make_profile(recipe, StageSeconds(row_s=0.03), StageSeconds(fixed_s=0.64))
    assert choose_layout(recipe, GRPO, Cluster(8), profile).best.candidate.lag == 0


def test_the_plan_says_how_much_slower_the_next_best_are():
    recipe = auto_recipe()
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.01))
    choice = choose_layout(recipe, GRPO, Cluster(4), profile)
    assert reason(choice.best, choice) == "'rollout' takes the most, 0.32 s"
    assert all("slower" in reason(option, choice) for option in choice.others)


def test_pools_that_work_one_behind_the_other_are_compared_in_windows_if_that_is_allowed():
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}}
    windows = {}
    for allowed, own in ((1, 1), (3, 1), (3, 2)):
        batch = {"prompts_per_step": 16, "responses_per_prompt": 8, "windows_per_step": own}
        recipe = auto_recipe(batch=batch, placement={"max_windows": allowed}, **kl)
        profile = make_profile(recipe, StageSeconds(row_s=0.02), StageSeconds(row_s=0.001))
        stages = dict(profile.stages) | {"ref": StageSeconds(row_s=0.02)}
        choice = choose_layout(recipe, GRPO, Cluster(2), profile.model_copy(update={"stages": stages}))
        options = (choice.best, *choice.others)
        windows[allowed, own] = [option.recipe.batch.windows_per_step for option in options]
        assert not choice.best.candidate.pools, "all ranks can always do all the work, if it fits into their memory"
    assert windows[1, 1] == [1, 1, 1, 1]
    assert windows[3, 1] == [1, 1, 3, 2]
    assert windows[3, 2] == [2, 2, 2, 2]


def test_every_lag_up_to_the_largest_is_a_power_of_two_or_the_largest():
    plan = make_plan(make_recipe(), GRPO, Cluster(2))
    assert sorted({candidate.lag for candidate in candidates_of(plan, Allowed(max_lag=6))}) == [0, 1, 2, 4, 6]


def test_every_rank_chooses_the_same_and_the_profile_is_part_of_the_plan():
    recipe = auto_recipe(max_lag=1)
    profile = make_profile(recipe, StageSeconds(longest_s=0.01), StageSeconds(token_s=0.001))
    first, second = (choose_layout(recipe, GRPO, Cluster(4), profile).best.plan for _ in range(2))
    assert first.hash() == second.hash()
    other = profile.model_copy(update={"overhead_s": 1.0})
    assert choose_layout(recipe, GRPO, Cluster(4), other).best.plan.hash() != first.hash()
    written = replace(first, profile_hash="")
    assert written.hash() != first.hash()


def test_a_thousand_ranks_are_placed_within_a_second():
    recipe = auto_recipe(max_lag=1, batch={"prompts_per_step": 4096, "responses_per_prompt": 8})
    profile = make_profile(recipe, StageSeconds(longest_s=0.01, token_s=1e-4), StageSeconds(fixed_s=0.1, token_s=1e-3))
    begin = time.process_time()
    choice = choose_layout(recipe, GRPO, Cluster(1024), profile)
    assert time.process_time() - begin < 1.0
    assert len(choice.others) == 3


def test_what_does_not_fit_into_memory_is_not_chosen(tmp_path):
    model = write_model(tmp_path / "model", hidden_size=2048, num_hidden_layers=24, vocab_size=50000)
    recipe = auto_recipe(models={"policy": model})
    machine = MachineIdentity(processor="made up", memory_gib=1)
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.01), machine=machine)
    with pytest.raises(RecipeError, match=r"no layout fits 2 ranks.*a rank needs at least"):
        choose_layout(recipe, GRPO, Cluster(2), profile)


def test_a_profile_of_another_model_is_refused():
    recipe = auto_recipe()
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.01))
    other = auto_recipe(models={"policy": "another/model"})
    with pytest.raises(
        RecipeError, match=r"was measured with models.policy=/no/such/model, but the recipe has another"
    ):
        choose_layout(other, GRPO, Cluster(2), profile)


def test_a_profile_of_another_machine_is_refused():
    recipe = auto_recipe()
    profile = make_profile(recipe, StageSeconds(), StageSeconds())
    with pytest.raises(RecipeError, match="processor 'made up', but this one has"):
        check_machine(profile)


def test_a_missing_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(RecipeError) as caught:
        read_profile(tmp_path / "profile.json")
    assert "leaderless profile" in only_problem(caught.value).message
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"is no profile .machine: Field required"):
        read_profile(tmp_path / "profile.json")


def test_auto_beside_a_written_layout_is_refused():
    assert make_recipe(layout="auto").placement is not None
    with pytest.raises(ValueError, match="leave out one of the two"):
        make_recipe(layout={"rollout": {"ranks": "0"}}, placement={})


def test_a_workflow_without_a_law_for_each_node_is_refused():
    recipe = auto_recipe()
    profile = make_profile(recipe, StageSeconds(), StageSeconds())
    stages = {name: law for name, law in profile.stages.items() if name != "advantage"}
    with pytest.raises(RecipeError, match="has no seconds of node 'advantage'"):
        choose_layout(recipe, GRPO, Cluster(2), profile.model_copy(update={"stages": stages}))


def test_a_node_that_only_a_lag_needs_must_have_been_measured():
    recipe = auto_recipe(max_lag=1)
    profile = make_profile(recipe, StageSeconds(row_s=0.03), StageSeconds(fixed_s=0.64, row_s=0.001))
    assert choose_layout(recipe, GRPO, Cluster(8), profile).best.candidate.lag == 1
    stages = {name: law for name, law in profile.stages.items() if name != "old"}
    choice = choose_layout(recipe, GRPO, Cluster(8), profile.model_copy(update={"stages": stages}))
    assert choice.best.candidate.lag == 0
    assert "has no seconds of node 'old'" in choice.refused[0][1]


def test_a_step_is_predicted_for_layouts_that_are_written_too():
    recipe = make_recipe(batch={"prompts_per_step": 16, "responses_per_prompt": 8})
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.02), reshard_s=0.5, sync_s=0.25)
    layout = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}, "advantage": {"ranks": "2-3"}}
    apart = recipe.model_copy(update={"layout": make_recipe(layout=layout).layout})
    plan = make_plan(apart, GRPO, Cluster(4))
    moves = [str(action) for action in plan.schedule if str(action).startswith("reshard")]
    expected = 0.64 + 1.28 + 0.5 * len(moves) + 0.25
    assert predict_step(apart, plan, profile).seconds == pytest.approx(expected)
    profile = profile.model_copy(update={"settings": {}})
    with pytest.raises(RecipeError, match="was measured with"):
        predict_step(apart, plan, profile)


def test_a_judge_that_is_a_model_takes_the_seconds_that_were_measured():
    recipe = auto_recipe(**JUDGED)
    laws = {name: make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds()).stages for name in ("quick", "slow")}
    laws["slow"] = {**laws["slow"], "reward": StageSeconds(row_s=0.1)}
    quick, slow = (
        choose_layout(recipe, GRPO, Cluster(2), make_profile(recipe, StageSeconds(), StageSeconds(), stages=stages))
        for stages in laws.values()
    )
    gained = slow.best.predicted.seconds - quick.best.predicted.seconds
    assert gained == pytest.approx(16 * 8 * 0.1 / 2), "both ranks judge half of the responses"


APART = {name: {"ranks": "2-3" if name == "reward" else "0-1"} for name in ("rollout", "reward", "advantage", "policy")}


def choose_with_judge(law: StageSeconds, **placement: object):
    recipe = auto_recipe(placement=placement, **JUDGED)
    profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds(row_s=0.01))
    stages = {**profile.stages, "reward": law}
    return choose_layout(recipe, GRPO, Cluster(4), profile.model_copy(update={"stages": stages}))


def test_a_judge_gets_ranks_of_its_own_where_that_is_faster():
    # Where responses were sampled, one rank has most of the tokens to judge; other ranks get even shares.
    choice = choose_with_judge(StageSeconds(token_s=0.002), max_windows=4)
    pools = choice.best.candidate.pools
    assert choice.best.recipe.layout["reward"].ranks == "1-3"
    assert [name for name, pool in pools.items() if pool == pools["reward"]] == ["reward"]
    assert choice.best.plan["reward"].node.judges
    assert choice.best.predicted.seconds < 0.95 * choice.others[0].predicted.seconds


def test_a_judge_stays_on_all_ranks_where_these_divide_its_work_evenly():
    choice = choose_with_judge(StageSeconds(row_s=0.01), max_windows=4)
    assert choice.best.recipe.layout == {}
    apart = predict_step(
        choice.best.recipe.model_copy(update={"layout": make_recipe(layout=APART).layout}),
        plan_of("grpo", 4, layout=APART, batch={"prompts_per_step": 16, "responses_per_prompt": 8}, **JUDGED),
        choice.profile,
    )
    assert apart.seconds > 1.5 * choice.best.predicted.seconds


def test_generation_may_be_ahead_with_a_judge_next_to_it_and_continuous_with_one_behind_it():
    plan = plan_of("grpo", 4, batch={"prompts_per_step": 16, "responses_per_prompt": 8}, **JUDGED)
    lagging = [one for one in candidates_of(plan, Allowed(max_lag=1)) if one.lag]
    assert {one.pools["reward"] == one.pools["rollout"] for one in lagging} == {True, False}
    choice = choose_with_judge(StageSeconds(token_s=0.002), continuous=True, max_staleness=4)
    assert choice.best.candidate.cache
    assert choice.best.recipe.layout["rollout"].ranks == "0"
    assert choice.best.recipe.layout["reward"].ranks == "1-3"


def test_the_pace_of_two_loops_is_that_of_the_slower_one_unless_they_wait_for_each_other():
    slow, fast = np.array([3.0, 3.0]), np.array([1.0, 1.0])
    assert _pace([slow, fast], [1, 0]) == pytest.approx(3.0)
    assert _pace([fast, slow], [1, 0]) == pytest.approx(3.0)
    # Alternately slow: each of two iterations hides the other loop's slow one.
    assert _pace([np.array([1.0, 3.0]), np.array([3.0, 1.0])], [1, 0]) == pytest.approx(2.0)
    # In step: the slow iterations of both are one after the other; in lockstep it would be 4.
    assert _pace([np.array([1.0, 3.0]), np.array([1.0, 3.0])], [1, 0]) == pytest.approx(3.0)
    assert _pace([np.array([2.0, 2.0])], [0]) == pytest.approx(2.0)


def test_generation_waits_until_its_rows_have_been_taken():
    slow, fast = np.array([3.0, 3.0]), np.array([1.0, 1.0])
    assert _pace([slow, fast], [1, 0], handed_s=0.5) == pytest.approx(3.5)
    assert _pace([fast, slow], [1, 0], handed_s=0.5) == pytest.approx(3.0)


def test_new_weights_travel_while_both_loops_work():
    slow, fast = np.array([3.0, 3.0]), np.array([1.0, 1.0])
    assert _pace([slow, fast], [1, 0], travel_s=2.0) == pytest.approx(3.0)
    assert _pace([fast, slow], [1, 0], travel_s=2.0) == pytest.approx(3.0)
    assert _pace([slow, slow], [1, 0], travel_s=2.0) == pytest.approx(4.0), "the sum of all is two iterations"
    assert _pace([slow, slow], [2, 0], travel_s=2.0) == pytest.approx(3.0)
    many = np.full(50, 3.0)
    assert _pace([many, many], [2, 0], travel_s=5.0) == pytest.approx(5.0), "only one iteration's are on their way"


def test_windows_hide_what_travels_and_what_the_next_pool_does():
    layout = make_recipe(
        layout={"rollout": {"ranks": "0"}, **{name: {"ranks": "1"} for name in ("reward", "advantage", "policy")}}
    ).layout
    seconds = {}
    for number in (1, 4):
        batch = {"prompts_per_step": 16, "responses_per_prompt": 8, "windows_per_step": number}
        recipe = make_recipe(batch=batch)
        profile = make_profile(recipe, StageSeconds(row_s=0.01), StageSeconds())
        profile = profile.model_copy(update={"stages": dict(profile.stages) | {"reward": StageSeconds(row_s=0.01)}})
        apart = recipe.model_copy(update={"layout": layout})
        seconds[number] = predict_step(apart, make_plan(apart, GRPO, Cluster(2)), profile).seconds
    assert seconds == pytest.approx({1: 2 * 1.28, 4: 1.28 * 5 / 4})


def traced(folder, rank: int, seconds: dict[str, float], rows: int) -> None:
    """A trace of two steps, of which the first took far longer."""
    events = [
        {"name": name, "ph": "X", "dur": took * 1e6 * (9 if step == 1 else 1), "args": {"step": step, "rows": rows}}
        for step in (1, 2)
        for name, took in seconds.items()
    ]
    for event in events:
        if event["name"] == "rollout":
            event["args"] |= {"tokens": 2 * rows, "longest": 2, "lengths": [2] * rows, "waits": [0.5] * rows}
    (folder / "trace").mkdir(exist_ok=True)
    (folder / "trace" / f"rank-{rank}.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events))


def test_a_profile_takes_from_traces_what_each_stage_took_without_waiting(tmp_path):
    plan = plan_of("grpo", 2)
    traced(tmp_path, 0, {"rollout": 1.0, "policy": 3.5}, rows=4)
    traced(tmp_path, 1, {"rollout": 2.0, "policy": 2.5}, rows=8)
    lines = ({"step": 1, "time_s": 50.0}, {"step": 2, "time_s": 55.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = Spans()
    spans.add(RunDirectory(tmp_path), plan)
    assert spans.points == {
        "rollout": [Point(4, 8, 2, 1.0, (2,) * 4, (0.5,) * 4), Point(8, 16, 2, 2.0, (2,) * 8, (0.5,) * 8)],
        "policy": [Point(8, 0, 0, 2.5)],
    }
    assert (spans.lengths, spans.waits) == ([2] * 12, [0.5] * 12)
    assert spans.overheads == [pytest.approx(0.5)]
    profile = profile_of(spans, make_recipe(), 2)
    assert profile.stages["rollout"].of(16, 32, 2) == pytest.approx(4.0)
    assert profile.waits == (0.5,) * 12


def test_a_run_that_has_traced_nothing_is_no_profile():
    with pytest.raises(RecipeError, match="has traced no step after its first"):
        profile_of(Spans(), make_recipe(), 1)
