"""Simulators as environments of bodies, as far as the suite for all environments does not try it."""

from __future__ import annotations

import gc
import importlib.util
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.config.packaged_files import how_to_install
from leaderless.embodied.simulators.babyai_levels import VIEW, BabyAI
from leaderless.embodied.simulators.gymnasium_envs import GymnasiumBody, Panda
from leaderless.embodied.simulators.libero_tasks import _Suite
from leaderless.embodied.simulators.metaworld_tasks import MT10, MetaWorld
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.embodied.simulators.registry import open_body
from leaderless.embodied.simulators.saved_states import is_plain, pack, unpack
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments import adapters


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; `make test-bodies` tries it")


def walk(environment, num_steps):
    for _ in range(num_steps):
        environment.step([0], environment.expert([0])[:, None])


def success_of_expert(environment, num, tasks=None):
    """Share of episodes in which the expert succeeds."""
    which = list(range(num))
    environment.reset(which, tasks or [{}] * num, which)
    done = np.zeros(num, np.bool_)
    while which:
        steps = environment.step(which, environment.expert(which)[:, None])
        done[which] = steps.success
        which = [one for one, is_over in zip(which, steps.terminated | steps.truncated, strict=True) if not is_over]
    return done.mean()


@needs("minigrid")
@pytest.mark.parametrize("level", ["GoToRedBallGrey", "PickupLoc", "UnlockPickup", "PutNextLocal"])
def test_tiles_give_the_pixels_of_minigrid(level):
    import gymnasium
    from minigrid.wrappers import RGBImgPartialObsWrapper

    ours = BabyAI(1, f"BabyAI-{level}-v0", max_steps=50)
    theirs = RGBImgPartialObsWrapper(gymnasium.make(f"BabyAI-{level}-v0", max_steps=50))
    for seed in range(3):
        seen, (wanted, _) = ours.reset([0], [{}], [seed]), theirs.reset(seed=seed)
        assert seen.instructions == (wanted["mission"],)
        for action in np.random.default_rng(seed).integers(6, size=49).tolist():
            assert (seen.images[VIEW][0] == wanted["image"]).all()
            assert seen.state[0].argmax() == wanted["direction"]
            steps = ours.step([0], np.array([[action]]))
            wanted, reward, *_ = theirs.step(action)
            seen = steps.observations
            assert steps.rewards[0, 0] == np.float32(reward)
            if steps.terminated[0]:
                break


@needs("minigrid")
def test_the_bot_of_babyai_succeeds_also_after_actions_of_others():
    environment = BabyAI(8, "BabyAI-PickupLoc-v0", max_steps=64)
    assert success_of_expert(environment, 8) == 1.0
    which = list(range(8))
    environment.reset(which, [{}] * 8, which)
    environment.expert(which)
    environment.step(which, np.random.default_rng(0).integers(3, size=(8, 6)))
    assert environment.expert(which).dtype == np.int64
    few = BabyAI(1, "BabyAI-PickupLoc-v0", num_actions=2)
    few.reset([0], [{}], [1])
    with pytest.raises(ValueError, match="set num_actions to"):
        walk(few, 30)


@needs("minigrid")
def test_symbols_are_one_hot():
    environment = BabyAI(1, tile_size=0)
    state = environment.reset([0], [{}], [0]).state[0]
    assert environment.spaces.images == {}
    assert state.shape == (4 + 49 * 20,)
    assert state.sum() == 1 + 49 * 3


def test_choices_are_one_hot_and_limits_truncate():
    environment = GymnasiumBody(1, "FrozenLake-v1", max_steps=3, instruction="cross the lake")
    assert environment.spaces.actions == Discrete(4)
    assert environment.spaces.state_size == 16
    seen = environment.reset([0], [{}], [0])
    assert seen.state[0].tolist() == [1.0] + [0.0] * 15
    assert seen.instructions == ("cross the lake",)
    steps = environment.step([0], np.zeros((1, 5), np.int64))  # to the left: nothing happens
    assert (steps.num_steps.tolist(), steps.truncated.tolist(), steps.terminated.tolist()) == ([3], [True], [False])


def test_success_is_what_the_environment_says_or_a_return():
    environment = GymnasiumBody(1, "CartPole-v1", success_return=5, ends_on_success=True)
    environment.reset([0], [{}], [0])
    steps = environment.step([0], np.array([[0, 1] * 5]))
    assert steps.num_steps[0] == 5
    assert steps.success[0]
    assert steps.terminated[0]


@needs("gymnasium_robotics")
def test_fetch_says_when_the_goal_is_reached():
    environment = GymnasiumBody(1, "gymnasium_robotics:FetchReach-v4", ends_on_success=True)
    assert environment.spaces.actions == Continuous((-1.0,) * 4, (1.0,) * 4)
    state = environment.reset([0], [{}], [1]).state[0]
    for _ in range(50):  # the parts are achieved goal, desired goal, observation
        way = np.clip((state[3:6] - state[:3]) * 10, -1, 1)
        steps = environment.step([0], np.array([[[*way, 0.0]]], np.float32))
        state = steps.observations.state[0]
        if steps.terminated[0]:
            break
    assert steps.success[0]
    assert steps.infos[0]["is_success"] == 1.0


