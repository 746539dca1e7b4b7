"""Layouts that are chosen by the cost model, for machines on which nothing was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe, write_model

from leaderless.config import Recipe, RecipeError, load_section
from leaderless.config.packaged_files import find_packaged
from leaderless.planner import Cluster
from leaderless.planner.placement.modeled_seconds import modeled_profile
from leaderless.planner.placement.search import PlacementChoice, choose_layout
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.rows import sample_workload
from leaderless.planner.simulate.step import estimate_step
from leaderless.planner.workflow import resolve_workflow

GRPO = resolve_workflow("grpo")
H100 = load_section(find_packaged(Path("recipes/clusters/h100.yaml")), ClusterConfig)


def auto_recipe(folder: Path, **placement: object) -> Recipe:
    model = write_model(folder / "model", hidden_size=2048, num_hidden_layers=24, vocab_size=50000)
    return make_recipe(
        models={"policy": model},
        batch={"prompts_per_step": 64, "responses_per_prompt": 8, "micro_batch_tokens": 8192},
        rollout={"max_response_tokens": 1024, "max_sequences": 32},
        algorithm={"kl": {"coefficient": 0.1}},
        placement=placement,
    )


def chosen(recipe: Recipe, world_size: int, constants: ClusterConfig = H100) -> PlacementChoice:
    cluster = Cluster(world_size)
    return choose_layout(recipe, GRPO, cluster, modeled_profile(recipe, GRPO, cluster, constants))


@pytest.mark.parametrize("placement", [{}, {"max_lag": 1}], ids=["lockstep", "ahead"])
def test_a_step_takes_about_what_a_simulation_of_the_same_plan_says(tmp_path, placement):
    choice = chosen(auto_recipe(tmp_path, **placement), 8)
    for option in (choice.best, *choice.others):
        workload = sample_workload(option.recipe, H100.workload)
        simulated = estimate_step(option.plan, option.recipe, workload, H100).seconds
        assert option.predicted.seconds == pytest.approx(simulated, rel=0.1), str(option.candidate)
    assert choice.profile.cluster == H100.name


def test_machines_that_decode_more_slowly_get_more_ranks_that_generate(tmp_path):
    sizes = {}
    for utilization in (1.0, 0.2):
        device = H100.device.model_copy(update={"decoding_utilization": utilization})
        choice = chosen(auto_recipe(tmp_path, max_lag=1), 8, H100.model_copy(update={"device": device}))
        ahead = next(option for option in (choice.best, *choice.others) if option.candidate.lag)
        sizes[utilization] = ahead.candidate.pools["rollout"], ahead.predicted.seconds
    assert [pool for pool, _ in sizes.values()] == [(0, 6), (0, 7)]
    assert sizes[1.0][1] < sizes[0.2][1]


def test_every_rank_computes_the_same_and_the_machines_are_part_of_the_plan(tmp_path):
    recipe = auto_recipe(tmp_path)
    first, second = (chosen(recipe, 4).best.plan for _ in range(2))
    assert first.hash() == second.hash()
    host = H100.links.host.model_copy(update={"latency_us": 11})
    other = H100.model_copy(update={"links": H100.links.model_copy(update={"host": host})})
    assert chosen(recipe, 4, other).best.plan.hash() != first.hash()


def test_what_does_not_fit_into_the_memory_of_the_machines_is_not_chosen(tmp_path):
    device = H100.device.model_copy(update={"memory_gib": 4})
    with pytest.raises(RecipeError, match="no layout fits 2 ranks"):
        chosen(auto_recipe(tmp_path), 2, H100.model_copy(update={"device": device}))


def test_a_model_of_unknown_size_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"its config\.json is not on this machine"):
        chosen(auto_recipe(tmp_path).model_copy(update={"models": make_recipe().models}), 2)


def test_continuous_generation_and_helpers_are_compared_too(tmp_path):
    recipe = auto_recipe(tmp_path, continuous=True, max_staleness=4, helpers=1)
    choice = chosen(recipe, 5)
    assert choice.best.candidate.helpers
    assert choice.profile.world_size == 4, "a helper has no device of its own"
