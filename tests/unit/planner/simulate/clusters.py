"""A cluster with round numbers, and small steps on it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from benchmarks.simulated.controllers import ComparedCluster, estimate_ways
from tests.unit.recipes import make_recipe, write_model

from leaderless.config import Recipe
from leaderless.planner import Cluster, Layout, Plan, Reshard, make_plan
from leaderless.planner.simulate.network import Network
from leaderless.planner.simulate.rows import SimulatedRows, sample_workload
from leaderless.planner.simulate.step import Estimate
from leaderless.planner.workflow import resolve_workflow

ROUND: dict[str, Any] = {
    "name": "round numbers",
    "device": {
        "memory_gib": 4,
        "peak_tflops": 1,
        "training_utilization": 0.5,
        "scoring_utilization": 0.25,
        "memory_bandwidth_gb_per_s": 10,
        "decoding_utilization": 0.5,
    },
    "host": {"devices": 2, "interfaces": 1, "memory_gib": 1},
    "links": {
        "device": {"latency_us": 0, "bandwidth_gb_per_s": 1000},
        "host": {"latency_us": 0, "bandwidth_gb_per_s": 10},
        "network": {"latency_us": 0, "bandwidth_gb_per_s": 1},
    },
    "coordinator": {"hop_latency_us": 0, "hop_bandwidth_gb_per_s": 1000, "assignment_us_per_row": 0},
    "controllers": {"one": {"call_us": 0, "copy_gb_per_s": 1000, "dataloader_processes": 1}},
    "dataloader": {"tokens_per_s": 1e6},
    "workload": {
        "prompt_median_tokens": 10,
        "prompt_sigma": 0.5,
        "response_median_share": 0.25,
        "response_sigma": 0.8,
    },
}


def cluster(**changes: object) -> ComparedCluster:
    """The round cluster with changed settings, such as `links__network__latency_us=5`."""
    settings = copy.deepcopy(ROUND)
    for path, value in changes.items():
        section = settings
        *parts, last = path.split("__")
        for part in parts:
            section = section[part]
        section[last] = value
    return ComparedCluster.model_validate(settings)


def network(num_ranks: int, **changes: object) -> Network:
    return Network(cluster(**changes), num_ranks)


def equal_rows(num_prompts: int, siblings: int = 1, prompt: int = 0, response: int = 100) -> SimulatedRows:
    """Samples of the same length."""
    count = num_prompts * siblings
    groups = np.repeat(np.arange(num_prompts), siblings)
    return SimulatedRows(groups, np.full(count, prompt), np.full(count, response), are_samples=True)


def pools(world_size: int, *columns: str) -> Reshard:
    """From the first half of the ranks to the second."""
    half = world_size // 2
    source, target = Layout(tuple(range(half)), half), Layout(tuple(range(half, world_size)), half)
    return Reshard("rollout", "rollout", columns, source, target, keep_groups=False)


def pools_recipe(folder, **sections: object) -> Recipe:
    """GRPO with rollout and training on halves of the ranks, and a reference."""
    settings: dict[str, object] = {
        "models": {"policy": write_model(folder / "model")},
        "data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "batch": {"prompts_per_step": 64, "responses_per_prompt": 4, "updates_per_step": 2, "micro_batch_tokens": 512},
        "rollout": {"max_response_tokens": 192, "max_sequences": 8},
        "algorithm": {"kl": {"coefficient": 0.1}},
        "layout": {"rollout": {"ranks": "0%-50%"}, "policy": {"ranks": "50%-100%"}},
    }
    return make_recipe(**(settings | sections))


def plan_for(recipe: Recipe, world_size: int) -> Plan:
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(world_size))


def step_of(recipe: Recipe, world_size: int, constants: ComparedCluster) -> dict[str, Estimate]:
    workload = sample_workload(recipe, constants.workload)
    return estimate_ways(plan_for(recipe, world_size), recipe, workload, constants)
