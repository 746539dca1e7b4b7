"""The figures of docs/scaling/simulation.md next to plans of the recipes that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaderless.config.load import load_section
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.memory.rank import DeviceMemory
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.rows import sample_workload, samplers_of
from leaderless.planner.simulate.step import estimate_step
from leaderless.planner.workflow import load_recipe, resolve_workflow

ROOT = Path(__file__).parents[3]
POOLS = ["layout.rollout.ranks=0%-50%", "layout.policy.ranks=50%-100%", "rollout.external.python=python3"]
MIXTURES = [("30b-a3b", 8, []), ("235b-a22b", 64, []), ("235b-a22b", 128, []), ("235b-a22b", 256, POOLS)]
COLUMNS = [(f"qwen3-{name}", world_size, changes) for name, world_size, changes in MIXTURES]
"""Recipe, ranks and settings of each column, as comments in the recipes have them."""
OF_SEVERAL_KINDS = [("gpt-oss-20b", 8), ("qwen3.5-35b-a3b", 16), ("glm-5", 512)]
"""The same of the table of layers of several kinds."""


def table(title: str = "Mixtures of experts") -> dict[str, list[str]]:
    """The rows of the table below a title, by their first cell."""
    text = (ROOT / "docs/scaling/simulation.md").read_text(encoding="utf-8").partition(f"## {title}")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def planned(name: str, world_size: int, changes: list[str]) -> Plan:
    recipe = load_recipe(Path(f"recipes/scaling/{name}.yaml"), changes).recipe
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(world_size))


def figures(plan: Plan) -> dict[str, float]:
    """Numbers of the table, of the fullest accelerator."""
    assert plan.memory is not None
    memory: DeviceMemory = plan.memory.accelerator
    resident, generates = memory.resident, memory.phases["policy generates"]
    found: dict[str, float] = {
        "generation: engine's weights": resident.get("policy engine's weights", 0)
        + generates.get("engine's weights", 0)
        + generates.get("unsharded weights", 0),
        "generation: KV cache": generates["kv cache"],
        "peak": memory.peak,
    }
    if "policy trains" in memory.phases:  # not on the fullest of two pools, which generates
        trains = dict(memory.phases["policy trains"])
        found |= {
            "weights and optimizer": resident["policy weights"] + resident["policy optimizer"],
            "training: gradients": trains.pop("gradients"),
            "training: gathered weights, activations, logits": sum(trains.values()),
            "start: weights on the accelerator": resident["policy weights"],
            "start: weights in the memory of the host": memory.host["weights being read"],
            "start: read from files in bfloat16": resident["policy weights"] / 2,
        }
    return {name: value / 2**30 for name, value in found.items()}


@pytest.mark.parametrize("column", range(len(COLUMNS)))
def test_the_table_of_mixtures_says_what_plans_say(monkeypatch: pytest.MonkeyPatch, column: int) -> None:
    monkeypatch.chdir(ROOT)
    rows, plan = table(), planned(*COLUMNS[column])
    assert str(COLUMNS[column][1]) in rows[""][column]
    (policy,) = (one for one in plan.instances if one.is_trained)
    assert rows["`ep`"][column] == str(policy.layout.ep)
    for name, value in figures(plan).items():
        check(name, rows[name][column], value)


def check(name: str, cell: str, value: float) -> None:
    shown = cell.split(" of ", maxsplit=1)[0].split(",", maxsplit=1)[0]
    decimals = len(shown.partition(".")[2])
    assert f"{value:.{decimals}f}" == shown, f"{name}: {value:.3f} is planned"


@pytest.mark.parametrize("column", range(len(OF_SEVERAL_KINDS)))
def test_the_table_of_layers_of_several_kinds_says_what_plans_and_simulations_say(
    monkeypatch: pytest.MonkeyPatch, column: int
) -> None:
    monkeypatch.chdir(ROOT)
    rows, (name, world_size) = table("Layers of several kinds"), OF_SEVERAL_KINDS[column]
    plan = planned(name, world_size, [])
    assert f" on {world_size}" in rows[""][column]
    size, memory = plan.sizes["policy"], plan.memory
    assert size is not None
    assert memory is not None
    found = {one: value for one, value in figures(plan).items() if not one.startswith("start")}
    found["weights, billions"] = size.num_parameters / 1e9
    found["active of them, billions"] = size.num_active_parameters / 1e9
    is_external = "vllm" in (ROOT / f"recipes/scaling/{name}.yaml").read_text(encoding="utf-8").partition("rollout:")[2]
    values = size.compressed_values_per_token if is_external else size.kv_values_per_token
    found["keys and values of a token, KiB"] = 2 * values / 2**10
    found["states of a sequence, MiB"] = size.state_bytes(2) / 2**20
    found["generation: states"] = memory.accelerator.phases["policy generates"].get("states", 0) / 2**30
    found["simulated seconds of a step"] = simulated_seconds(name, plan)
    assert {*found} | {"", "---"} == {*rows}
    for one, value in found.items():
        check(one, rows[one][column], value)


def simulated_seconds(name: str, plan: Plan) -> float:
    recipe = load_recipe(Path(f"recipes/scaling/{name}.yaml")).recipe
    constants = load_section(Path("recipes/clusters/h200.yaml"), ClusterConfig)
    agents = [node.node.role for node in samplers_of(plan)]
    workload = sample_workload(recipe, constants.workload, agents)
    return estimate_step(plan, recipe, workload, constants).seconds
