"""Runs that train adapters: they are resumed, exported, and begun from a folder of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from examples.signal_game.prepare import prepare
from peft import PeftModel
from rich.console import Console
from tests.contracts.plain_engine import PlainEngine
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_ppo import local, train_until
from tests.end_to_end.test_team import write_game
from tests.tiny import tiny_model, write_recipe
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leaderless.distributed.weights.blocks import LocalWeight
from leaderless.distributed.weights.stream import WeightStream
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.weight_sources import Serving
from leaderless.run.standalone_model import find_model, open_model
from leaderless.stages.context import ModelRole
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.build import roles as worker_roles
from leaderless.worker.build.process import open_worker
from leaderless.worker.checkpoint.export import export_model
from leaderless.worker.rank_info import RankInfo

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def recipe_of(folder: Path, lora: dict[str, object]) -> str:
    folder.mkdir(exist_ok=True)
    changes = {
        "models": {"policy": {"path": tiny_model(num_layers=1), "lora": lora}},
        "optimizer.learning_rate": 0.01,
        "reward": {"format": {"pattern": r".*\d.*"}},
        "checkpoint": {"every_steps": 2},
        "steps": 4,
    }
    return str(write_recipe(folder, tiny_model(num_layers=1), changes))


def logits_of(model: PreTrainedModel | PeftModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def test_adapters_are_resumed_exported_and_begun_with(ranks: RankPool, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"rank": 3})
    (whole,) = ranks.run(1, train_until, recipe, "whole", 4, init_group=False)
    ranks.run(1, train_until, recipe, "parts", 2, init_group=False)
    (parts,) = ranks.run(1, train_until, recipe, "parts", 4, init_group=False)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert {name.rpartition(".")[2] for name in whole} == {"lora_A", "lora_B", "version"}

    checkpoint = tmp_path / "runs/whole/checkpoints/step-000004"
    base = AutoModelForCausalLM.from_pretrained(tiny_model(num_layers=1), dtype=torch.float32)
    plain = logits_of(base)
    adapters = export_model(checkpoint, "policy", tmp_path / "adapters")
    merged = AutoModelForCausalLM.from_pretrained(
        export_model(checkpoint, "policy", tmp_path / "merged", merge=True), dtype=torch.float32
    )
    adapted = PeftModel.from_pretrained(base, adapters)
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), atol=1e-5, rtol=0)
    assert (logits_of(merged) - plain).abs().max() > 1e-3

    source = find_model(str(checkpoint), "policy", print)
    engine_of_a_user = "tests.contracts.plain_engine:make"
    with open_model(source, engine_of_a_user, None, print) as served, served.serving.phase() as engine:
        torch.testing.assert_close(logits_of(cast("PlainEngine", engine).model), logits_of(merged), atol=1e-5, rtol=0)

    again = recipe_of(tmp_path / "again", {"adapter": str(adapters)})
    (begun,) = ranks.run(2, train_until, again, "again", 0, init_group=False)[:1]
    for name, value in begun.items():
        if name.startswith("policy.weights."):
            assert torch.equal(value, whole[name][: len(value)])


def train_with_a_fault(recipe: str, fault: str) -> str:
    """The error of a run in which a matrix B is lost on its way to the engine, or all of them stay as at first."""
    load, first = NativeEngine.load_weights, dict[str, Tensor]()

    def changed(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for number, (name, value) in enumerate(weights):
            if fault == "stale" and name.endswith("lora_B"):
                yield name, first.setdefault(name, value.clone())
            elif fault == "stale" or number != 1:
                yield name, value

    def load_changed(engine: NativeEngine, weights: WeightStream, *, keep_cache: bool = True) -> None:
        weights._weights = changed(weights._weights)
        load(engine, weights, keep_cache=keep_cache)

    with patch.object(NativeEngine, "load_weights", load_changed), pytest.raises(RuntimeError) as error:
        train_until(recipe, fault, 4)
    return str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lost", r"1 of the model's weights have not been sent, such as model.layers.0.self_attn.q_proj.lora_B"),
        ("stale", r"the native engine does not use the weights of policy version 1 that were loaded"),
    ],
)
def test_adapters_that_do_not_arrive_end_the_run(ranks: RankPool, tmp_path: Path, fault: str, message: str) -> None:
    (error,) = ranks.run(1, train_with_a_fault, recipe_of(tmp_path, {"rank": 3}), fault, init_group=False)
    assert re.search(message, error)


def train_team(recipe: str, name: str, shares: bool) -> tuple[dict[str, Tensor], list[int]]:
    """States of roles after a run, and the places at which trainers and engines have a weight under their adapters."""
    loaded, place = load_recipe(recipe, [f"name={name}"]).recipe, RankInfo.from_environment()
    plan = make_plan(loaded, resolve_workflow(loaded.workflow), Cluster(place.world_size))
    with ExitStack() as stack:
        if not shares:
            stack.enter_context(patch.object(worker_roles, "donor_of", lambda *_: None))
        worker = stack.enter_context(open_worker(loaded, plan, place, Display(Console(), is_shown=False)))
        worker.run()
        roles, states, places = worker.parts.roles, dict[str, Tensor](), list[int]()
        for role, engine in roles.trained().items():
            states |= {f"{role}.{key}": local(value).clone() for key, value in engine.state().items()}
            layout = next(one.layout for one in plan.instances if one.role == role)
            serving = cast("Serving", cast("ModelRole", roles.of(role, layout)).serving)
            for decoder in (cast("FsdpEngine", engine).model, cast("NativeEngine", serving.engine).model):
                weight = decoder.model.get_parameter("model.layers.0.mlp.up_proj.weight")
                places.append(LocalWeight.of("", weight).local.data_ptr())
    return states, places


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_agents_on_one_model_have_it_once_and_learn_as_on_two(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    prepare(tmp_path)
    path = str(tmp_path / "planner")
    models = {"planner": {"path": path, "lora": {"rank": 4}}, "solver": {"path": path, "lora": {"rank": 2}}}
    recipe = str(write_game(tmp_path, "dr_mas", {}, models=models))
    shared, own = (
        ranks.run(world_size, train_team, recipe, f"team-{shares}", shares, init_group=False)
        for shares in (True, False)
    )
    for (states, places), (expected, others) in zip(shared, own, strict=True):
        assert places[:2] == places[2:], "both trainers, and both engines"
        assert len({*others}) == 4
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(states[name], value), name
        changed = [name for name in states if name.endswith("lora_B") and "weights" in name and states[name].any()]
        assert {name.split(".")[0] for name in changed} == {"planner", "solver"}
