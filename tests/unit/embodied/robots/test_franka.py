"""The driver of Franka's arms: with a stand-in for franky, and in a simulator where that is installed."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.embodied.robots.serving import serving, wait_until

from leaderless.config import RecipeError
from leaderless.embodied.robots.arm import make_station
from leaderless.embodied.robots.franka import _turned, _yaw

OPTIONS = {
    "host": "arm.example",
    "reference": [0.5, 0.0, 0.3],
    "goal": [0.5, 0.0, 0.3, 0.0],
    "tolerance": [0.5] * 4,
    "period_s": 0.02,
}


class Robot:
    """Follows each reference at once."""

    def __init__(self, host: str, realtime_config: str) -> None:
        self.host, self.realtime, self.calls, self.error = host, realtime_config, [], None
        pose = SimpleNamespace(translation=np.array([0.51, 0.01, 0.31]), quaternion=np.array([1.0, 0.0, 0.0, 0.0]))
        self.current_pose = SimpleNamespace(end_effector_pose=pose)
        self.state = SimpleNamespace(O_F_ext_hat_K=[0.0] * 5 + [2.5])

    def poll_motion(self):
        if self.calls[-1:] == ["stop"]:
            self.calls.append("poll")
            raise ArithmeticError("preempted")
        if self.error:
            raise RuntimeError(self.error)

    def stop(self):
        self.calls.append("stop")

    def recover_from_errors(self):
        self.calls.append("recover")

    def move(self, motion, asynchronous):
        assert asynchronous
        self.calls.append("move")
        motion.robot = self


class Motion:
    robot = None

    def set_reference(self, reference):
        if self.robot is not None:
            self.robot.current_pose.end_effector_pose = reference


@pytest.fixture
def made(monkeypatch):
    """What the driver makes of a stand-in for franky."""
    made = []

    def make(kind):
        return lambda *arguments, **options: made.append(kind(*arguments, **options)) or made[-1]

    stand_in = SimpleNamespace(
        Robot=make(Robot),
        RealtimeConfig=SimpleNamespace(Enforce="enforce", Ignore="ignore"),
        CartesianImpedanceTrackingMotion=Motion,
        CartesianReference=lambda target: target,
        ControlException=ArithmeticError,
        Affine=lambda translation, quaternion: SimpleNamespace(translation=translation, quaternion=quaternion),
    )
    monkeypatch.setitem(sys.modules, "franky", stand_in)
    return made


def test_an_arm_is_held_and_moved_only_after_its_release(made):
    with serving(make_station("franka", OPTIONS)) as served:
        client, robot = served.client(), made[0]
        assert (robot.host, robot.realtime) == ("arm.example", "enforce")
        assert client.stopped == "it has just been started"
        assert "move" not in robot.calls
        served.release()
        assert robot.calls[-2:] == ["recover", "move"]
        begin = client.reset(0)
        assert begin.reading.state[-1] == 2.5
        found = client.step(np.array([[0.2, 0.0, 0.0, 0.5]] * 3, np.float32))
        assert found.reading.position[0] == pytest.approx(begin.reading.position[0] + 3 * 0.2 * 0.1 * 0.02)
        assert found.reading.position[3] > begin.reading.position[3]
        assert found.is_terminated
        robot.error = "motion aborted by reflex"
        wait_until(lambda: served.server.controller.stopped_because)
        assert "motion aborted by reflex" in served.server.controller.stopped_because
        assert "stop" in robot.calls[-2:]
        robot.error = None
        served.release()
        assert client.reset(1).num_steps == 0


def test_a_turned_orientation_has_that_yaw():
    for orientation in ([1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]):
        for yaw in (-0.5, 0.0, 0.3):
            assert _yaw(np.array(orientation), _turned(np.array(orientation), yaw)) == pytest.approx(yaw)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "franky", None)
    with pytest.raises(RecipeError, match=r"needs the package franky .*pip install franky-control"):
        make_station("franka", OPTIONS)
    with pytest.raises(RecipeError, match=r"unknown robot 'frank'.*franka"):
        make_station("frank", {})
    with pytest.raises(RecipeError, match="unexpected keyword argument 'colour'"):
        make_station("dummy", {"colour": "red"})


@pytest.mark.skipif(
    find_spec("franky") is None or find_spec("franky_sim") is None,
    reason="needs franky-control and franky-sim, best in an environment of their own",
)
def test_an_arm_in_the_simulator_goes_where_it_is_sent_and_stops():
    command = [sys.executable, "-m", "franky_sim.run_server", "-s", "mujoco"]
    simulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        host = next(line.split("'")[1] for line in simulator.stdout if "robot IP" in line)
        options = {
            **OPTIONS,
            "host": host,
            "reference": [0.554, 0.0, 0.521],
            "goal": [0.0] * 4,
            "tolerance": [0.001] * 4,
            "period_s": 0.1,
            "is_realtime": False,
        }
        with serving(make_station("franka", options)) as served:
            served.release()
            client = served.client()
            begin = client.reset(0).reading.position
            actions = np.array([[0.0, 0.5, 0.0, 0.2]] * 8, np.float32)
            assert client.step(actions).reading.position[1] > begin[1]
            time.sleep(3.0)
            errors = served.server.controller._reading.position - served.server.controller._limiter.target
            assert np.abs(errors[:3]).max() < 0.02
            assert abs(errors[3]) < 0.1
            client.stop("seen enough")
            time.sleep(0.5)
            rest = served.server.controller._reading.position
            time.sleep(0.5)
            assert served.server.controller._reading.position == pytest.approx(rest, abs=0.002)
            served.release()
            assert client.reset(1).num_steps == 0
    finally:
        simulator.kill()
        simulator.wait()
