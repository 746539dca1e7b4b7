"""The adapter of LIBERO over a stand-in for its package: starts, cameras, the state, and what actions become."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest

from leaderless.embodied.simulators.conformance import CHECKS
from leaderless.embodied.simulators.libero_tasks import CAMERAS, Libero
from leaderless.embodied.simulators.protocol import Continuous

IDLE = [0, 0, 0, 0, 0, 0, -1]
SIZE = 4
TASKS = ("close_the_drawer", "lift_the_bowl")
STARTS = np.arange(2 * 3 * 5, dtype=np.float64).reshape(2, 3, 5)
"""Start states [task, start, numbers]; the first number tells them apart."""


class ControlEnv:
    """A hand on a line with the interface of `libero.libero.envs.env_wrapper.ControlEnv`, which notes what it is told.

    Beyond 0.9 the task is done. Pixels are numbered from the upper left as robosuite gives them, upside down; the first
    of them is the start, as far as the hand has not moved.
    """

    opened: ClassVar[list[ControlEnv]] = []

    def __init__(self, bddl_file_name, **options):
        self.file, self.options = Path(bddl_file_name), options
        self.language_instruction = self.file.stem.replace("_", " ")
        self.told: list[tuple[str, object]] = []
        self.is_closed = False
        self.opened.append(self)

    def seed(self, seed):
        self.told.append(("seed", seed))
        self.chance = np.random.default_rng(seed)

    def reset(self):
        self.told.append(("reset", None))
        self.start, self.place, self.grip = self.chance.uniform(size=5), 0.0, 0.0

    def set_init_state(self, state):
        self.told.append(("start", np.array(state).tolist()))
        self.start = np.array(state)
        return self._shown()

    def step(self, action):
        assert action.shape == (7,)
        assert action.dtype == np.float64
        self.told.append(("step", action.tolist()))
        self.place += 0.1 * action[0]
        self.grip = -0.04 * action[6]  # the fingers are apart where the gripper is open
        return self._shown(), 0.0, False, {}

    def check_success(self):
        return self.place > 0.9

    def close(self):
        self.is_closed = True

    def _shown(self):
        pixels = np.arange(SIZE * SIZE * 3).reshape(SIZE, SIZE, 3)
        shown = {
            f"{name}_image": (pixels + 100 * number + self.start[0] + 10 * self.place).astype(np.uint8)
            for number, name in enumerate(self.options["camera_names"])
        }
        return shown | {
            "robot0_eef_pos": np.array([self.place, self.start[0], 0.5]),
            "robot0_eef_quat": np.array([0, 0, np.sqrt(0.5), np.sqrt(0.5)]),
            "robot0_gripper_qpos": np.array([self.grip, -self.grip]),
        }


PACKAGE = """
import os
import yaml
folder = os.environ["LIBERO_CONFIG_PATH"]
def get_libero_path(name):
    return read()[name]
def read():
    with open(os.path.join(folder, "config.yaml")) as file:
        return yaml.safe_load(file)
