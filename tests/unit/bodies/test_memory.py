"""The memory that a plan expects of bodies: passes against real ones, rows against real ones, and the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.small_bodies import body_recipe
from tests.small_vla import write_small_vla
from tests.small_worlds import Line

from leaderless.config import Recipe
from leaderless.config.body import BodyConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.environments.bodies.protocol import Continuous
from leaderless.observability.clock import Clock
from leaderless.planner import Cluster, make_plan
from leaderless.planner.body_memory import UNIT_BYTES
from leaderless.planner.fit import fit_plan
from leaderless.planner.plan import Plan
from leaderless.policies import measured
from leaderless.policies.measured import measure_body
from leaderless.policies.opened import model_for
from leaderless.policies.protocol import BodyPolicy
from leaderless.rollout.bodies import BodyEngine, BodyTask
from leaderless.rollout.worlds import OwnWorlds
from leaderless.stages.bodies import BodyRows
from leaderless.workflow import resolve_workflow

TABLE = BodyConfig(type="table")
CPU = torch.device("cpu")


def model_of(kind: str, folder: Path) -> ModelConfig:
    options: dict[str, object] = {}
    if kind == "openvla_oft":
        options = {"path": str(write_small_vla(folder)), "statistics": "small_arm", "chunk": 2}
    return ModelConfig.model_validate({"body": {"type": kind, "options": options}, "compute_dtype": "float32"})


@pytest.mark.parametrize("kind", ["cnn", "film", "openvla_oft"])
def test_a_pass_without_numbers_holds_what_a_real_one_holds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "FEW", 16)
    monkeypatch.setattr(measured, "MORE", 48)
    sizes = []
    for device in ("meta", "cpu"):
        measured._measured.cache_clear()
        monkeypatch.setattr(measured, "META", torch.device(device))
        sizes.append(measure_body(model_of(kind, tmp_path), "models.policy", TABLE, is_critic=False))
    measured._measured.cache_clear()
    expected, real = sizes
    assert replace(expected, trained_bytes=0, scored_bytes=0) == replace(real, trained_bytes=0, scored_bytes=0)
    assert expected.trained_bytes == pytest.approx(real.trained_bytes, rel=0.15)
    assert expected.scored_bytes == pytest.approx(real.scored_bytes, rel=0.15)
    assert expected.trained_bytes > expected.scored_bytes > 0


class Endless(Line):
    """Nobody gets to the middle."""

    def __init__(self, num: int, *, max_steps: int = 6) -> None:
        super().__init__(num, max_steps=max_steps)
        self.spaces = replace(self.spaces, actions=Continuous((-1e-3,), (1e-3,)))


def plan_of(recipe: Recipe) -> Plan:
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1))


def test_rows_take_what_is_expected_where_episodes_are_as_long_as_may_be(tmp_path: Path) -> None:
    changes = {"body.type": f"{__name__}:Endless", "batch": {"prompts_per_step": 8, "responses_per_prompt": 2}}
    recipe = body_recipe(tmp_path, **changes)  # type: ignore[arg-type]
    assert recipe.body is not None
    memory, model = plan_of(recipe).memory, recipe.models["policy"]
    assert memory is not None
    policy = model_for(model, "models.policy", Endless(1).spaces, is_critic=False)
    assert isinstance(policy, BodyPolicy)
    engine = BodyEngine(policy, lambda: OwnWorlds(Endless(16), 16), CPU)
    tasks = [BodyTask(number, {}, seed=number) for number in range(64)]
    episodes = engine.play(tasks, seed=0, temperature=1.0, progress=lambda _: None, clock=Clock())
    episodes = [one for one in episodes if not one.is_success][:16]
    prompts = Batch(torch.arange(8) << 16, {"rows": ({},) * 8})
    columns = BodyRows(policy, recipe.body, 1.0, 0).samples(prompts, torch.arange(16), episodes).columns
    held = sum(one.values.nbytes for one in columns.values() if isinstance(one, Jagged))
    expected = memory.cpu.resident["rows of the step"]
    num_units = int(columns["tokens"].lengths.sum())  # type: ignore[union-attr]
    computed_later = num_units * 16  # advantages, and log-probabilities and values before an update
    assert held + computed_later == pytest.approx(expected, rel=0.02)
    assert num_units == 16 * 6
    assert num_units * UNIT_BYTES < expected


def test_what_is_expected_grows_with_what_a_recipe_keeps(tmp_path: Path) -> None:
    def parts(**changes: object) -> dict[str, int]:
        plan = plan_of(body_recipe(tmp_path, **changes))  # type: ignore[arg-type]
        assert plan.memory is not None
        memory = plan.memory.cpu
        return {**memory.resident, **memory.phases["policy trains"], "peak": memory.peak}

    few, more = parts(), parts(**{"batch.prompts_per_step": 8, "body.processes": 2})
    assert more["rows of the step"] == 2 * few["rows of the step"]
    assert "shared with simulators" not in few
    assert more["shared with simulators"] > 0
    assert parts(**{"batch.micro_batch_tokens": 6})["activations"] * 16 == few["activations"]
    recomputed = {"models.policy.gradient_checkpointing": True}
    assert parts(**{"batch.micro_batch_tokens": 2, **recomputed})["activations"] * 48 == few["activations"]
    wide = parts(**{"models.policy": {"body": {"type": "mlp", "options": {"hidden_size": 512}}}})
    assert wide["policy optimizer"] == 2 * wide["policy weights"] == 2 * wide["gradients"]
    assert wide["policy weights"] > few["policy weights"]


def test_a_shortage_names_what_to_lower(tmp_path: Path) -> None:
    recipe = body_recipe(tmp_path)
    fit = fit_plan(recipe, plan_of(recipe), 1 << 20, is_cpu=True)
    assert fit.is_hopeless
    assert "lower batch.prompts_per_step=4, whose episodes are kept" in fit.problem


def test_a_plan_is_possible_where_the_environment_is_not(tmp_path: Path) -> None:
    recipe = body_recipe(tmp_path, **{"body.options": {"max_steps": 7}})
    assert plan_of(recipe).memory is None
