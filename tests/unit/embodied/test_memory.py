"""The memory that a plan expects of bodies: passes against real ones, rows against real ones, and the whole."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.small_bodies import body_recipe
from tests.small_vla import write_small_pi0, write_small_pi05, write_small_vla
from tests.small_worlds import Line

from leaderless.algorithms.settings import SacConfig
from leaderless.config import Recipe, RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.embodied.planning.memory import UNIT_BYTES
from leaderless.embodied.policies import policy_size
from leaderless.embodied.policies.loading import model_for
from leaderless.embodied.policies.policy_size import measure_body, measure_learner
from leaderless.embodied.policies.protocol import BodyPolicy
from leaderless.embodied.policies.squashed import Squashed, check_policy
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.simulators.protocol import Continuous
from leaderless.embodied.simulators.tabletop import TableTask
from leaderless.embodied.stages.rollout import BodyRows
from leaderless.embodied.training.sac_learner import SacLearner
from leaderless.observability.clock import Clock
from leaderless.planner import Cluster, make_plan
from leaderless.planner.memory.fit import fit_plan
from leaderless.planner.plan import Plan
from leaderless.planner.workflow import resolve_workflow

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra adamw-8bit, is missing")
TABLE = BodyConfig(type="table")
CPU = torch.device("cpu")


def model_of(kind: str, folder: Path) -> ModelConfig:
    options: dict[str, object] = {}
    if kind == "openvla_oft":
        options = {"path": str(write_small_vla(folder)), "statistics": "small_arm", "chunk": 2}
    if kind == "pi0":
        options = {"path": str(write_small_pi0(folder, state_size=2)), "chunk": 2}
    if kind == "pi05":
        options = {"path": str(write_small_pi05(folder, state_size=2)), "chunk": 2}
    return ModelConfig.model_validate({"body": {"type": kind, "options": options}, "compute_dtype": "float32"})


@pytest.mark.parametrize("kind", ["cnn", "film", "openvla_oft", "pi0", "pi05"])
def test_a_pass_without_numbers_holds_what_a_real_one_holds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_size, "FEW", 16)
    monkeypatch.setattr(policy_size, "MORE", 48)
    sizes = []
    for device in ("meta", "cpu"):
        policy_size._measured.cache_clear()
        monkeypatch.setattr(policy_size, "META", torch.device(device))
        sizes.append(measure_body(model_of(kind, tmp_path), "models.policy", TABLE, is_critic=False))
    policy_size._measured.cache_clear()
    expected, real = sizes
    assert replace(expected, trained_bytes=0, scored_bytes=0) == replace(real, trained_bytes=0, scored_bytes=0)
    assert expected.trained_bytes == pytest.approx(real.trained_bytes, rel=0.15)
    assert expected.scored_bytes == pytest.approx(real.scored_bytes, rel=0.15)
    assert expected.trained_bytes > expected.scored_bytes > 0


@pytest.mark.parametrize("kind", ["squashed", "squashed_cnn"])
def test_an_update_of_critics_without_numbers_holds_what_a_real_one_holds(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, sac = [], SacConfig(num_heads=3, hidden_size=16)
    for device in ("meta", "cpu"):
        policy_size._measured_learner.cache_clear()
        monkeypatch.setattr(policy_size, "META", torch.device(device))
        sizes.append(measure_learner(model_of(kind, tmp_path), "models.policy", TABLE, sac))
    policy_size._measured_learner.cache_clear()
    expected, real = sizes
    policy = model_for(model_of(kind, tmp_path), "models.policy", TableTask(1).spaces, is_critic=False)
    learner = SacLearner(check_policy(policy, TableTask(1).spaces), sac, OptimizerConfig())
    assert expected.num_critics == real.num_critics == sum(one.numel() for one in learner.critics.parameters())
    assert expected.trained_bytes == pytest.approx(real.trained_bytes, rel=0.15)
    with pytest.raises(RecipeError, match="use body: squashed_cnn"):
        measure_learner(model_of("cnn", tmp_path), "models.policy", TABLE, sac)


OPTIMIZERS: list[dict[str, object]] = [
    {},
    {"state_dtype": "bfloat16"},
    {"type": "sgd", "learning_rate": 0.1},
    {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0},
]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, pytest.param({"type": "adamw_8bit"}, marks=needs_torchao)], ids=str)
def test_what_learns_by_sac_is_all_that_is_saved(tmp_path: Path, optimizer: dict[str, object]) -> None:
    """Weights, critics, slow critics and moments are those of a learner, whole on every rank."""
    changes = {
        "workflow": "sac",
        "models": {"policy": {"body": {"type": "squashed", "options": {"chunk": 2, "hidden_size": 256}}}},
        "algorithm": {"sac": {"num_heads": 4, "hidden_size": 256}},
        "optimizer": optimizer,
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 1},
        "checkpoint": {"every_steps": 1},
    }
    recipe = body_recipe(tmp_path, **changes)  # type: ignore[arg-type]
    assert recipe.algorithm.sac is not None
    policy = model_for(recipe.models["policy"], "models.policy", Line(1).spaces, is_critic=False)
    assert isinstance(policy, Squashed)
    learner = SacLearner(policy, recipe.algorithm.sac, recipe.optimizer)
    of_temperature = [one for name, one in learner.state().items() if name.endswith("log_temperature")]
    assert len(of_temperature) == 1 + len(learner._optimizers["temperature"].states(learner.log_temperature))
    tensors = [*learner.state().values(), *policy.parameters()]
    saved = sum(one.numel() * one.itemsize for one in tensors)
    for num_ranks in (1, 2):
        memory = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(num_ranks)).memory
        assert memory is not None
        parts = memory.cpu.resident
        held = sum(parts[f"policy {kind}"] for kind in ("weights", "optimizer", "critics"))
        assert saved - sum(one.itemsize for one in of_temperature) == held, "all but the temperature"
        assert parts["checkpoint copy"] == held
        assert "policy scores" not in memory.cpu.phases
    larger = body_recipe(tmp_path, **{**changes, "algorithm.sac.batch_size": 1024})  # type: ignore[arg-type]
    grown = plan_of(larger).memory
    assert grown is not None
    first = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1)).memory
    assert first is not None
    parts, others = (one.cpu.phases["policy trains"] for one in (first, grown))
    assert others["activations"] == 4 * parts["activations"] > 0


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
    engine = BodyEngine(policy, lambda: LocalVectorEnvs(Endless(16), 16), CPU)
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


def test_which_matrices_of_a_body_are_hidden_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is 'muon', which is for the matrices of layers that read text"):
        plan_of(body_recipe(tmp_path, optimizer={"type": "muon"}))


def test_a_shortage_names_what_to_lower(tmp_path: Path) -> None:
    recipe = body_recipe(tmp_path)
    fit = fit_plan(recipe, plan_of(recipe), 1 << 20, is_cpu=True)
    assert fit.is_hopeless
    assert "lower batch.prompts_per_step=4, whose episodes are kept" in fit.problem


def test_a_plan_is_possible_where_the_environment_is_not(tmp_path: Path) -> None:
    recipe = body_recipe(tmp_path, **{"body.options": {"max_steps": 7}})
    assert plan_of(recipe).memory is None
