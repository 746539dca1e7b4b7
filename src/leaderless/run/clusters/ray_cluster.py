"""Starts `leaderless train` on several machines of a Ray cluster, as `srun` does with Slurm.

An actor on each machine runs the launcher, which starts the workers there. Ray only places the actors: no row and no
weight passes through it, and the run's decisions stay with its workers.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

POLL_S = 1.0
LOST = -1
"""In place of an exit code, for a machine that is gone."""
WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Code that asks the kernel for SIGTERM when the parent ends (PR_SET_PDEATHSIG), then becomes another program."""


@dataclass(frozen=True)
class MachineRequest:
    """Machines that are wanted, and what they are for."""

    recipe: Sequence[str]  # recipe, and settings as `section.key=value`
    smallest: int  # number of machines that the run needs
    largest: int  # number of machines that it can use
    workers: int  # workers on each machine
    gpus_per_worker: float = 0.0  # GPUs of each worker
    cpus_per_worker: float = 1.0  # cores of each worker
    strategy: str = "STRICT_SPREAD"
    port: int = 29500  # port at which the machines meet
    setup: Sequence[str] = ()  # shell commands before the training
    max_restarts: int = 20  # number of times that everything is started again
    placement_timeout_s: float = 600.0  # seconds to wait for all machines
    grace_s: float = 120.0  # seconds for a step to be finished when the job is stopped

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one machine."""
        gpus = self.gpus_per_worker * self.workers
        return {"CPU": self.cpus_per_worker * self.workers} | ({"GPU": gpus} if gpus else {})

    def command(self, num_machines: int, rendezvous: str) -> list[str]:
        """Command of each of some machines, which meet at the address of the first, `HOST:PORT`."""
        train = [sys.executable, "-m", "leaderless", "train", *self.recipe, "--workers", str(self.workers)]
        if self.largest > 1:
            train += ["--nodes", f"{self.smallest}:{num_machines}", "--rendezvous", rendezvous]
        if self.setup:
            train = ["/bin/bash", "-c", "\n".join([*self.setup, 'exec "$@"']), "bash", *train]
        return [sys.executable, "-c", WITH_PARENT, *train]


class Machine:
    """Runs a command on one machine. It is an actor of Ray with two threads."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def address(self) -> str:
        """IP address under which the others reach this machine."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, command: list[str]) -> int:
        """Run a command to its end; its exit code, or 128 + n where signal n ended it."""
        process = subprocess.Popen(command)  # noqa: S603 - the launcher of this package
        has_asked = False
        while process.poll() is None:
            if self._stopped.wait(POLL_S / 4) and not has_asked:
                has_asked = True
                process.send_signal(signal.SIGTERM)
            time.sleep(POLL_S / 4)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def stop(self) -> None:
        """Let the command finish its step."""
        self._stopped.set()


@dataclass
class Machines:
    """The machines of one start, each with the promise of its exit code while it is running."""

    wish: MachineRequest
    group: PlacementGroup
    actors: list[ActorHandle] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    running: dict[ObjectRef, int] = field(default_factory=dict)

    def start(self) -> None:
        """Run the command on all machines."""
        import ray

        count = self.group.bundle_count
        self.actors = [self._actor(number) for number in range(count)]
        address = ray.get(self.actors[0].address.remote())
        self.command = self.wish.command(count, f"{address}:{self.wish.port}")
        self.running = {actor.run.remote(self.command): number for number, actor in enumerate(self.actors)}

    def replace(self, number: int) -> None:
        """Run the command on another machine, as soon as there is one, in place of one that is lost."""
        self.actors[number] = self._actor(number)
        self.running[self.actors[number].run.remote(self.command)] = number

    def stop(self) -> None:
        """Let all finish their step."""
        for actor in self.actors:
            actor.stop.remote()

    def ended(self) -> list[tuple[int, int]]:
        """Number and exit code of the machines that have ended since the last call."""
        import ray

        done, _ = ray.wait(list(self.running), num_returns=1, timeout=POLL_S)
        return [(self.running.pop(promise), _code(promise)) for promise in done]

    def _actor(self, number: int) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self.wish.bundle
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_concurrency": 2}
        return ray.remote(Machine).options(scheduling_strategy=place, **options).remote()


def run_machines(wish: MachineRequest, stopped: threading.Event) -> int:
    """Run the command on all machines until it is done, or somebody asks to stop; its exit code."""
    from ray.util import remove_placement_group

    for start in range(wish.max_restarts + 1):
        group = place(wish, stopped)
        if group is None:
            print("stopped before there was room for the machines", flush=True)  # noqa: T201
            return 1
        try:
            code = _run_once(Machines(wish, group), stopped)
        finally:
            remove_placement_group(group)
        if code in {0, 2} or stopped.is_set():  # done, or something that the user has to correct
            return code
        if start < wish.max_restarts:
            print(f"the machines have ended with exit code {code}: starting them again", flush=True)  # noqa: T201
    return code


def place(wish: MachineRequest, stopped: threading.Event) -> PlacementGroup | None:
    """The largest number of machines for which there is room, after waiting for all; None if asked to stop before.

    A RuntimeError says that there is no room for the smallest number.
    """
    from ray.util import placement_group, remove_placement_group

    for number in range(wish.largest, wish.smallest - 1, -1):
        group = placement_group([wish.bundle] * number, strategy=wish.strategy)
        end = time.monotonic() + (wish.placement_timeout_s if number == wish.largest else POLL_S)
        while not stopped.is_set() and time.monotonic() < end:
            if group.wait(POLL_S):
                return group
        remove_placement_group(group)
        if stopped.is_set():
            return None
    raise RuntimeError(
        f"the Ray cluster has no room for {wish.smallest} machines with {wish.bundle} each ({wish.strategy}) within "
        f"{wish.placement_timeout_s:g} s: `ray status` shows what it has; lower --nodes, workers, or what each may use"
    )


def _run_once(machines: Machines, stopped: threading.Event) -> int:
    """Run until all machines have ended, or the one at which the others meet is lost."""
    machines.start()
    stop_at: float | None = None
    codes: dict[int, int] = {}
    while machines.running:
        for number, code in machines.ended():
            if code == LOST and number > 0 and stop_at is None:
                print(f"machine {number} is lost: the others continue until there is another", flush=True)  # noqa: T201
                machines.replace(number)
            else:
                codes[number] = code
        # The machine at which the others meet has ended: those that wait for a place have nothing to join.
        if 0 in codes and machines.wish.largest > 1 and stop_at is None:
            stop_at = time.monotonic() + machines.wish.grace_s
        if stopped.is_set() and stop_at is None:
            machines.stop()
            stop_at = time.monotonic() + machines.wish.grace_s
        if stop_at is not None and time.monotonic() > stop_at:
            break
    code = codes.get(0, LOST)  # none where it did not end in time
    return 1 if code == LOST else code


def _code(promise: ObjectRef) -> int:
    import ray
    from ray.exceptions import RayActorError

    try:
        return int(ray.get(promise))
    except RayActorError:
        return LOST


def parse(arguments: Sequence[str]) -> MachineRequest:
    """Read the command line of a job."""
    parser = argparse.ArgumentParser(prog="python -m leaderless.run.clusters.ray_cluster")
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--setup", action="append", default=[])
    parser.add_argument("--strategy", default="STRICT_SPREAD")
    for name in ("workers", "port", "max-restarts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("gpus-per-worker", "cpus-per-worker", "placement-timeout-s", "grace-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("recipe", nargs="+")
    values = vars(parser.parse_args(arguments))
    smallest, _, largest = values.pop("nodes").partition(":")
    return MachineRequest(smallest=int(smallest), largest=int(largest or smallest), **values)


def main() -> None:
    """Do what the command line asks for, in a cluster that Ray knows from the environment."""
    import ray

    wish, stopped = parse(sys.argv[1:]), threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    ray.init(address="auto", log_to_driver=True)
    sys.exit(run_machines(wish, stopped))


if __name__ == "__main__":
    main()
