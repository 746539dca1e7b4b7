"""Several hosts on one machine: their interfaces are limited, nothing remains, and all ways move the same rows."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.hosts import BURST_BYTES, Hosts, obstacle
from benchmarks.transitions.case import KINDS, Case, Way
from benchmarks.transitions.session import Session

ROOT = Path(__file__).parents[2]
MBIT_PER_S = 80.0
NUM_BYTES = 3_000_000
LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
for _ in range({peers}):
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
"""
SEND = """
import socket, sys
with socket.create_connection(("{address}", 5000), timeout=10) as connection:
    connection.sendall(bytes({num_bytes}))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until the other side has read all
"""
OWNER = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.hosts import Hosts
from pathlib import Path
with Hosts(2, 100) as hosts:
    hosts.start(1, ["sleep", "1000"], Path({log!r}))
    print(hosts.namespace(0), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skips where no hosts can be created."""
    if reason := obstacle():
        pytest.skip(reason)


def namespaces_there() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def listen(hosts: Hosts, host: int, peers: int, log: Path) -> None:
    hosts.start(host, [sys.executable, "-c", LISTEN.format(peers=peers)], log)
    deadline = time.monotonic() + 20
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("routes", [((1, 0), (2, 0)), ((0, 1), (0, 2))], ids=["received", "sent"])
def test_an_interface_carries_its_rate_and_counts_its_bytes(
    routes: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """Two transfers share the interface of host 0, but not those of the others."""
    with Hosts(3, MBIT_PER_S) as hosts:
        for target in {target for _, target in routes}:
            listen(hosts, target, sum(other == target for _, other in routes), tmp_path / f"listen {target}")
        before = hosts.traffic()
        start = time.monotonic()
        sending = [
            hosts.start(
                source,
                [sys.executable, "-c", SEND.format(address=hosts.address(target), num_bytes=NUM_BYTES)],
                tmp_path / f"send {source} {target}",
            )
            for source, target in routes
        ]
        codes = [process.wait(timeout=120) for process in sending]
        seconds = time.monotonic() - start
        after = hosts.traffic()
    assert codes == [0, 0]
    assert seconds > (2 * NUM_BYTES - 2 * BURST_BYTES) * 8 / (MBIT_PER_S * 1e6)
    moved = [(new.sent - old.sent, new.received - old.received) for new, old in zip(after, before, strict=True)]
    for host, (sent, received) in enumerate(moved):
        payload_out = NUM_BYTES * sum(source == host for source, _ in routes)
        payload_in = NUM_BYTES * sum(target == host for _, target in routes)
        assert payload_out <= sent <= 1.1 * payload_out + 400_000
        assert payload_in <= received <= 1.1 * payload_in + 400_000


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_nothing_is_left_whatever_ends_the_hosts(error: type[BaseException], tmp_path: Path) -> None:
    hosts = Hosts(2, 100)
    started: list[subprocess.Popen[bytes]] = []

    def use() -> None:
        with hosts:
            started.append(hosts.start(1, ["sh", "-c", "sleep 1000 & echo both; sleep 1000"], tmp_path / "log"))
            assert hosts.namespace(1) in namespaces_there()
            end = time.monotonic() + 60
            while "both" not in (tmp_path / "log").read_text():
                assert time.monotonic() < end
                time.sleep(0.01)
            raise error

    with pytest.raises(error):
        use()
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    assert hosts.namespace(0).removesuffix("h0") not in namespaces_there()


def test_what_a_killed_owner_left_is_removed_by_the_next(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(root=str(ROOT), log=str(tmp_path / "log"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    owner.kill()
    owner.communicate()
    assert name in namespaces_there()
    with Hosts(1, 100):
        assert name.removesuffix("h0") not in namespaces_there()


def test_hosts_that_cannot_be_made_are_refused_and_leave_nothing() -> None:
    with pytest.raises(ValueError, match="num_hosts=0"):
        Hosts(0, 100)
    with pytest.raises(ValueError, match="mbit_per_s=0"):
        Hosts(1, 0)
    hosts = Hosts(1, 1e-9)  # below the minimum of `tc`
    with pytest.raises(RuntimeError, match="tc"), hosts:
        pass
    assert hosts.namespace(0) not in namespaces_there()


HAS_RAY = importlib.util.find_spec("ray") is not None


@contextmanager
def hosts_for(ways: tuple[Way, ...], logs: Path) -> Iterator[Session]:
    """Two hosts, of which nothing is left."""
    with Session(2, 500, ways, logs) as session:
        yield session
    assert not [name for name in namespaces_there().split() if name.startswith(f"hosts-{os.getpid()}-")]


@pytest.fixture(scope="module")
def session(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Hosts for several tests."""
    with hosts_for(("ours", "gloo", "packed"), tmp_path_factory.mktemp("hosts")) as session:
        yield session


def check_rows(session: Session, controllers: tuple[Way, ...]) -> None:
    for kind in KINDS:
        case = Case(kind=kind, hosts=2, prompts=12, max_tokens=64)
        like_theirs = session.measure("ours", case.model_copy(update={"same_shares": True}), 0)
        # Ours chooses its own shares by default; `measure` checks that no row is lost or changed.
        ours = session.measure("ours", case, 0)
        for controller in controllers:
            theirs = session.measure(controller, case, 0)
            assert theirs.shares == like_theirs.shares
            assert len(set(theirs.shares)) == case.action.target_layout.dp
            assert ours.busiest_bytes < theirs.busiest_bytes
            assert min(ours.seconds, theirs.seconds) > 0
            assert min(ours.peak_bytes, theirs.peak_bytes) > 0


def test_every_way_gives_each_host_the_same_rows(session: Session) -> None:
    check_rows(session, ("gloo", "packed"))


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
def test_ray_gives_each_host_the_same_rows(tmp_path: Path) -> None:
    with hosts_for(("ours", "ray"), tmp_path) as session:
        check_rows(session, ("ray",))


def test_a_rank_that_dies_is_an_error_and_not_a_wait(session: Session) -> None:
    """The last test of these hosts, which it breaks."""
    case = Case(kind="pools", hosts=2, prompts=12, max_tokens=64)
    session.measure("gloo", case, 0)
    pids = subprocess.run(["pgrep", "-f", str(session.socket)], capture_output=True, text=True, check=True).stdout
    os.kill(max(map(int, pids.split())), signal.SIGKILL)  # this one is a rank; the lower ones are torchrun
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"gloo with .*pools"):
        session.measure("gloo", case, 1)
    assert time.monotonic() - start < 120
