"""What the models of a rank are told of its recipe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from tests.engines import CopyDriver, make_external
from tests.tiny import tiny_model
from tests.unit.recipes import make_recipe, plan_of

from leaderless.config import Recipe
from leaderless.config.models import Whole
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import Transport
from leaderless.planner import Cluster, RoleInstance, make_plan
from leaderless.planner.memory.rank import Room
from leaderless.planner.workflow import Workflow
from leaderless.rollout.external import engine as external
from leaderless.stages.context import ModelRole
from leaderless.training.engine import EngineSetup, Trainable
from leaderless.worker.build import roles
from leaderless.worker.build.memory_bounds import MemoryBounds
from leaderless.worker.build.roles import Roles
from leaderless.worker.device_sharing import DeviceSharing


class MadeError(Exception):
    """A model would be made with this setup."""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "weights"),
        ({"training": {"keep_whole": "all", "compile": False}}, "all"),
        ({"training": {"keep_whole": "nothing"}}, "nothing"),
        ({"roles": {"policy": {"training": {"keep_whole": "all"}}}}, "all"),
    ],
)
def test_ranks_keep_whole_what_the_recipe_says_or_has_room(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, object], expected: Whole
) -> None:
    def make(_: str, setup: EngineSetup) -> None:
        raise MadeError(setup.sharding.keeps, setup.seed, setup.sharding.compiles, setup.sharding.max_logits)

    monkeypatch.setattr(roles, "make_train_engine", make)
    monkeypatch.setattr(roles, "check_policy", lambda *_: None)
    nothing = SimpleNamespace(rank=0, process_group=lambda _: None, axis_groups=lambda _: {})
    transport, turns = cast("Transport", nothing), cast("DeviceSharing", SimpleNamespace(device=torch.device("cpu")))
    recipe, plan = make_recipe(seed=7, **sections), plan_of("grpo", seed=7, **sections)
    memory = MemoryBounds(0, is_cpu=True, pass_tokens=0, room=Room("weights", 99))
    with pytest.raises(MadeError) as made:
        Roles(recipe, plan, transport, turns, cast("Tokenizer", None), Path(), print, memory)
    assert made.value.args == (expected, 7, recipe.as_seen_by("policy").training.compile, 99)


def test_an_engine_next_to_a_trainer_starts_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    class Started(CopyDriver):
        def start(self) -> None:
            done.append("the engine starts, asleep")

        def close(self) -> None:
            done.append("the engine is closed")

    def make(_: str, setup: EngineSetup) -> None:
        done.append(f"{setup.role} is loaded")
        raise MadeError

    engine = make_external(Started(tiny_model()))
    monkeypatch.setattr(roles, "make_engine", lambda *_: engine)
    monkeypatch.setattr(roles, "make_train_engine", make)
    monkeypatch.setattr(roles, "check_policy", lambda *_: None)
    monkeypatch.setattr(external, "release_memory", lambda _: done.append("cached blocks are released"))
    everyone = SimpleNamespace(size=1, activity=Mock())
    made = SimpleNamespace(process_group=lambda _: None, axis_groups=lambda _: {}, world=everyone, activity=Mock())
    transport = cast("Transport", SimpleNamespace(rank=0, **vars(made)))
    turns = cast("DeviceSharing", SimpleNamespace(device=torch.device("cpu")))
    sections = {"rollout": {"engine": "vllm"}}
    recipe, plan = make_recipe(**sections), plan_of("grpo", **sections)
    with pytest.raises(MadeError):
        Roles(recipe, plan, transport, turns, cast("Tokenizer", None), Path(), print)
    assert done == [
        "cached blocks are released",
        "the engine starts, asleep",
        "policy is loaded",
        "the engine is closed",
    ]


@pytest.mark.parametrize(("rank", "reason"), [(0, "it has experts"), (1, "it has experts"), (0, "")])
def test_one_rank_says_that_the_layers_of_a_role_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, rank: int, reason: str
) -> None:
    ranks = SimpleNamespace(ranks=(0, 1))
    engine = SimpleNamespace(process_group=ranks, vocab_size=9, why_not_compiled=reason)
    monkeypatch.setattr(roles, "make_train_engine", lambda *_: engine)
    monkeypatch.setattr(roles, "check_vocabulary", lambda *_: None)
    monkeypatch.setattr(Roles, "_check_players", lambda _: None)
    monkeypatch.setattr(Roles, "_colocated", lambda *_: None)
    there = SimpleNamespace(rank=rank, process_group=lambda _: ranks, axis_groups=lambda _: {})
    transport, turns = cast("Transport", there), cast("DeviceSharing", SimpleNamespace(device=torch.device("cpu")))
    said = list[str]()
    recipe, plan = make_recipe(), plan_of("grpo", 2)
    Roles(recipe, plan, transport, turns, cast("Tokenizer", None), Path(), said.append)
    expected = f"layers of role 'policy' are not compiled, and so slower, since {reason}"
    assert said == ([expected] if reason and rank == 0 else [])


def test_a_role_whose_engine_is_to_be_shared_leaves_the_one_of_its_own() -> None:
    """Else there would be two engines where the plan counts one."""
    models = {role: {"path": "/no/model", "lora": {"rank": 2}} for role in ("planner", "solver")}
    workflow = Workflow("two")
    for role in models:
        workflow = workflow.node(f"{role}_rollout", run="rollout", role=role)
        workflow = workflow.node(f"{role}_reward", run="reward", after=f"{role}_rollout")
        workflow = workflow.node(f"{role}_advantage", run="advantage", after=f"{role}_reward")
        workflow = workflow.node(role, run="update", role=role, after=f"{role}_advantage")

    def recipe_with(ranks: str) -> Recipe:
        stages = ("_rollout", "_reward", "_advantage", "")
        layout = {f"solver{stage}": {"ranks": ranks} for stage in stages} | {
            f"planner{stage}": {"ranks": "0-1"} for stage in stages
        }
        external = {"python": "python"}
        return make_recipe(models=models, layout=layout, rollout={"engine": "vllm", "external": external})

    apart, together = recipe_with("1"), recipe_with("0-1")
    before, after = (make_plan(one, workflow, Cluster(2)) for one in (apart, together))

    class Held(Roles):
        def __init__(self) -> None:
            self._recipe, self._plan, self._transport = together, after, cast("Transport", SimpleNamespace(rank=0))
            self._models = {("planner", (0, 1)): ModelRole(None, None)}
            self.engines, self.made = {("planner", (0, 1)): cast("Trainable", trainer)}, dict[str, object]()

        def _add(self, instance: RoleInstance, trainer: Trainable | None = None) -> None:
            self.made[instance.role] = trainer

        def _move(self, *_: object) -> None:
            pass

    trainer = object()
    held = Held()
    for role in models:
        held._adopt_role(role, before)
    assert held.made == {"planner": trainer, "solver": None}, "its weights stay where they are"
    held = Held()
    held._adopt_role("planner", after)
    assert held.made == {}
