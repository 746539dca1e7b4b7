"""The driver of Franka's arms, with a stand-in for panda-py: which calls it makes, not that an arm moves."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from tests.unit.robots.serving import serving

from leaderless.config import RecipeError
from leaderless.robots.franka import _turned, _yaw
from leaderless.robots.registry import make_station

OPTIONS = {
    "host": "arm.example",
    "reference": [0.5, 0.0, 0.3],
    "goal": [0.5, 0.0, 0.3, 0.0],
    "tolerance": [0.5] * 4,
    "period_s": 0.02,
}


class Panda:
    """Follows each target at once."""

    def __init__(self, host: str) -> None:
        self.host, self.calls, self.error = host, [], None
        self.position, self.orientation = np.array([0.51, 0.01, 0.31]), np.array([1.0, 0.0, 0.0, 0.0])

    def get_position(self):
        return self.position

    def get_orientation(self):
        return self.orientation

    def get_state(self):
        return SimpleNamespace(O_F_ext_hat_K=[0.0] * 5 + [2.5])

    def get_robot(self):
        return SimpleNamespace(stop=lambda: self.calls.append("stop"))

    def raise_error(self):
        if self.error:
            raise RuntimeError(self.error)

    def recover(self):
        self.calls.append("recover")

    def start_controller(self, controller):
        self.calls.append("start")
        controller.panda = self

    def stop_controller(self):
        self.calls.append("end")


class Impedance:
    def __init__(self, filter_coeff: float) -> None:  # noqa: ARG002
        self.panda = None

    def set_control(self, position, orientation):
        if self.panda is not None:
            self.panda.position, self.panda.orientation = position, orientation


class Gripper:
    widths: ClassVar[list[float]] = []

    def __init__(self, host: str) -> None:  # noqa: ARG002
        self.width = 0.0

    def read_once(self):
        return SimpleNamespace(width=self.width)

    def move(self, width, speed):  # noqa: ARG002
        self.widths.append(width)
        self.width = width
        return True


@pytest.fixture
def panda_py(monkeypatch):
    pandas = []

    def make(host):
        pandas.append(Panda(host))
        return pandas[-1]

    stand_in = SimpleNamespace(
        Panda=make,
        pandas=pandas,
        controllers=SimpleNamespace(CartesianImpedance=Impedance),
        libfranka=SimpleNamespace(Gripper=Gripper),
    )
    for name in ("panda_py", "panda_py.controllers", "panda_py.libfranka"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in


def test_an_arm_is_moved_by_an_impedance_controller_only_after_its_release(panda_py):
    with serving(make_station("franka", OPTIONS)) as served:
        client, panda = served.client(), panda_py.pandas[0]
        assert panda.host == "arm.example"
        assert client.stopped == "it has just been started"
        assert "start" not in panda.calls
        served.release()
        assert panda.calls[-2:] == ["recover", "start"]
        begin = client.reset(0)
        assert begin.reading.state[-1] == 2.5
        found = client.step(np.array([[0.2, 0.0, 0.0, 0.5]] * 3, np.float32))
        assert found.reading.position[0] == pytest.approx(begin.reading.position[0] + 3 * 0.2 * 0.1 * 0.02)
        assert found.reading.position[3] > begin.reading.position[3]
        assert found.is_terminated
        panda.error = "motion aborted by reflex"
        time.sleep(0.2)
        assert "motion aborted by reflex" in served.server.controller.stopped_because
        assert panda.calls[-1] == "stop"
    assert panda.calls[-1] == "end"


def test_fingers_are_an_axis_that_does_not_delay_the_arm(panda_py):
    options = {**OPTIONS, "has_gripper": True, "goal": [0.0] * 5, "tolerance": [0.1] * 5}
    with serving(make_station("franka", options)) as served:
        served.release()
        client = served.client()
        client.reset(0)
        found = client.step(np.array([[0.0, 0.0, 0.0, 0.0, -1.0]] * 16, np.float32))
        assert found.reading.position[4] < 0.08
    assert len(Gripper.widths) > 3


def test_a_turned_orientation_has_that_yaw():
    for orientation in ([1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]):
        for yaw in (-0.5, 0.0, 0.3):
            assert _yaw(np.array(orientation), _turned(np.array(orientation), yaw)) == pytest.approx(yaw)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "panda_py", None)
    with pytest.raises(RecipeError, match=r"needs the package panda_py .*pip install panda-python"):
        make_station("franka", OPTIONS)
    with pytest.raises(RecipeError, match=r"unknown robot 'frank'.*franka"):
        make_station("frank", {})
    with pytest.raises(RecipeError, match="unexpected keyword argument 'colour'"):
        make_station("dummy", {"colour": "red"})
