"""What every environment of bodies must do, for all that come with the package and are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from benchmarks.bodies import CASES as MEASURED

from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.conformance import CHECKS
from leaderless.embodied.simulators.registry import ADAPTERS, find_body

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))  # as when it is run
from generate_simulators import SPACES as DECLARED
from generate_simulators import described

CASES = {
    "table": ("table", "numpy", {}),
    "table, lag and noise": ("table", "numpy", {"lag": 0.5, "noise": 0.01, "max_steps": 20}),
    "table in space": ("table_in_space", "numpy", {"lag": 0.3, "noise": 0.01, "max_steps": 20}),
    "table in space, hand": ("table_in_space", "numpy", {"num_axes": 4, "max_steps": 20}),
    "faulty": (
        "faulty",
        "numpy",
        {"type": "table_in_space", "options": {"max_steps": 20}, "error": 0.05, "hang": 0.05},
    ),
    "gymnasium, choices": ("gymnasium", "gymnasium", {"id": "CartPole-v1"}),
    "gymnasium, numbers": ("gymnasium", "gymnasium", {"id": "Pendulum-v1", "max_steps": 30}),
    "babyai": ("babyai", "minigrid", {}),
    "babyai, symbols": ("babyai", "minigrid", {"id": "BabyAI-PickupLoc-v0", "tile_size": 0}),
    "mujoco": ("gymnasium", "mujoco", {"id": "HalfCheetah-v5", "max_steps": 40}),
    "mujoco, contacts": ("gymnasium", "mujoco", {"id": "Ant-v5", "max_steps": 40}),
    "fetch": ("gymnasium", "gymnasium_robotics", {"id": "gymnasium_robotics:FetchReach-v4"}),
    "fetch, things": ("gymnasium", "gymnasium_robotics", {"id": "gymnasium_robotics:FetchPickAndPlace-v4"}),
    "isaaclab": ("isaaclab", "isaaclab", {}),
    "libero": ("libero", "robosuite", {"max_steps": 8, "image_size": 0}),
    "maniskill": ("maniskill", "mani_skill", {"max_steps": 12}),
    "maniskill, pixels": ("maniskill", "mani_skill", {"id": "PushCube-v1", "max_steps": 6, "image_size": 32}),
    "metaworld": ("metaworld", "metaworld", {"max_steps": 40}),
    "metaworld, pixels": ("metaworld", "metaworld", {"tasks": ["reach"], "max_steps": 12, "image_size": 32}),
    "panda": ("panda", "panda_gym", {}),
    "panda, push": ("panda", "panda_gym", {"id": "PandaPush-v3"}),
    "pusht": ("pusht", "gym_pusht", {"max_steps": 40}),
}
"""Name of the adapter, package that it needs, and options of each case."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_adapters_keep_the_rules(case, check):
    name, package, options = CASES[case]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"package {package} is not installed; `make test-bodies` tries it")
    if name == "libero" and not os.environ.get("LIBERO_ROOT"):
        pytest.skip("LIBERO_ROOT does not name a folder with LIBERO's repository and assets")
    make = partial(find_body(BodyConfig(type=name, options=options)), **options)
    if name == "maniskill":
        try:
            make(1).close()
        except OSError as error:
            pytest.skip(f"{error}")
    check(make)  # all of them can be saved


@pytest.mark.parametrize("case", json.loads(DECLARED.read_text(encoding="utf-8")))
def test_pages_show_what_environments_declare(case, tmp_path):
    kind, options, package = ("libero", {"root": str(tmp_path)}, "numpy") if case == "LIBERO" else MEASURED[case]
    module = {"leaderless": "numpy", "gymnasium-robotics": "gymnasium_robotics", "gym-pusht": "gym_pusht"}.get(
        package, package.replace("-", "_")
    )
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"package {package} is not installed; `make test-bodies` tries it")
    if case == "LIBERO":  # files of these names are all that it takes to declare
        for folder in ("assets", "bddl_files/libero_spatial"):
            (tmp_path / "libero/libero" / folder).mkdir(parents=True)
        (tmp_path / "libero/libero/bddl_files/libero_spatial/task.bddl").touch()
    one = find_body(BodyConfig(type=kind, options=options))(1, **options)
    assert described(kind, one.spaces) == json.loads(DECLARED.read_text(encoding="utf-8"))[case]
    one.close()


def test_all_adapters_have_a_case():
    assert {name for name, _, _ in CASES.values()} == {"table", "table_in_space", "faulty", *ADAPTERS}