@needs("metaworld")
def test_the_policies_of_metaworld_solve_the_tasks_that_rows_name():
    environment = MetaWorld(len(MT10), max_steps=300)
    rows = [{"task": name} for name in MT10]
    seen = environment.reset(list(range(len(MT10))), rows, [3] * len(MT10))
    assert seen.instructions == tuple(name.replace("-", " ") for name in MT10)
    assert success_of_expert(environment, len(MT10), rows) >= 0.9
    with pytest.raises(ValueError, match="fly"):
        environment.reset([0], [{"task": "fly"}], [0])


@needs("panda_gym")
def test_a_panda_has_its_goal_in_the_state():
    environment = Panda(1)
    assert environment.spaces.state_size == 6 + 3 + 3
    environment.close()


class Point(Single):
    """A point on a line that remembers what it was told."""

    def __init__(self):
        self.spaces, self.told = Spaces({}, 1, Continuous((-1.0, -2.0), (1.0, 0.5)), 9), []

    def reset(self, task, seed):  # noqa: ARG002
        return SingleObservation({}, np.zeros(1, np.float32))

    def step(self, action):
        self.told.append(action.tolist())
        action[:] = 7  # some simulators write into what they are given
        return StepOutcome(SingleObservation({}, np.zeros(1, np.float32)), 0.0, False, False, False)

    def close(self):
        pass


def test_actions_are_cut_to_their_limits_and_kept_as_they_were_given():
    environment = Singles(2, Point)
    environment.reset([0, 1], [{}, {}], [0, 0])
    actions = np.array([[[3, 3], [-0.25, -3]], [[0, 0], [9, -9]]])
    wanted = [[[1, 0.5], [-0.25, -2]], [[0, 0], [1, -2]]]
    environment.step([1, 0], actions)
    assert [one.told for one in environment._singles] == wanted[::-1]
    assert actions.tolist() == [[[3, 3], [-0.25, -3]], [[0, 0], [9, -9]]], "as the policy decided"
    again = Singles(1, Point)
    for state, told in zip(environment.save([1, 0]), wanted, strict=True):
        again.restore([0], [state])
        assert again._singles[0].told[-2:] == told


def refusal(type_, **options):
    with pytest.raises(RecipeError) as caught:
        open_body(BodyConfig(type=type_, options=options, max_steps=1000), 1)
    return str(caught.value)


def test_what_cannot_be_made_is_refused_with_its_remedy(monkeypatch):
    assert "max_steps" in refusal("gymnasium", id="FrozenLake-v1", max_steps=0)
    assert "gymnasium_robotics:FetchReach-v4" in refusal("gymnasium", id="Missing-v0")
    unmade = refusal("gymnasium", id="tests.unit.embodied.odd:Unmade-v0")
    assert "'Unmade-v0' fails in a check of its own (AssertionError)" in unmade
    assert f"installs versions that fit: {how_to_install('mujoco')}" in unmade
    assert "RescaleAction" in refusal("gymnasium", id="tests.unit.embodied.odd:Odd-v0")
    assert "does not take them" in refusal("babyai", tiles=3)
    assert "must be one of sparse, dense" in refusal("maniskill", reward="shaped")
    assert "max_steps=0: must be at least 1" in refusal("maniskill", max_steps=0)
    for module, name, extra in [
        ("minigrid", "babyai", "babyai"),
        ("mani_skill", "maniskill", "maniskill"),
        ("metaworld", "metaworld", "metaworld"),
        ("panda_gym", "panda", "panda"),
        ("gym_pusht", "pusht", "pusht"),
    ]:
        for loaded in [one for one in sys.modules if one.split(".")[0] == module]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, module, None)
        assert f"pip install --editable '.[{extra}]'" in refusal(name)
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    assert ".[fetch]" in refusal("gymnasium", id="gymnasium_robotics:FetchReach-v4")


@needs("mujoco")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gymnasium's viewer fails to go
def test_missing_graphics_are_named_with_their_remedy(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    assert "MUJOCO_GL=osmesa" in refusal("gymnasium", id="HalfCheetah-v5", image_size=16)
    gc.collect()


def test_a_missing_library_of_opengl_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    said = [refusal("gymnasium", id=f"tests.unit.embodied.{place}:Drawing-v0") for place in ("drawing", "odd")]
    monkeypatch.setattr(adapters, "import_module", lambda _: importlib.import_module("tests.unit.embodied.drawing"))
    for text in [*said, refusal("metaworld")]:
        assert "OpenGL cannot be loaded with MUJOCO_GL=osmesa ('NoneType' object has no attribute 'glGetError')" in text
        assert "apt-get install libosmesa6" in text
        assert "where no images are drawn, unset MUJOCO_GL" in text
    with pytest.raises(OSError, match="apt-get install libosmesa6"):
        _Suite(tmp_path, "libero_spatial", ["lift"]).open("lift", 0)


def test_other_errors_of_packages_stay_as_they_are():
    with pytest.raises(AttributeError, match="glGetError"), adapters.graphics():
        None.glGetError  # noqa: B018


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | arrays(st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]), array_shapes(min_dims=0)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner) | st.lists(inner).map(tuple),
    max_leaves=10,
)


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(PLAIN)
def test_what_is_packed_is_unpacked_bit_for_bit(value):
    assert same(value, unpack(pack(value)))


def test_objects_are_not_packed():
    assert not is_plain({"a": [object()]})
    with pytest.raises(TypeError, match="cannot be packed"):
        pack({"a": {1, 2}})