places_when_imported = read()
"""
"""What LIBERO does with its file: it reads it again for each question."""
UTILS = """
import os
assert os.path.exists(os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml"))
"""
WRAPPER = """
from libero.libero import get_libero_path
from tests.unit.embodied.test_libero import ControlEnv
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder like LIBERO's repository, with stand-ins for the packages."""
    library = tmp_path / "libero/libero"
    for place in ("assets", "bddl_files/libero_spatial", "init_files/libero_spatial"):
        (library / place).mkdir(parents=True)
    for name, starts in zip(TASKS, STARTS, strict=True):
        (library / f"bddl_files/libero_spatial/{name}.bddl").touch()
        np.save(library / f"init_files/libero_spatial/{name}.npy", starts)
    (library / "utils").mkdir()
    (library / "envs").mkdir()
    for place, text in {"": PACKAGE, "utils/": UTILS, "envs/": ""}.items():
        (library / f"{place}__init__.py").write_text(text)
    (library / "envs/env_wrapper.py").write_text(WRAPPER)
    for name in ("robosuite", "bddl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ControlEnv, "opened", [])
    yield str(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


def opened(root, num=1, **options):
    return Libero(num, root=root, image_size=SIZE, **options)


def test_a_start_is_that_of_the_row_after_fifteen_idle_steps(root):
    one = opened(root)
    one.reset([0], [{"task": 1, "start": 2}], [7])
    world = ControlEnv.opened[0]
    assert world.file == Path(root) / "libero/libero/bddl_files/libero_spatial/lift_the_bowl.bddl"
    begin = [("seed", 0), ("reset", None), ("start", STARTS[1, 2].tolist())]
    assert world.told == begin + [("step", IDLE)] * 15
    one.reset([0], [{"task": 1, "start": 0}], [7])
    assert len(ControlEnv.opened) == 1, "a task stays open"
    one.reset([0], [{"task": 0, "start": 0}], [7])
    assert [one.is_closed for one in ControlEnv.opened] == [True, False]


def test_both_cameras_are_upright(root):
    one = opened(root)
    seen = one.reset([0], [{"task": 0, "start": 0}], [0])
    assert ControlEnv.opened[0].options == {
        "use_camera_obs": True,
        "has_offscreen_renderer": True,
        "camera_names": ["agentview", "robot0_eye_in_hand"],
        "camera_heights": SIZE,
        "camera_widths": SIZE,
        "ignore_done": True,
    }
    pixels = np.arange(SIZE * SIZE * 3).reshape(SIZE, SIZE, 3)
    for number, name in enumerate(CAMERAS):
        image = seen.images[name]
        assert (image.shape, image.dtype) == ((1, SIZE, SIZE, 3), np.uint8)
        turned = pixels[::-1, ::-1] + 100 * number  # by half a circle: the last pixel comes first
        assert (image[0] == turned).all()
    blind = Libero(1, root=root, image_size=0)
    assert blind.reset([0], [{}], [0]).images == {}
    assert ControlEnv.opened[-1].options["camera_names"] == []
    assert not ControlEnv.opened[-1].options["has_offscreen_renderer"]


def test_a_state_has_place_turn_and_fingers_and_the_gripper_closes_above_0(root):
    one = opened(root)
    assert one.spaces.actions == Continuous((-1.0,) * 7, (1.0,) * 7)
    state = one.reset([0], [{"task": 0, "start": 1}], [0]).state
    assert (state.shape, state.dtype) == ((1, one.spaces.state_size), np.float32)
    assert one.spaces.state_size == 8
    expected = [0, STARTS[0, 1, 0], 0.5, 0, 0, np.pi / 2, 0.04, -0.04]
    assert state[0].tolist() == pytest.approx(expected), "idle steps have opened the gripper"
    steps = one.step([0], np.array([[[0.5, 0, 0, 0, 0, 0, 1]]], np.float32))
    assert ControlEnv.opened[0].told[-1] == ("step", [0.5, 0, 0, 0, 0, 0, 1]), "as it was decided"
    assert steps.observations.state[0].tolist() == pytest.approx([0.05, *expected[1:6], -0.04, 0.04])
    one.step([0], np.array([[[9, 0, 0, 0, 0, 0, -9]]], np.float32))
    assert ControlEnv.opened[0].told[-1] == ("step", [1, 0, 0, 0, 0, 0, -1]), "within the range"


def test_a_group_begins_in_one_state_and_seeds_choose_among_all(root):
    one = opened(root, 4)
    seen = one.reset([0, 1, 2, 3], [{}] * 4, [5, 5, 5, 5])
    starts = [next(what for kind, what in world.told if kind == "start") for world in ControlEnv.opened]
    assert len(starts) == 4
    assert starts == starts[:1] * 4
    for shown in (seen.state, *seen.images.values()):
        assert all(row.tobytes() == shown[0].tobytes() for row in shown)
    assert set(seen.instructions) == {ControlEnv.opened[0].language_instruction}
    found = set()
    for seed in range(40):
        one.reset([0], [{}], [seed])
        found.add(tuple(next(what for kind, what in ControlEnv.opened[-1].told[::-1] if kind == "start")))
    assert found == {tuple(start) for starts in STARTS for start in starts}
    with pytest.raises(ValueError, match="'start' of the dataset is 3: must be a number from 0 to 2"):
        one.reset([0], [{"start": 3}], [0])


def test_success_ends_an_episode_with_reward_1_and_time_cuts_it(root):
    one = opened(root, 2, max_steps=12)
    one.reset([0, 1], [{"task": 0, "start": 0}] * 2, [0, 0])
    actions = np.zeros((2, 20, 7), np.float32)
    actions[0, :, 0] = 1
    steps = one.step([0, 1], actions)
    assert steps.num_steps.tolist() == [10, 12]
    assert steps.rewards.sum(1).tolist() == [1, 0]
    assert (steps.terminated.tolist(), steps.truncated.tolist()) == ([True, False], [False, True])
    assert steps.success.tolist() == [True, False]
    assert steps.infos[0] == {"task": "close_the_drawer"}


@pytest.mark.parametrize("check", CHECKS)
def test_the_adapter_keeps_the_rules(root, check):
    made = []

    def make(num):
        made.append(opened(root, num, max_steps=6))
        return made[-1]

    check(make)
    for one in made:
        one.close()
    assert all(world.is_closed for world in ControlEnv.opened)


def test_libero_is_told_where_its_files_are_asks_nothing_and_leaves_nothing_behind(root, monkeypatch):
    opened(root).reset([0], [{}], [0])
    library = f"{root}/libero/libero"
    told = sys.modules["libero.libero"].places_when_imported
    assert told == {
        "benchmark_root": library,
        "bddl_files": f"{library}/bddl_files",
        "init_states": f"{library}/init_files",
        "assets": f"{library}/assets",
        "datasets": f"{library}/datasets",
    }
    assert sys.path[-1] == root, "where its packages are found"
    ask = sys.modules["libero.libero.envs.env_wrapper"].get_libero_path
    assert {name: ask(name) for name in told} == told, "it asks anew each time"
    assert not list(Path(root).glob("leaderless-libero-*")), "not even if the process is killed"
    assert "LIBERO_CONFIG_PATH" not in os.environ

    def missing(*args, **options):
        raise ImportError("libOSMesa is missing")

    monkeypatch.setattr(sys.modules["libero.libero.envs.env_wrapper"], "ControlEnv", missing)
    with pytest.raises(OSError, match=r"'lift_the_bowl' cannot be opened \(libOSMesa is missing\).*MUJOCO_GL=osmesa"):
        opened(root).reset([0], [{"task": 1}], [0])
