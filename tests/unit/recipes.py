"""Recipes, plans and stages that tests of config, workflow and planner share."""

from __future__ import annotations

import json
from pathlib import Path

from leaderless.config import Problem, Recipe, RecipeError
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.planner.workflow import Workflow, resolve_workflow, stage

RECIPE = """\
name: tiny
workflow: grpo
models: {policy: some/model}
data:
  train: {path: rows.jsonl}
reward: {math: 1.0}
steps: 3
"""


def write_recipe(folder: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """A recipe file: `RECIPE` with texts replaced, and more lines behind it."""
    text = RECIPE
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "recipe.yaml"
    path.write_text(text + more, encoding="utf-8")
    return path


def make_recipe(**sections: object) -> Recipe:
    """A recipe for GRPO or, with `response` in its data, for another workflow."""
    settings: dict[str, object] = {
        "name": "tiny",
        "workflow": "grpo",
        "models": {"policy": "/no/such/model"},
        "data": {"train": {"path": "rows.jsonl"}},
        "reward": {"math": 1.0},
        "steps": 3,
    }
    return Recipe.model_validate(settings | sections)


def plan_of(workflow: Workflow | str, world_size: int = 1, **sections: object) -> Plan:
    """The plan of a workflow on some ranks, with the given sections of the recipe."""
    resolved = resolve_workflow(workflow) if isinstance(workflow, str) else workflow
    return make_plan(make_recipe(**sections), resolved, Cluster(world_size))


def only_problem(error: RecipeError) -> Problem:
    """The only problem that an error names."""
    assert len(error.problems) == 1, str(error)
    return error.problems[0]


def begin() -> Workflow:
    """A workflow with rollout and reward, to be extended."""
    rollout = Workflow("own").node("rollout", run="rollout", role="policy")
    return rollout.node("reward", run="reward", after="rollout")


def end(workflow: Workflow, after: str | list[str]) -> Workflow:
    """The same workflow with advantage and update."""
    workflow = workflow.node("advantage", run="advantage", after=after)
    return workflow.node("policy", run="update", role="policy", after="advantage")


def write_model(folder: Path, **changes: object) -> str:
    """A folder with the config.json of a small model."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return str(folder)


@stage(reads=["response_lengths", "rewards"], writes=["rewards"])
def length_penalty(batch, context):
    """Reduce the rewards of long responses.

    More about it.
    """


@stage(reads=["rewards"], rows="filter")
def keep_informative(batch, context):
    """Drop groups whose rewards are all equal."""


@stage(writes=["noise"])
def noise(batch, context):
    """Reads nothing."""


@stage(reads=["noise"], writes=["rewards"])
def noise_reward(batch, context):
    """Noise as a reward."""


def undecorated(batch, context):
    """A function that declares nothing."""


@stage(reads=["rewards"])
def one_argument(batch):
    """A function that takes too few arguments."""


def one_node_workflow() -> Workflow:
    return Workflow("own").node("rollout", run="rollout", role="policy")


def no_workflow() -> str:
    return "grpo"


def needs_argument(name: str) -> Workflow:
    return Workflow(name)


def continuous(
    generating: str, training: str, stragglers: str = "wait", mode: str = "continuous", world_size: int = 4
) -> Plan:
    """A plan whose ranks generate ahead of those that train."""
    behind = {name: {"ranks": training} for name in ("reward", "advantage", "policy")}
    channel = {"capacity": 1, "mode": mode, **({"stragglers": stragglers} if mode == "continuous" else {})}
    layout = {"rollout": {"ranks": generating}, **behind}
    return plan_of("grpo", world_size, layout=layout, channels={"rollout": channel})
