"""Where the seconds come from by which `layout: auto` chooses: the run itself, a profile, or a cost model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny import tiny_model, write_recipe
from tests.unit.recipes import only_problem

from leaderless import Run
from leaderless.config import RecipeError
from leaderless.config.packaged_files import recipes_folder
from leaderless.planner.placement.stage_seconds import MachineIdentity, Profile, StageSeconds, settings_of
from leaderless.run.planned_run import Planned, plan_training

TESTBED = recipes_folder() / "clusters/testbed.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def auto(folder: Path, *overrides: str) -> Run:
    return Run(write_recipe(folder, tiny_model(), {"layout": "auto"}), *overrides)


def planned(folder: Path, *overrides: str, fresh: bool = False) -> Planned:
    return plan_training(auto(folder, *overrides).loaded, 2, fresh=fresh)


def source(one: Planned) -> str:
    assert one.choice is not None
    return one.choice.profile.cluster


def write_profile(folder: Path) -> None:
    run = auto(folder)
    stages = {name: StageSeconds(row_s=0.01) for name in ("rollout", "reward", "advantage", "policy", "samples")}
    machine = MachineIdentity(processor="made up", memory_gib=64)
    profile = Profile(machine=machine, settings=settings_of(run.recipe), world_size=2, stages=stages, lengths=(4,) * 8)
    (folder / "profile.json").write_text(profile.model_dump_json())


def begin(run: Planned) -> None:
    """Leave the folder of a run that has a checkpoint."""
    checkpoint = run.directory.checkpoints / "step-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({}))
    assert run.choice is not None
    run.directory.profile.write_text(run.choice.profile.model_dump_json())
    assert run.directory.last_step() == 1


def test_without_a_profile_layouts_are_chosen_by_the_described_machines(folder):
    one = planned(folder, f"placement.cluster={TESTBED}")
    assert "test bed" in source(one)
    assert one.recipe.placement is None
    one.check_inputs()  # nothing was measured on machines with another processor


def test_a_profile_is_taken_where_there_is_one(folder):
    write_profile(folder)
    assert source(planned(folder, f"placement.cluster={TESTBED}")) == ""


def test_without_either_the_error_names_all_remedies(folder):
    with pytest.raises(RecipeError) as caught:
        planned(folder)
    message = only_problem(caught.value).message
    assert all(remedy in message for remedy in ("leaderless profile RECIPE", "--cluster FILE", "write `layout` out"))


def test_a_description_that_is_none_is_named_with_its_place(folder):
    with pytest.raises(RecipeError, match=r"override placement.cluster=no.yaml: placement.cluster: no.yaml does not"):
        planned(folder, "placement.cluster=no.yaml")
    (folder / "own.yaml").write_text(TESTBED.read_text().replace("peak_tflops", "peak_tflop"))
    with pytest.raises(RecipeError, match=r"own.yaml:\d+: placement.cluster.device.peak_tflop: unknown key"):
        planned(folder, "placement.cluster=own.yaml")


def test_a_run_continues_with_the_seconds_that_it_was_begun_with(folder):
    description = folder / "own.yaml"
    description.write_text(TESTBED.read_text())
    first = planned(folder, "placement.cluster=own.yaml")
    begin(first)
    description.unlink()
    again = planned(folder, "placement.cluster=own.yaml")
    assert again.plan.hash() == first.plan.hash()
    write_profile(folder)
    assert planned(folder, "placement.cluster=own.yaml").plan.hash() == first.plan.hash()
    assert source(planned(folder, "placement.cluster=own.yaml", fresh=True)) == ""
    # A setting that seconds depend on may differ when a run continues; they are looked for again then.
    with pytest.raises(RecipeError, match=r"profile.json was measured with rollout.max_sequences=16"):
        planned(folder, "rollout.max_sequences=8")
