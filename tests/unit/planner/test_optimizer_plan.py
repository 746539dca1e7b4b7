"""Plans refuse settings of optimizers that nothing would follow, and count what the others keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model

from leaderless import EngineSetup, train_backend
from leaderless.config import RecipeError
from leaderless.planner.memory.model import models_of
from leaderless.training.engine import TrainEngine

HERE = "tests.unit.planner.test_optimizer_plan"


@train_backend(scores=True)
def plain(setup: EngineSetup) -> TrainEngine:
    raise NotImplementedError


@train_backend(scores=True, optimizers=["adamw", "sgd"])
def with_sgd(setup: EngineSetup) -> TrainEngine:
    raise NotImplementedError


MEGATRON = {"backend": "megatron", "megatron": {"python": "/usr/bin/python3"}}


@pytest.mark.parametrize(
    ("optimizer", "training", "key", "message"),
    [
        ({"type": "sgd"}, {}, "learning_rate", "'sgd' needs one"),
        ({"type": "sgd", "learning_rate": 0.1, "beta2": 0.9}, {}, "beta2", "is 0.9, but 'sgd' has none: leave it out"),
        ({"momentum": 0.5}, {}, "momentum", "is 0.5, but 'adamw' has none"),
        ({"type": "adamw_8bit", "momentum": 0.5}, {}, "momentum", "'adamw_8bit' has none"),
        ({"type": "adamw_8bit", "state_dtype": "bfloat16"}, {}, "state_dtype", "keeps moments of matrices with 8 bits"),
        ({"type": "muon"}, MEGATRON, "type", "is 'muon', but the back end 'megatron' has adamw alone"),
        ({"type": "adamw_8bit"}, MEGATRON, "type", "the back end 'megatron' has adamw alone"),
        ({"state_dtype": "bfloat16"}, MEGATRON, "state_dtype", "the back end 'megatron' keeps float32"),
        ({"type": "muon"}, {"backend": f"{HERE}:plain"}, "type", "optimizers=...) if it has it"),
        ({"type": "muon"}, {"backend": f"{HERE}:with_sgd"}, "type", "has adamw and sgd alone"),
    ],
)
def test_settings_that_nothing_would_follow_are_refused(
    optimizer: dict[str, object], training: dict[str, object], key: str, message: str
) -> None:
    for place, sections in (
        ("", {"optimizer": optimizer, "training": training}),
        ("roles.policy.", {"roles": {"policy": {"optimizer": optimizer}}, "training": training}),
    ):
        with pytest.raises(RecipeError) as caught:
            plan_of("grpo", **sections)
        problem = only_problem(caught.value)
        assert problem.key == f"{place}optimizer.{key}"
        assert message in problem.message


@pytest.mark.parametrize(
    ("optimizer", "training"),
    [
        ({"type": "muon", "momentum": 0.5, "beta2": 0.9, "state_dtype": "bfloat16"}, {}),
        ({"type": "sgd", "learning_rate": 0.1, "momentum": 0.5, "state_dtype": "bfloat16"}, {}),
        ({"type": "adamw_8bit", "beta1": 0.8}, {}),
        ({"beta1": 0.8}, MEGATRON),
        ({"type": "sgd", "learning_rate": 0.1, "state_dtype": "bfloat16"}, {"backend": f"{HERE}:with_sgd"}),
    ],
)
def test_settings_that_are_followed_are_planned(optimizer: dict[str, object], training: dict[str, object]) -> None:
    plan_of("grpo", optimizer=optimizer, training=training)


def test_a_back_end_declares_optimizers_that_there_are() -> None:
    with pytest.raises(ValueError, match="names 'lion': it can have adamw, adamw_8bit, muon, sgd"):
        train_backend(optimizers=["lion"])


def bytes_of(folder: Path, world_size: int = 1, **optimizer: object) -> tuple[int, int, int]:
    """Weights and optimizer of the policy on a rank, and matrices that are whole in a step."""
    sections = {"models": {"policy": str(folder)}, "optimizer": optimizer}
    plan = plan_of("grpo", world_size, **sections)
    assert plan.memory is not None
    resident, recipe = plan.memory.cpu.resident, make_recipe(**sections)
    ((model,), *_) = models_of(recipe, plan.instances, plan.sizes, "nothing")
    return resident["policy weights"], resident["policy optimizer"], model.whole_matrix_bytes()


def test_plans_count_what_optimizers_keep(tmp_path: Path) -> None:
    model = Path(write_model(tmp_path))
    weights, adam, none = bytes_of(model)
    assert (adam, none) == (2 * weights, 0)
    assert bytes_of(model, state_dtype="bfloat16")[1] == weights
    assert bytes_of(model, type="sgd", learning_rate=0.1)[1] == weights
    assert bytes_of(model, type="sgd", learning_rate=0.1, momentum=0.0)[1] == 0
    _, muon, alone = bytes_of(model, type="muon")
    assert weights < muon < adam
    assert alone == 4 * 64 * 96 * 4, "what the iteration holds of the largest matrix"
    _, half, gathered = bytes_of(model, 2, type="muon")
    assert half == pytest.approx(muon / 2, rel=1e-3)
    hidden = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    assert gathered == alone + 4 * (hidden // 2 + 64 * 96), "also the matrices that a rank owns"
    assert bytes_of(model, type="muon", state_dtype="bfloat16")[1] == pytest.approx(muon / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        (
            {"optimizer": {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0, "offload": "disk"}},
            "optimizer.offload",
            "is disk, but 'sgd' keeps nothing without momentum: leave it out",
        ),
        (
            {"optimizer": {"offload": "host"}, "training": MEGATRON},
            "optimizer.offload",
            "the back end 'megatron' keeps what its optimizer needs on the device: leave it out, or use fsdp",
        ),
        (
            {"training": {"offload_frozen": "disk"}, "algorithm": {"kl": {"coefficient": 0.0}}},
            "training.offload_frozen",
            "no model that it is for is only scored",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(sections: dict[str, object], key: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of("grpo", **sections)
    problem = only_problem(caught.value)
    assert problem.key == key
    assert message in problem.message
