"""Ranks, Ray and a controller on several hosts, controlled and observed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.hosts import INTERFACE, Hosts
from benchmarks.transitions.case import Case, Order, Way
from benchmarks.transitions.channel import Switchboard
from benchmarks.transitions.contents import Contents
from benchmarks.transitions.transition import Transition
from benchmarks.transitions.watch import Observation, Observations

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
TRANSITION_TIMEOUT_S = 300.0
RANKS_PORT = 29500
RAY_PORT = 6379
OBJECT_STORE_BYTES = 3 << 30


class Session:
    """All processes of one number of hosts, which exist while the `with` block runs."""

    def __init__(self, num_hosts: int, mbit_per_s: float, ways: Collection[Way], logs: Path) -> None:
        """Describe the session.

        Args:
            num_hosts: Number of hosts, even.
            mbit_per_s: Bandwidth of each interface, in either direction.
            ways: Data paths that will be measured.
            logs: Folder for the output of the processes.
        """
        self._hosts = Hosts(num_hosts, mbit_per_s)
        self._ways = ways
        self._logs = logs
        self._stack = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Names of sockets must be short, so this is not in the folder of logs.
            self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._logs.mkdir(parents=True, exist_ok=True)
            self._board = stack.enter_context(Switchboard(self._folder / "socket"))
            stack.enter_context(self._hosts)
            if {*self._ways} - {"ray"}:
                self._start_ranks()
                self._wait()
            if "ray" in self._ways:
                self._start_ray()
                self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def socket(self) -> Path:
        """The socket to which the processes connect; it is part of their command lines."""
        return self._board.path

    def measure(self, way: Way, case: Case, repeat: int) -> Transition:
        """Run one transition on the hosts.

        Args:
            way: Data path.
            case: Rows and layouts.
            repeat: Number of the repeat, for the record.

        Raises:
            RuntimeError: A process failed, or rows were lost or changed.
        """
        channels = [c for name, c in sorted(self._board.channels.items()) if (name == "controller") == (way == "ray")]
        order = Order(way=way, case=case).model_dump_json()
        before = self._hosts.traffic()
        try:
            for channel in channels:
                channel.send(order)
            seen = [one for channel in channels for one in Observations.model_validate_json(channel.receive()).root]
        except (EOFError, OSError) as error:  # closed, late, or gone
            self._check()
            raise RuntimeError(f"{way} with {case}: {error}; see {self._logs}") from error
        after = self._hosts.traffic()
        _check_rows(way, case, seen)
        traffic = [(new.sent - old.sent, new.received - old.received) for new, old in zip(after, before, strict=True)]
        costs = [one.got.cost for one in seen if one.host in case.action.target_layout and one.got.rows]
        return Transition(
            way=way,
            case=case,
            repeat=repeat,
            seconds=round(max(one.ended for one in seen) - min(one.started for one in seen), 4),
            sent=tuple(sent for sent, _ in traffic),
            received=tuple(received for _, received in traffic),
            busiest_bytes=max(map(sum, traffic)),
            peak_bytes=max(one.peak_bytes for one in seen),
            balance=round(max(costs) * case.action.target_layout.dp / sum(costs), 4),
            shares=tuple(f"{one.got.fingerprint:016x}" for one in seen if one.got.rows),
            busy_cores=seen[0].busy_cores,
        )

    def _wait(self) -> None:
        """Wait until all started processes have connected."""
        self._board.wait_for({*self._processes}, self._check, START_TIMEOUT_S, TRANSITION_TIMEOUT_S)

    def _start_ranks(self) -> None:
        """Start one torchrun on each host, which meet at the first."""
        first = self._hosts.address(0)
        for host in range(self._hosts.num_hosts):
            torchrun = [
                *("-m", "torch.distributed.run", "--nnodes", str(self._hosts.num_hosts), "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{RANKS_PORT}", "--rdzv-id", "transitions"),
                *("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", self._hosts.address(host)),
            ]
            rank = ["-m", "benchmarks.transitions.rank", "--host", str(host), "--socket", str(self._board.path)]
            self._start(f"rank {host}", host, [*torchrun, *rank])

    def _start_ray(self) -> None:
        """Make every host a node of Ray, and start the controller on the first."""
        address = f"{self._hosts.address(0)}:{RAY_PORT}"
        for host in range(self._hosts.num_hosts):  # one by one: Ray gives a node 30 s to start
            name = f"ray {host}"
            if self._start_node(host, address).wait(timeout=START_TIMEOUT_S):
                raise RuntimeError(f"{name} did not start:\n{self._tail(name)}")
        controller = ["-m", "benchmarks.transitions.controller", "--hosts", str(self._hosts.num_hosts)]
        self._start("controller", 0, [*controller, "--address", address, "--socket", str(self._board.path)])

    def _start_node(self, host: int, address: str) -> subprocess.Popen[bytes]:
        where = [f"--address={address}"]
        if host == 0:
            where = ["--head", f"--port={RAY_PORT}", f"--temp-dir={self._folder}/ray", "--include-dashboard=false"]
        node = [f"--node-ip-address={self._hosts.address(host)}", f'--resources={{"host{host}": 1}}', "--num-cpus=1"]
        limits = [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        command = ["-m", "ray.scripts.scripts", "start", *where, *node, *limits]
        return self._hosts.start(host, [sys.executable, *command], self._log(f"ray {host}"), self._environment())

    def _start(self, name: str, host: int, arguments: list[str]) -> None:
        command = [sys.executable, *arguments]
        self._processes[name] = self._hosts.start(host, command, self._log(name), self._environment())

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "RAY_AUTH_MODE": "disabled",  # nothing else reaches these hosts
            "RAY_memory_monitor_refresh_ms": "0",  # the machine's memory is not that of one host
        }

    def _log(self, name: str) -> Path:
        return self._logs / f"{self._hosts.num_hosts}-hosts-{name.replace(' ', '-')}.log"

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-20:])

    def _check(self) -> None:
        """Raise if a process has ended."""
        time.sleep(0.1)
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with code {process.returncode}:\n{self._tail(name)}")


def _check_rows(way: Way, case: Case, seen: list[Observation]) -> None:
    """Check that the rows after the transition are those before it."""
    held, got = (sum((getattr(one, side) for one in seen), Contents()) for side in ("held", "got"))
    if held != got:
        raise RuntimeError(f"{way} with {case}: {held} went in, {got} came out")
