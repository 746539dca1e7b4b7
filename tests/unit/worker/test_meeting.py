"""Where several machines meet."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import psutil
import pytest

from leaderless.run.launch.rendezvous import ManyMachines, Nodes, RankSlots


def addresses() -> list[str]:
    """IPv4 addresses of this machine, other than the loopback."""
    found = [address for all_of in psutil.net_if_addrs().values() for address in all_of]
    return [one.address for one in found if one.family == socket.AF_INET and not one.address.startswith("127.")]


@pytest.mark.parametrize(
    ("resolved", "is_own"), [("10.0.0.3", True), ("fe80::1", True), ("10.0.0.4", False), ("127.0.0.1", False)]
)
def test_an_address_of_an_interface_is_this_machine(
    monkeypatch: pytest.MonkeyPatch, resolved: str, is_own: bool
) -> None:
    own = [SimpleNamespace(address=one) for one in ("127.0.0.1", "10.0.0.3", "fe80::1%eth0", "02:fc:00:00:00:01")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": own})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (resolved, 0))])
    assert Nodes(1, 2, "node0:29500").is_own_address == is_own


def test_a_name_without_an_address_is_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert not Nodes(1, 2, "node0:29500").is_own_address


@pytest.mark.skipif(not addresses(), reason="this machine has only the loopback address")
def test_launchers_meet_at_an_address_that_the_host_name_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines whose name is 127.0.1.1 in /etc/hosts, where torch alone finds nobody to hold the store."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "localhost")
    host = addresses()[0]
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
    seats: list[RankSlots] = []
    machines: list[ManyMachines] = []

    def meet() -> None:
        machine = ManyMachines(Nodes(2, 2, f"{host}:{port}"), "tried", 1)
        machines.append(machine)
        seats.append(machine.next())

    threads = [threading.Thread(target=meet) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(seat.first_rank for seat in seats) == [0, 1]
    assert {seat.world_size for seat in seats} == {2}
    for machine in machines:
        machine.close()
