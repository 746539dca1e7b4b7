"""Several hosts on one machine: network namespaces on a switch, each with an interface of limited rate.

Needs Linux, root, and the commands `ip` and `tc`. The switch is in a separate namespace, so that the machine's
own network is not changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

INTERFACE = "eth0"
"""Name of the interface of every host."""
BURST_BYTES = 1 << 18
"""Bytes that an interface may send at once: more than the largest packet that the kernel hands over in one piece."""
QUEUE_MS = 50
"""Longest time that a packet waits for a limited interface; packets beyond that are dropped."""
KILL_TIMEOUT_S = 30.0
_NAME = re.compile(r"^hosts-(?P<pid>\d+)-\d+-\w+$")
_NUMBERS = count()


@dataclass(frozen=True)
class Traffic:
    """Bytes that have passed an interface since it was created, as the kernel counts them."""

    sent: int
    received: int


class Hosts:
    """Some hosts, which exist while the `with` block runs.

    Whatever ends the block, all processes of the hosts are killed and the network is removed. Whatever a killed owner
    has left behind is removed when the next hosts are created.
    """

    def __init__(self, num_hosts: int, mbit_per_s: float) -> None:
        """Describe the hosts; `with` makes them.

        Args:
            num_hosts: 1 to 100.
            mbit_per_s: Highest rate of each interface, in each direction.

        Raises:
            ValueError: There are too many hosts, or none, or no rate.
        """
        if not 1 <= num_hosts <= 100:
            raise ValueError(f"num_hosts={num_hosts}: must be from 1 to 100")
        if mbit_per_s <= 0:
            raise ValueError(f"mbit_per_s={mbit_per_s}: must be above 0")
        self.num_hosts = num_hosts
        self.mbit_per_s = mbit_per_s
        self._prefix = f"hosts-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = f"{self._prefix}-switch"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Create the network.

        Raises:
            RuntimeError: The machine does not let this process make namespaces.
        """
        _remove_left_behind()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, host: int) -> str:
        """The address of a host; addresses of higher hosts also sort later as texts."""
        return f"10.77.0.{101 + host}"

    def namespace(self, host: int) -> str:
        """The name of a host's namespace, as `ip netns exec` expects it."""
        return f"{self._prefix}-h{host}"

    def start(
        self, host: int, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host. It dies with the hosts.

        Args:
            host: Number of the host, from 0.
            command: Program and its arguments.
            log: File to which the output is appended.
            environment: Variables added to those of this process.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *command],
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the others
            )
        self._started.append(process)
        return process

    def run_ranks(self, script: str, options: Sequence[str], log: Path) -> None:
        """Run one rank of a script on each host, with its number in `--rank`, and wait until all have ended.

        Raises:
            RuntimeError: One of them has failed.
        """
        environment = {
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONPATH": f"{Path(__file__).parents[1] / 'src'}",
            "OMP_NUM_THREADS": "1",
        }
        started = [
            self.start(rank, [sys.executable, script, "--rank", str(rank), *options], log, environment)
            for rank in range(self.num_hosts)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise RuntimeError(log.read_text(encoding="utf-8"))

    def traffic(self) -> list[Traffic]:
        """Bytes that have passed the interface of each host, in the order of the hosts."""
        links = {link["ifname"]: link["stats64"] for link in json.loads(_ip("-n", self._switch, "-j", "-s", "link"))}
        ports = [links[f"port{host}"] for host in range(self.num_hosts)]
        return [Traffic(sent=port["rx"]["bytes"], received=port["tx"]["bytes"]) for port in ports]

    def limit(self, host: int, mbit_per_s: float) -> None:
        """Change what a host sends, and what it receives, at most."""
        for namespace, interface in ((self.namespace(host), INTERFACE), (self._switch, f"port{host}")):
            self._limit(namespace, interface, mbit_per_s, "change")

    def close(self) -> None:
        """Kill what runs on the hosts and remove the network. May be called again."""
        with _uninterrupted():
            for name in [*map(self.namespace, range(self.num_hosts)), self._switch]:
                _remove(name)
            for process in self._started:
                process.wait()
            self._started.clear()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            name, port = self.namespace(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            self._limit(name, INTERFACE, self.mbit_per_s, "add")
            self._limit(self._switch, port, self.mbit_per_s, "add")

    def _limit(self, namespace: str, interface: str, mbit_per_s: float, verb: Literal["add", "change"]) -> None:
        """Limit what an interface sends: that of the host, or the port that sends to the host."""
        limits = ["rate", f"{mbit_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
        _call("tc", "-n", namespace, "qdisc", verb, "dev", interface, "root", "tbf", *limits)


def obstacle() -> str:
    """The reason why hosts cannot be created here; empty if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"there is no command `{missing[0]}`"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1, 1000):
            return ""
    except RuntimeError as error:
        return f"no network namespace can be made here: {error}"


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    """The output of a command.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _remove_left_behind() -> None:
    """Remove the hosts of owners that were killed before they could do so."""
    for name in _namespaces():
        match = _NAME.match(name)
        if match and not psutil.pid_exists(int(match["pid"])):
            _remove(name)


def _remove(namespace: str) -> None:
    """Kill the processes of a namespace and delete it with its interfaces, if it exists."""
    if namespace not in _namespaces():
        return
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := _ip("netns", "pids", namespace).split():  # a process may have started another one in between
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {', '.join(pids)} of namespace {namespace} do not end; kill them by hand")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    _ip("netns", "delete", namespace)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the network is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
