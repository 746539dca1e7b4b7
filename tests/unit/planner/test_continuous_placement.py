"""The planner predicts continuous generation, and chooses it where it is allowed and faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from benchmarks.continuous_placement_report import EVERYWHERE, Case, Results, summary, table
from tests.unit.planner.test_placement import GRPO, auto_recipe, make_profile
from tests.unit.recipes import make_recipe, write_model

from leaderless.config import RecipeError
from leaderless.planner import Cluster, make_plan
from leaderless.planner.engines import rollout_engine
from leaderless.planner.placement.candidates import Allowed, Candidate, candidates_of
from leaderless.planner.placement.continuous import Pools, step_seconds
from leaderless.planner.placement.node_seconds import Rates, StepSeconds, fit_seconds
from leaderless.planner.placement.search import EQUAL, _simplest, choose_layout, predict_step
from leaderless.planner.placement.stage_seconds import MachineIdentity, Point, StageSeconds
from leaderless.planner.show.placement import choice_to_json, reason, without_helpers

STEP_S = 0.005
TAIL_S, UPDATE = StageSeconds(longest_s=STEP_S, token_s=2e-5), StageSeconds(token_s=3e-4)
NOBODY = np.array([False, False])
PROMPTS, SIBLINGS = 16, 4


@rollout_engine()
def takes_weights_between_requests(setup: object) -> None:
    """An engine that the planner alone knows."""


def tail_lengths(sigma: float, number: int = 256 * SIBLINGS) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(4.0, sigma, size=number)
    return np.clip(drawn, 1, 512).astype(int).tolist()


def step_by_step(
    lengths: np.ndarray,
    token_s: float,
    slots: int,
    capacity: int,
    training_s: float,
    first: int = 8,
    helper: int | None = None,
) -> float:
    """Seconds of an iteration, worked out for each step of each rank's engine.

    Args:
        lengths: [iterations, ranks, rows] tokens.
        token_s: Seconds of a step for each response under way.
        slots: Most responses under way.
        capacity: Iterations that a rank may be ahead.
        training_s: Seconds of training.
        first: Iterations that are left out.
        helper: Rank that has its device only while nobody trains.
    """
    num_iterations, num_ranks, num_rows = lengths.shape
    clocks, shares = np.zeros(num_ranks), [0] * num_ranks
    open_rows: list[list[list[int]]] = [[] for _ in range(num_ranks)]  # share and tokens left
    left = np.full((num_iterations, num_ranks), num_rows)
    done, trained = np.zeros((num_iterations, num_ranks)), list[float]()
    while len(trained) < num_iterations:
        rank = int(clocks.argmin())
        rows = open_rows[rank]
        ends = [end for end in trained if end - training_s <= clocks[rank] < end]
        if rank == helper and ends:
            clocks[rank] = ends[0]
            continue
        while shares[rank] < num_iterations:
            weights = shares[rank] - 1 - capacity
            if weights >= 0 and (weights >= len(trained) or trained[weights] > clocks[rank]):
                break
            rows += [[shares[rank], int(tokens)] for tokens in lengths[shares[rank], rank]]
            shares[rank] += 1
        if not rows:
            later = clocks[clocks > clocks[rank]]
            clocks[rank] = later.min() if len(later) else clocks[rank] + STEP_S
            continue
        clocks[rank] += STEP_S + token_s * min(slots, len(rows))
        for row in rows[:slots]:
            row[1] -= 1
            if not row[1]:
                left[row[0], rank] -= 1
                done[row[0], rank] = clocks[rank]
        rows[:] = [row for row in rows if row[1]]
        while len(trained) < num_iterations and not left[len(trained)].any():
            begun = max(trained[-1] if trained else 0.0, done[: len(trained) + 1].max())
            trained.append(begun + training_s)
    return (trained[-1] - trained[first - 1]) / (num_iterations - first)


@pytest.mark.parametrize(
    ("sigma", "token_s", "capacity", "training_s"),
    [
        *product((0.2, 1.1), (2e-5,), (1, 2, 4), (0.4,)),  # the longest response holds training up
        (1.1, 2e-4, 2, 0.2),  # responses slow each other down
        (1.1, 1e-3, 4, 0.2),  # the engine is full of tokens
        (0.2, 2e-5, 4, 1.5),  # training takes the most
    ],
)
def test_the_law_is_that_of_engines_followed_step_by_step(
    sigma: float, token_s: float, capacity: int, training_s: float
) -> None:
    num_ranks, num_rows, slots = 2, 32, 256
    lengths = np.array(tail_lengths(sigma, 32 * num_ranks * num_rows)).reshape(-1, num_ranks, num_rows)
    expected = step_by_step(lengths, token_s, slots, capacity, training_s)
    tokens, longest = token_s * lengths.sum(axis=2), STEP_S * lengths.max(axis=2)
    rates = Rates(tokens + STEP_S * lengths.sum(axis=2) / slots, tokens + longest, longest)
    nothing = np.zeros(len(lengths))
    found = step_seconds(Pools(rates, nothing, nothing, nothing + training_s, capacity, NOBODY))
    assert found == pytest.approx(expected, rel=0.07)


def test_an_engine_without_room_generates_at_its_mean_pace() -> None:
    lengths = np.array(tail_lengths(1.1, 32 * 2 * 32)).reshape(-1, 2, 32)
    slots, nothing = 4, np.zeros(32)
    expected = step_by_step(lengths, 0.0, slots, 4, training_s=0.1)
    work = STEP_S * lengths.sum(axis=2) / slots
    rates = Rates(work, work + 0.75 * STEP_S * lengths.max(axis=2), np.zeros_like(work))
    found = step_seconds(Pools(rates, nothing, nothing, nothing + 0.1, 4, NOBODY))
    assert found == pytest.approx(expected, rel=0.08)
    assert found == pytest.approx(work.mean(axis=0).max(), rel=0.02), "a rank with more work makes up for it later"


@pytest.mark.parametrize(
    ("num_rows", "training_s", "token_s", "capacity"), [(8, 0.8, 2e-5, 2), (16, 0.4, 2e-5, 4), (32, 0.2, 1e-3, 2)]
)
def test_a_helper_takes_as_much_longer_as_its_device_is_used(
    num_rows: int, training_s: float, token_s: float, capacity: int
) -> None:
    """Rank 1 has fewer rows than rank 0, and no device while training goes on."""
    slots = 256
    lengths = np.array(tail_lengths(0.6, 32 * 2 * 32)).reshape(-1, 2, 32)
    lengths[:, 1, num_rows:] = 1
    expected = step_by_step(lengths, token_s, slots, capacity, training_s, helper=1)
    tokens, longest = token_s * lengths.sum(axis=2), STEP_S * lengths.max(axis=2)
    rates = Rates(tokens + STEP_S * lengths.sum(axis=2) / slots, tokens + longest, longest)
    nothing, helping = np.zeros(len(lengths)), np.array([False, True])
    found = step_seconds(Pools(rates, nothing, nothing, nothing + training_s, capacity, helping, training_s))
    assert found == pytest.approx(expected, rel=0.13)


def continuous_recipe(**changes: object):
    placement = {"continuous": True, "max_staleness": 4, "max_lag": 2, **changes}
    return auto_recipe(batch={"prompts_per_step": PROMPTS, "responses_per_prompt": SIBLINGS}, placement=placement)


def test_a_heavy_tail_is_generated_continuously_where_that_is_allowed() -> None:
    seconds = {}
    for is_allowed in (False, True):
        changes = {} if is_allowed else {"continuous": False, "max_staleness": None}
        recipe = continuous_recipe(**changes)
        profile = make_profile(recipe, TAIL_S, UPDATE, lengths=tail_lengths(1.1))
        choice = choose_layout(recipe, GRPO, Cluster(4), profile)
        seconds[is_allowed] = choice.best.predicted.seconds
        assert choice.best.plan.loops[0].is_continuous == is_allowed
    assert choice.best.recipe.channels["rollout"].model_dump(exclude_defaults=True) == {
        "capacity": 4,
        "mode": "continuous",
    }
    assert str(choice.best.candidate).endswith("continuous, at most 4 ahead")
    assert seconds[False] > 1.5 * seconds[True]
    assert any(
        reason(option, choice).endswith("responses that take over 3 steps hold training up") for option in choice.others
    )


def test_generation_that_depends_on_time_is_not_chosen_where_it_gains_nothing() -> None:
    recipe = continuous_recipe()
    profile = make_profile(recipe, StageSeconds(row_s=0.03), StageSeconds(fixed_s=0.3, row_s=0.001))
    choice = choose_layout(recipe, GRPO, Cluster(8), profile)
    assert choice.best.candidate.lag
    assert not choice.best.candidate.cache
    assert any(option.candidate.cache for option in choice.others)


def test_a_bound_allows_as_many_iterations_as_their_updates_are_old() -> None:
    recipe = continuous_recipe()
    batch = recipe.batch.model_copy(update={"updates_per_step": 2})
    recipe = recipe.model_copy(update={"batch": batch})
    profile = make_profile(recipe, TAIL_S, UPDATE, lengths=tail_lengths(1.1))
    choice = choose_layout(recipe, GRPO, Cluster(4), profile)
    assert choice.best.candidate.lag == 2
    assert max(channel.max_staleness for channel in choice.best.plan.channels) == 4
    tight = recipe.model_copy(update={"placement": continuous_recipe(max_staleness=1).placement})
    with pytest.raises(RecipeError, match=r"placement.max_staleness: is 1, but with batch.updates_per_step=2"):
        choose_layout(tight, GRPO, Cluster(4), profile)


def test_what_cannot_generate_continuously_is_no_candidate_and_the_reason_is_shown() -> None:
    recipe = continuous_recipe()
    engine = recipe.rollout.model_copy(update={"engine": f"{__name__}:takes_weights_between_requests"})
    recipe = recipe.model_copy(update={"rollout": engine})
    profile = make_profile(recipe, TAIL_S, UPDATE, lengths=tail_lengths(1.1))
    choice = choose_layout(recipe, GRPO, Cluster(4), profile)
    assert not any(option.candidate.cache for option in (choice.best, *choice.others))
    assert "can take weights only between two iterations" in choice.refused[0][1]
    # An engine that cannot keep what other weights have computed computes it anew.
    rollout = make_recipe(rollout={"engine": "vllm", "external": {"python": "/somewhere/bin/python"}}).rollout
    vllm = recipe.model_copy(update={"rollout": rollout})
    profile = make_profile(vllm, TAIL_S, UPDATE, lengths=tail_lengths(1.1))
    assert choose_layout(vllm, GRPO, Cluster(4), profile).best.recipe.channels["rollout"].cache == "recompute"


def test_a_channel_of_the_recipe_is_predicted_with_its_portions() -> None:
    layout = {name: {"ranks": "0-1"} for name in ("rollout", "reward")}
    layout |= {name: {"ranks": "2"} for name in ("advantage", "policy")}
    seconds = []
    for portions in ([1, 1], [3, 1]):
        channels = {"rollout": {"capacity": 4, "mode": "continuous", "portions": portions}}
        batch = {"prompts_per_step": PROMPTS, "responses_per_prompt": SIBLINGS}
        recipe = make_recipe(layout=layout, channels=channels, batch=batch)
        plain = make_recipe(batch=batch)
        profile = make_profile(plain, StageSeconds(row_s=0.01), StageSeconds(), lengths=tail_lengths(1.1))
        seconds.append(predict_step(recipe, make_plan(recipe, GRPO, Cluster(3)), profile).seconds)
    assert seconds == pytest.approx([0.01 * 32, 0.01 * 48])


@pytest.mark.parametrize(("reward_s", "processes", "expected_s"), [(0.005, 0, 0.48), (0.005, 1, 0.32), (0.02, 1, 0.64)])
def test_rewards_take_no_time_of_the_engine_where_other_processes_compute_them(
    reward_s: float, processes: int, expected_s: float
) -> None:
    layout = {name: {"ranks": "0-1"} for name in ("rollout", "reward")}
    layout |= {name: {"ranks": "2"} for name in ("advantage", "policy")}
    batch, run = {"prompts_per_step": PROMPTS, "responses_per_prompt": SIBLINGS}, {"reward_processes": processes}
    channels = {"rollout": {"capacity": 4, "mode": "continuous"}}
    recipe, plain = make_recipe(layout=layout, channels=channels, batch=batch, run=run), make_recipe(batch=batch)
    profile = make_profile(plain, StageSeconds(row_s=0.01), StageSeconds(), lengths=tail_lengths(1.1))
    profile = profile.model_copy(update={"stages": profile.stages | {"reward": StageSeconds(row_s=reward_s)}})
    found = predict_step(recipe, make_plan(recipe, GRPO, Cluster(3)), profile)
    assert found.seconds == pytest.approx(expected_s, rel=0.03)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"continuous": True}, "continuous=true needs room to be ahead: set max_staleness"),
        ({"max_staleness": 2}, "max_staleness=2 is for continuous generation, which is not allowed here"),
        ({"helpers": 2}, "helpers=2 is for continuous generation, which is not allowed here"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(placement: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_recipe(layout="auto", placement=placement)


def test_episodes_that_wait_leave_their_engine_to_others() -> None:
    draw = np.random.default_rng(0)
    points, lengths, waits = [], list[int](), list[float]()
    for rows in (8, 16, 32) * 8:
        own = draw.integers(10, 60, size=rows).tolist()
        waited = draw.lognormal(0.0, 0.8, size=rows).tolist()
        longest_s = max(wait + 0.01 * tokens for wait, tokens in zip(waited, own, strict=True))
        points.append(Point(rows, sum(own), max(own), 0.1 + longest_s + 2e-4 * sum(own), own, waited))
        lengths, waits = lengths + own, waits + waited
    law = fit_seconds(points)
    assert law.waits
    assert law.error < 0.02
    assert (law.longest_s, law.fixed_s) == pytest.approx((0.01, 0.1), rel=0.5)
    recipe, rates = continuous_recipe(), []
    profile = make_profile(recipe, law, UPDATE, lengths=lengths, waits=waits)
    plan = make_plan(recipe.model_copy(update={"placement": None}), GRPO, Cluster(1))
    for concurrency in (8, 256):
        environment = make_recipe(environment={"type": "some.module:Waiting", "concurrency": concurrency}).environment
        steps = StepSeconds(profile, recipe.model_copy(update={"environment": environment}))
        rates.append(steps.rates(plan["rollout"], [1, 1]))
    few, many = rates
    num_rows = PROMPTS * SIBLINGS // 2
    played_s = num_rows * (np.mean(waits) + law.longest_s * np.mean(lengths))
    assert few.work.mean() == pytest.approx(played_s / 8, rel=0.2), "eight are played at a time"
    assert many.work.mean() == pytest.approx(law.fixed_s + law.token_s * num_rows * np.mean(lengths), rel=0.2)
    assert many.alone.mean() > 5 * many.work.mean()


def test_the_report_says_what_the_choice_gains_and_how_far_predictions_are_off() -> None:
    runs = {
        EVERYWHERE: {"seconds": 3.0, "predicted": 3.0},
        "0 and 1, fixed lag 2": {"seconds": 1.0, "predicted": 1.5},
        "0 and 1, continuous, capacity 4": {"seconds": 1.2, "predicted": 0.9},
    }
    case = Case(workload="tail", workers=2, chosen="0 and 1, continuous, capacity 4", runs=runs)
    results = Results(cores=2, steps=16, cases=[case])
    text = summary(results)
    assert "of the chosen layout is off by 25%" in text
    assert "that of any by 25% (medians)" in text
    assert "is 2.50 to 2.50 times as fast as all ranks in lockstep" in text
    assert "at most 20% slower than the fastest" in text
    assert "| tail | 2 | **0 and 1, continuous, capacity 4** | 0.90 | 1.20 | -25% |" in table(results)


def test_workers_without_a_device_help_where_training_is_light() -> None:
    recipe = continuous_recipe(helpers=1)
    light = StageSeconds(longest_s=0.001, token_s=2e-4), StageSeconds(token_s=1e-4)
    profile = make_profile(recipe, *light, lengths=tail_lengths(1.1))
    choice = choose_layout(recipe, GRPO, Cluster(3), profile)
    assert choice.best.plan.helpers == {2: 1}
    assert choice.best.recipe.layout["rollout"].ranks == "0,2"
    assert choice.best.recipe.channels["rollout"].portions == (3, 1)
    assert str(choice.best.candidate).endswith("continuous, at most 4 ahead; 1 helps with portions 3:1")
    assert all(option.candidate.helpers for option in choice.others), "a rank has something to do"
    assert choice.without is not None
    assert choice.without.plan.world_size == 2
    assert without_helpers(choice).startswith("2 workers without helpers: rollout on 0;")
    assert without_helpers(choice).endswith("% slower")
    assert choice_to_json(choice)["without_helpers"] == choice.without.predicted.seconds > choice.best.predicted.seconds
    heavy = make_profile(recipe, light[0], StageSeconds(token_s=1e-3), lengths=tail_lengths(1.1))
    choice = choose_layout(recipe, GRPO, Cluster(3), heavy)
    assert without_helpers(choice).endswith("start 2 workers, and leave placement.helpers out")


def test_helpers_that_cannot_help_are_refused() -> None:
    recipe = continuous_recipe(helpers=1)
    profile = make_profile(recipe, TAIL_S, UPDATE, lengths=tail_lengths(1.1))
    with pytest.raises(RecipeError, match="is 1, but it leaves 1 of 2 workers a device, of which one must generate"):
        choose_layout(recipe, GRPO, Cluster(2), profile)
    own = make_recipe(channels={"rollout": {"capacity": 1}}).channels
    with pytest.raises(RecipeError, match="is 1, but the recipe has channels of its own, which say who helps"):
        choose_layout(recipe.model_copy(update={"channels": own}), GRPO, Cluster(3), profile)


def test_a_helper_must_fit_next_to_the_rank_whose_device_it_has(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=1024, num_hidden_layers=24, vocab_size=50000)
    recipe = continuous_recipe(helpers=1).model_copy(update={"models": make_recipe(models={"policy": model}).models})
    fits = []
    for memory_gib in (4.5, 16):
        machine = MachineIdentity(processor="made up", accelerator="made up", memory_gib=memory_gib)
        profile = make_profile(recipe, TAIL_S, UPDATE, lengths=tail_lengths(1.1), machine=machine)
        alone = recipe.model_copy(update={"placement": continuous_recipe().placement})
        assert choose_layout(alone, GRPO, Cluster(2), profile).best.candidate.cache
        try:
            choose_layout(recipe, GRPO, Cluster(3), profile)
            fits.append(True)
        except RecipeError:
            fits.append(False)
    assert fits == [False, True]


def test_of_layouts_that_are_as_fast_one_whose_numbers_do_not_depend_on_time_is_taken() -> None:
    recipe = continuous_recipe()
    best = choose_layout(recipe, GRPO, Cluster(2), make_profile(recipe, TAIL_S, UPDATE)).best
    further = replace(best, candidate=Candidate({"rollout": (0, 1), "policy": (1, 2)}, 4, "rollout"))
    continuous = replace(best, candidate=replace(further.candidate, lag=1, cache="keep"))
    assert _simplest([continuous, further]) is further


@pytest.mark.parametrize(("num_ranks", "helpers"), [(8, 0), (8, 2)])
def test_the_first_estimate_leaves_the_best_among_those_that_are_planned(num_ranks: int, helpers: int) -> None:
    recipe = continuous_recipe(helpers=helpers)
    costs = StageSeconds(longest_s=0.001, token_s=2e-4), StageSeconds(token_s=1e-4)
    profile = make_profile(recipe, *costs, lengths=tail_lengths(1.1))
    chosen = choose_layout(recipe, GRPO, Cluster(num_ranks), profile).best.predicted.seconds
    plain = recipe.model_copy(update={"placement": None})
    allowed = Allowed(2, 1, (), 4, "keep", helpers)
    found = []
    for candidate in candidates_of(make_plan(plain, GRPO, Cluster(num_ranks)), allowed):
        written = plain.model_copy(update={"layout": candidate.layout, "channels": candidate.channels})
        found.append(predict_step(written, make_plan(written, GRPO, Cluster(num_ranks)), profile).seconds)
    assert len(found) > 40
    assert chosen <= EQUAL * min(found)
