"""Arms behind servers as an environment of episodes, and what is recorded of them."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
from examples.robots.help import play
from tests.unit.embodied.robots.serving import SpyArm, serving, station_of

from leaderless.embodied.data.replay_buffer import TransitionRecorder, Transitions, transitions_of
from leaderless.embodied.robots.arm import Refused
from leaderless.embodied.robots.client import Address, RobotClient
from leaderless.embodied.robots.environment import HELPED, RobotEnvironment
from leaderless.embodied.robots.simulated_arm import DummyArm, ScriptedHuman, dummy, expert_actions
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.simulators.conformance import CANNOT_SAVE, report
from leaderless.embodied.simulators.protocol import Continuous


@contextmanager
def arms(*stations, **options):
    """An environment of arms, with their servers."""
    with ExitStack() as stack:
        served = [stack.enter_context(serving(station)) for station in stations]
        environment = RobotEnvironment(len(stations), [str(one.address) for one in served], **options)
        stack.callback(environment.close)
        yield environment, served


def test_arms_act_at_the_same_time_each_in_its_own_episode():
    with arms(dummy(camera_size=8), dummy(camera_size=8)) as (environment, _):
        assert environment.spaces.actions == Continuous((-1.0, -1.0), (1.0, 1.0))
        assert environment.spaces.images == {"front": (8, 8)}
        seen = environment.reset([1, 0], [{}, {}], [5, 6])
        assert seen.instructions == ("reach the red goal",) * 2
        first = environment.step([1, 0], np.full((2, 3, 2), 0.1, np.float32))
        assert first.num_steps.tolist() == [3, 3]
        assert first.rewards.shape == (2, 3)
        again = environment.reset([0], [{}], [5])  # the other arm goes on
        assert (again.state[0] == seen.state[0]).all()
        assert (again.images["front"][0] == seen.images["front"][0]).all()
        assert (again.state[0] != seen.state[1]).any()
        after = environment.step([1], np.zeros((1, 1, 2), np.float32))
        assert np.abs(after.observations.state[0, :2] - first.observations.state[0, :2]).max() < 0.05
        environment.close()
        environment.close()


def test_an_expert_reaches_the_goal_and_a_chunk_ends_there():
    with arms(dummy(), dummy()) as (environment, _):
        for seed in range(5):
            state = environment.reset([0, 1], [{}, {}], [seed, seed]).state
            going = [0, 1]
            while going:
                actions = np.repeat(expert_actions(state, environment.description.arm)[:, None], 20, axis=1)
                steps = environment.step(going, actions)
                ends = steps.terminated | steps.truncated
                assert (steps.rewards.sum(axis=1) == steps.success).all()
                assert (steps.terminated == steps.success).all()
                for row, num in enumerate(steps.num_steps):
                    assert ends[row] or num == 20  # more than max_chunk: sent as two commands
                    assert not steps.success[row] or steps.rewards[row, num - 1] == 1.0
                state, going = (
                    steps.observations.state[~ends],
                    [one for one, end in zip(going, ends, strict=True) if not end],
                )
            assert steps.success.all()


def test_an_episode_is_truncated_apart_from_success():
    with arms(dummy(max_steps=5)) as (environment, _):
        environment.reset([0], [{}], [1])
        steps = environment.step([0], np.zeros((1, 8, 2), np.float32))
        assert (steps.num_steps[0], steps.truncated[0], steps.terminated[0]) == (5, True, False)
        with pytest.raises(Refused, match="reset first"):
            environment.step([0], np.zeros((1, 1, 2), np.float32))


def test_arms_that_differ_or_are_too_few_are_refused():
    with pytest.raises(ValueError, match="2 episodes at a time need as many arms, not 1: give `addresses`"):
        RobotEnvironment(2, ["127.0.0.1:1"])
    with pytest.raises(ValueError, match="differs from that at"), arms(dummy(), dummy(max_steps=9)):
        pass
    with arms(dummy(), dummy(radius=0.1)) as (one, served):
        addresses = [str(one.address) for one in served]
        one._clients.pop().close()
        with closing(RobotEnvironment(1, addresses)) as other:  # the first arm is taken
            assert str(other._clients[0].address) == addresses[1]
            with pytest.raises(Refused, match="another client has the arm"):
                RobotEnvironment(1, addresses)
    with pytest.raises(ValueError, match="must be host:port"):
        RobotEnvironment(1, ["127.0.0.1"])
    with pytest.raises(ConnectionError, match=r"no arm answers at 127\.0\.0\.1:1 .*start its server"):
        RobotEnvironment(1, ["127.0.0.1:1"])


@pytest.mark.parametrize(
    "options", [{}, {"camera_size": 12, "dropped": 0.3, "latency_steps": 2, "has_human": True, "max_steps": 30}]
)
def test_arms_do_what_environments_must_except_that_they_cannot_be_saved(options):
    with ExitStack() as stack:
        addresses = [str(stack.enter_context(serving(dummy(**options))).address) for _ in range(3)]
        said = report(lambda num: RobotEnvironment(num, addresses, allows_help=True))
    assert said.pop("saved_states_continue") == CANNOT_SAVE
    assert set(said.values()) == {"held"}


class Memory:
    def __init__(self) -> None:
        self.kept: list[Transitions] = []

    def append(self, transitions: Transitions) -> None:
        self.kept.append(transitions)

    def all(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in self.kept])


def lose_each_first_answer(client: RobotClient) -> None:
    """The answer to each command is lost on its way, and found when the command is sent again."""
    receive, lost = client._receive, set()

    def receive_or_lose(tag, timeout_s):
        frame = receive(tag, timeout_s)
        if "rewards" in frame.arrays and tag not in lost:
            lost.add(tag)
            raise ConnectionError("lost by the test")
        return frame

    client._receive = receive_or_lose


def test_what_a_person_did_is_recorded_once_in_both_memories():
    online, demonstrations = Memory(), Memory()
    recorder = TransitionRecorder(online, demonstrations)
    num_steps = num_intervened = 0
    station = dummy(has_human=True, patience_steps=3, help_steps=4, far=0.2)
    with arms(station, allows_help=True) as (environment, _):
        lose_each_first_answer(environment._clients[0])
        for seed in range(4):
            seen = environment.reset([0], [{}], [seed])
            for _ in range(12):
                policy = np.full((1, 2, 2), 0.25, np.float32)
                steps = environment.step([0], policy)
                recorder.record(seen, policy, steps)
                num_steps += steps.num_steps[0]
                num_intervened += sum(steps.infos[0]["intervened"])
                seen = steps.observations
                if steps.terminated[0] or steps.truncated[0]:
                    break
    assert num_intervened > 10
    assert online.all("num_steps").sum() == num_steps
    assert online.all("intervened").sum() == demonstrations.all("intervened").sum() == num_intervened
    assert (demonstrations.all("intervened").any(axis=1)).all()
    marked = online.all("intervened").any(axis=1)
    assert 0 < marked.sum() < len(marked)
    assert (online.all("actions")[marked] == demonstrations.all("actions")).all()
    # The action is the person's where a person acted, else the policy's.
    intervened, actions = online.all("intervened"), online.all("actions")
    ran = np.arange(2) < online.all("num_steps")[:, None]
    assert (actions[~intervened & ran] == 0.25).all()
    assert (actions[intervened] != 0.25).all()
    assert (actions[~ran] == 0.0).all()


def test_the_example_records_what_a_person_did():
    with serving(dummy(has_human=True)) as served:
        online, demonstrations = play(str(served.address), 3)
    num, num_helped = sum(map(len, online)), sum(map(len, demonstrations))
    assert 3 < num_helped < num


def test_an_episode_in_which_a_person_acted_is_failed_unless_that_is_allowed():
    with arms(dummy(has_human=True, patience_steps=3, far=0.05)) as (environment, _):
        worlds = LocalVectorEnvs(environment, 1)
        worlds.reset([0], [{}], [1])
        for expected in ({}, {0: HELPED}):
            worlds.begin_step([0], np.zeros((1, 3, 2), np.float32))
            failures, steps = worlds.finish_step([0])
            assert failures == expected
        assert steps.truncated[0]
        assert not steps.terminated[0]


def test_a_lost_connection_amid_a_chunk_costs_no_step():
    arm = SpyArm(is_simulated=False, period_s=0.02, max_speed=2.0, max_acceleration=20.0)
    with arms(station_of(arm, radius=0.001, max_chunk=64)) as (environment, served):
        served[0].release()
        environment.reset([0], [{}], [0])
        client = environment._clients[0]
        threading.Timer(0.2, lambda: client._socket.shutdown(socket.SHUT_RDWR)).start()
        steps = environment.step([0], np.full((1, 60, 2), 0.005, np.float32))
        assert steps.num_steps[0] == 60
        assert len(steps.infos[0]["actions"]) == 60
        assert steps.infos[0]["cuts"] == ["its client has disconnected"]


def test_a_late_command_is_sent_again():
    with arms(dummy(), begin_within_s=-1.0) as (environment, _):
        environment.reset([0], [{}], [0])
        with pytest.raises(Refused, match="too late"):
            environment.step([0], np.zeros((1, 1, 2), np.float32))
        assert environment._clients[0]._id == 4  # a reset and three attempts


def test_a_stopped_arm_fails_its_episode_and_waits_for_a_person(capsys):
    with arms(dummy(), dummy(), release_within_s=5.0) as (environment, served):
        before = environment.reset([0, 1], [{}, {}], [0, 1])
        served[1].server.controller.stop("someone is near")
        actions = np.zeros((2, 2, 2), np.float32)
        steps = environment.step([0, 1], actions)
        assert steps.truncated.tolist() == [False, True]
        assert "someone is near" in steps.infos[1]["failed"]
        assert steps.num_steps.tolist() == [2, 1]
        assert (steps.observations.state[1] == before.state[1]).all()
        assert len(transitions_of(before, actions, steps)) == 1
        threading.Timer(0.3, served[1].release).start()
        environment.reset([1], [{}], [2])
        assert "a person at its server has to release it; waiting for up to 5 s" in " ".join(
            capsys.readouterr().out.split()
        )
        served[1].server.controller.stop("again")
        environment._release_within_s = 0.0
        with pytest.raises(Refused, match="stopped: again"):
            environment.reset([1], [{}], [2])


def test_a_server_that_is_gone_is_named_in_time():
    with arms(dummy(), reconnect_s=0.3) as (environment, _):
        environment.reset([0], [{}], [0])
        environment._clients[0].close()
        environment._clients[0].address = Address("127.0.0.1", 1)
        begin_s = time.monotonic()
        with pytest.raises(ConnectionError, match=r"the arm at 127\.0\.0\.1:1 is lost"):
            environment.step([0], np.zeros((1, 1, 2), np.float32))
        assert time.monotonic() - begin_s < 3.0


def test_the_faults_of_the_dummy_are_there():
    late = DummyArm(noise=0.0, lag_s=0.0, latency_steps=2)
    late.prepare(0)
    late.begin()
    start = late.read().position
    for _ in range(3):
        late.move(start + 0.1)
    assert (late.read().position == start + 0.1).all()
    late.move(start)
    assert (late.read().position == start + 0.1).all()
    lossy = DummyArm(dropped=0.5, camera_size=8)
    fresh = []
    for _ in range(200):
        lossy.move(lossy.position)
        fresh.append(lossy.read().is_fresh)
    assert 60 < sum(fresh) < 140
    with arms(dummy(false_positives=0.2)) as (environment, _):
        distances = []
        for seed in range(20):
            environment.reset([0], [{}], [seed])
            steps = environment.step([0], np.zeros((1, 16, 2), np.float32))
            distances += [steps.infos[0]["distance"]] * bool(steps.success[0])
    assert max(distances) > 0.2  # success was seen far from the goal


def test_a_person_helps_only_when_the_arm_is_far_for_long():
    arm = DummyArm(noise=0.0)
    human = ScriptedHuman(arm, far=0.25, patience_steps=3, help_steps=2)
    arm.prepare(0)
    arm.begin()
    human.begin()
    arm.goal = arm.position + 0.4
    acted = [human.intervene(arm.read(), np.zeros(2)) is not None for _ in range(10)]
    assert acted == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2 + [False]
    arm.goal = arm.position + 0.1
    assert [human.intervene(arm.read(), np.zeros(2)) for _ in range(10)] == [None] * 10
