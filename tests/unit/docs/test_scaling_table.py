"""The figures of docs/scaling/simulation.md next to plans of the recipes that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.memory.rank import DeviceMemory
from leaderless.planner.workflow import load_recipe, resolve_workflow

ROOT = Path(__file__).parents[3]
POOLS = ["layout.rollout.ranks=0%-50%", "layout.policy.ranks=50%-100%", "rollout.external.python=python3"]
COLUMNS = [("30b-a3b", 8, []), ("235b-a22b", 64, []), ("235b-a22b", 128, []), ("235b-a22b", 256, POOLS)]
"""Recipe, ranks and settings of each column, as comments in the recipes have them."""


def table() -> dict[str, list[str]]:
    """The rows of the table by their first cell."""
    text = (ROOT / "docs/scaling/simulation.md").read_text(encoding="utf-8").partition("## Mixtures of experts")[2]
    lines = [line for line in text.partition("\n\nWith `ep`")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def planned(name: str, world_size: int, changes: list[str]) -> Plan:
    recipe = load_recipe(Path(f"recipes/scaling/qwen3-{name}.yaml"), changes).recipe
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(world_size))


def figures(plan: Plan) -> dict[str, float]:
    """Numbers of the table, of the fullest accelerator."""
    assert plan.memory is not None
    memory: DeviceMemory = plan.memory.accelerator
    resident, generates = memory.resident, memory.phases["policy generates"]
    found: dict[str, float] = {
        "generation: engine's weights": resident.get("policy engine's weights", 0) + generates["engine's weights"],
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
        shown = rows[name][column].split(" of ")[0].split(",")[0]
        decimals = len(shown.partition(".")[2])
        assert f"{value:.{decimals}f}" == shown, f"{name}: {value:.3f} GiB are planned"
