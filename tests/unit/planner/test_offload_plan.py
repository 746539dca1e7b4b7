"""Plans count what is offloaded where it is, and name what may be offloaded where a run does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe, plan_of, write_model

from leaderless.planner.memory.fit import fit_plan
from leaderless.planner.memory.rank import DeviceMemory, format_bytes

CHECKPOINTS, REFERENCE = {"gradient_checkpointing": True}, {"kl": {"coefficient": 0.1}}


def memories(folder: Path, model: dict[str, object] | None = None, **sections: object) -> tuple[DeviceMemory, ...]:
    """On a CPU and on an accelerator."""
    policy = {"path": str(folder), "compute_dtype": "float32", **(model or {})}
    plan = plan_of("grpo", models={"policy": policy}, algorithm=REFERENCE, **sections)
    assert plan.memory is not None
    return plan.memory.cpu, plan.memory.accelerator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_model(tmp_path))


def test_states_on_the_disk_are_no_memory(folder: Path) -> None:
    for before, after in zip(memories(folder), memories(folder, optimizer={"offload": "disk"}), strict=True):
        states = before.resident["policy optimizer"]
        assert states == 2 * before.resident["policy weights"] > 0
        assert after.disk == {"policy optimizer": states}
        assert not before.disk
        assert sum(before.resident.values()) - sum(after.resident.values()) == states
        assert after.peak < before.peak


def test_states_on_the_host_are_there_on_accelerators_alone(folder: Path) -> None:
    (cpu, device), (same, apart) = memories(folder), memories(folder, optimizer={"offload": "host"})
    assert cpu == same
    states = device.resident["policy optimizer"]
    assert "policy optimizer" not in apart.resident
    assert states <= apart.host["policy optimizer"] <= 2 * states, "in blocks of pinned memory"
    assert not apart.disk


def test_weights_that_sleep_are_there_while_they_score(folder: Path) -> None:
    for place in ("disk", "host"):
        found = zip(memories(folder), memories(folder, training={"offload_frozen": place}), strict=True)
        for before, after in found:
            if place == "host" and not before.host:
                assert before == after
                continue
            weights = before.resident["reference weights"]
            assert "reference weights" not in after.resident
            assert after.phases["reference scores"]["weights that slept"] == weights
            assert after.totals["reference scores"] == before.totals["reference scores"]
            assert before.totals["policy trains"] - after.totals["policy trains"] == weights
            assert (after.disk if place == "disk" else after.host)["reference weights"] >= weights


def test_inputs_of_layers_are_elsewhere(folder: Path) -> None:
    found = zip(
        memories(folder, CHECKPOINTS), memories(folder, CHECKPOINTS | {"offload_activations": True}), strict=True
    )
    for before, after in found:
        inputs = (after.host or after.disk)["policy inputs of layers"]
        assert inputs > 0
        # With two layers in all, as many inputs are on their way as there are.
        assert after.phases["policy trains"]["activations"] <= before.phases["policy trains"]["activations"]


def test_a_run_that_does_not_fit_is_told_what_to_offload(folder: Path) -> None:
    policy = {"path": str(folder), "compute_dtype": "float32", **CHECKPOINTS}
    sections: dict[str, object] = {"models": {"policy": policy}, "algorithm": REFERENCE}
    recipe, plan = make_recipe(**sections), plan_of("grpo", **sections)
    assert plan.memory is not None
    for is_cpu, place in ((True, "disk"), (False, "host")):
        memory = plan.memory.cpu if is_cpu else plan.memory.accelerator
        problem = fit_plan(recipe, plan, memory.peak // 2, is_cpu=is_cpu).problem
        states, weights = (format_bytes(memory.resident[f"policy {part}"]) for part in ("optimizer", "weights"))
        assert f"set optimizer.offload={place}, which saves {states}" in problem
        # While the reference scores, its weights have to be there.
        is_helpful = "phase, 'policy trains'" in problem
        assert (f"set training.offload_frozen={place}, which saves {weights}" in problem) == is_helpful == is_cpu


def test_inputs_alone_are_left_where_layers_are_recomputed_only() -> None:
    with pytest.raises(ValueError, match="gradient_checkpointing alone leaves: set it, too"):
        make_recipe(models={"policy": {"path": "model", "offload_activations": True}})
