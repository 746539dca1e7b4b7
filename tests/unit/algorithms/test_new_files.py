"""One new file is one new advantage or loss: for recipes, plans, the catalog and the pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.algorithms.overlay import with_new_files

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
sys.path[:0] = ["docs"]
from leaderless.algorithms.catalogue import entries
from leaderless.config import Recipe, RecipeError, load_recipe
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow, spec_of
from leaderless.observability.known_metrics import METRICS
from leaderless.planner.workflow.stage_spec import names_for

def refusal(*overrides):
    try:
        load_recipe(sys.argv[1], overrides)
    except RecipeError as error:
        return str(error)

recipe = load_recipe(sys.argv[1]).recipe
workflow = resolve_workflow("grpo")
plan = make_plan(recipe, workflow, Cluster(2))
schema = Recipe.model_json_schema()["$defs"]
found = {
    "settings": [recipe.algorithm.advantage.model_dump(), recipe.algorithm.policy_loss.model_dump()],
    "reads": [plan["advantage"].reads, plan["policy"].reads],
    "metrics": [name for node in workflow.nodes for name in names_for(recipe, node, spec_of(node).metrics)],
    "meanings": [METRICS["harmonic/baseline"], METRICS["<role>/root"]],
    "schema": [schema["HarmonicAdvantage"]["properties"]["power"], schema["RootLoss"]["properties"]["root"]],
    "entries": [list(entry) for entry in entries() if entry.name in {"harmonic", "root"}],
    "bound": refusal("algorithm.policy_loss.root=0.5"),
    "nearest": refusal("algorithm.advantage.powr=1"),
    "combination": refusal("algorithm.aggregation=token_mean"),
    "other": refusal("algorithm.advantage={type: gae}"),
    "typo": refusal("algorithm.advantage={type: harmonik}"),
    "torch": "torch" in sys.modules,
}
from generate_algorithms import combinations
found["combinations"] = combinations()
print(json.dumps(found))
"""
RECIPE = """
name: new
workflow: grpo
models: {policy: some/model}
data: {train: {path: rows.jsonl}}
reward: {math: 1}
steps: 1
algorithm:
  advantage: {type: harmonic, power: 3}
  policy_loss: {type: root}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, object]:
    folder = tmp_path_factory.mktemp("new")
    (folder / "recipe.yaml").write_text(RECIPE)
    environment = {**os.environ, "PYTHONPATH": str(with_new_files(folder / "src"))}
    command = [sys.executable, "-c", PROGRAM, str(folder / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_fields_are_settings_of_the_recipe(found):
    assert found["settings"] == [{"type": "harmonic", "power": 3}, {"type": "root", "root": 2}]
    assert found["bound"].endswith("algorithm.policy_loss.root=0.5: must be greater than or equal to 1")
    assert "algorithm.advantage.powr: unknown key (did you mean 'power'?)" in found["nearest"]
    assert "unknown type (did you mean 'harmonic'?)" in found["typo"]
    assert [field["description"] for field in found["schema"]] == ["Exponent of the mean.", "Root of the ratio."]


def test_what_it_reads_and_reports_is_planned(found):
    assert "truncated" in found["reads"][0]
    assert "rewards" in found["reads"][1]
    assert {"harmonic/baseline", "policy/root"} <= {*found["metrics"]}
    assert found["meanings"] == [
        ["mean baseline", "`algorithm.advantage.type` set to `harmonic`", False],
        ["mean root of the ratio", "`algorithm.policy_loss.type` set to `root`", False],
    ]


def test_what_it_refuses_is_refused_and_in_the_table(found):
    assert "aggregation=token_mean does not go with advantage.type=harmonic" in found["combination"]
    assert "advantage.type=gae does not go with policy_loss.type=root" in found["other"]
    table = found["combinations"]
    assert "| `harmonic` |" in table
    assert "\n| `root` |" in table
    assert "`algorithm.advantage.type=gae` does not go with `policy_loss.type=root`" in table


def test_it_is_in_the_catalog(found):
    assert found["entries"] == [
        ["advantage", "harmonic", "r - (mean |r|^power)^(1 / power), or half of it", "made for a test"],
        ["policy loss", "root", "-root ratio^(1 / root) A / (1 + r)", "made for a test"],
    ]


def test_it_needs_no_torch_to_be_read(found):
    assert found["torch"] is False
