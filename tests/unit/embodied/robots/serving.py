"""Servers of arms in a thread of the test, and an arm that notes where it was sent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from leaderless.embodied.robots.arm import Station
from leaderless.embodied.robots.client import Address, RobotClient
from leaderless.embodied.robots.server import RobotServer
from leaderless.embodied.robots.simulated_arm import Classifier, DummyArm


class SpyArm(DummyArm):
    """A dummy that notes each target, with its time."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.targets: list[np.ndarray] = []
        self.times: list[float] = []
        self.num_stops = 0

    def move(self, target: np.ndarray) -> None:
        self.times.append(time.monotonic())
        self.targets.append(target.copy())
        super().move(target)

    def stop(self) -> None:
        self.num_stops += 1
        super().stop()


def station_of(arm: DummyArm, *, human=None, radius: float = 0.05, **options) -> Station:
    return Station(arm, Classifier(arm, radius, 0.0), human, **options)


@dataclass
class Served:
    """A server; clients are closed with it."""

    address: Address
    server: RobotServer
    token: str | None
    clients: list[RobotClient] = field(default_factory=list)

    def client(self, **options) -> RobotClient:
        self.clients.append(RobotClient(self.address, self.token, **options))
        return self.clients[-1]

    def release(self) -> None:
        self.server.controller.release().result(5)


@contextmanager
def serving(station: Station, token: str | None = None) -> Iterator[Served]:
    """Serve a station until the block ends."""
    loop, is_ready = asyncio.new_event_loop(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    server = RobotServer(station, token)
    task = loop.create_task(server.answer(listener, is_ready.set))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_ready.wait(10)
        served = Served(Address("127.0.0.1", listener.getsockname()[1]), server, token)
        yield served
        for client in served.clients:
            client.close()
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        loop.close()


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for what another thread or process does, on a machine that may be busy."""
    until_s = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def assert_limits_hold(arm: SpyArm) -> None:
    """Box, speed and acceleration, over all targets since the arm was made."""
    axes, period_s = arm.spec.axes, arm.spec.period_s
    low, high, speed, acceleration = (
        np.array([getattr(axis, name) for axis in axes]) for name in ("low", "high", "max_speed", "max_acceleration")
    )
    targets = np.array(arm.targets)
    assert len(targets) > 2
    assert (targets >= low).all()
    assert (targets <= high).all()
    velocities = np.diff(targets, axis=0) / period_s
    assert (np.abs(velocities) <= speed * (1 + 1e-6)).all()
    assert (np.abs(np.diff(velocities, axis=0)) <= acceleration * period_s * (1 + 1e-6)).all()
