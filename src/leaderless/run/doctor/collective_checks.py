"""Checks that several ranks make together."""

from __future__ import annotations

import json
import platform
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from leaderless.base.devices import setup_device
from leaderless.base.versions import source_hash
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.planner.placement.replanning import pairs_in_rounds
from leaderless.run.doctor.finding import DoctorFinding, Findings, differences, run_checks
from leaderless.run.doctor.machine import CHECKS, folder_check
from leaderless.worker.build.join import meet
from leaderless.worker.rank_info import RankInfo

NUM_ROUND_TRIPS = 20
NUM_BYTES = 16 << 20
NUM_LARGE = 3
SLOW_MB_PER_S = 100.0
"""Bandwidth between machines below which rows and weights take long."""
SLOW_MS = 5.0
CLOCK_S = 1.0
APPEARS_S = 10.0
TIMEOUT_S = 120.0
"""Longest wait for other ranks."""
_WHAT = "the doctor"


class NetworkLink(NamedTuple):
    """The network between two ranks."""

    latency_s: float  # median time of a message in one direction
    mb_per_s: float  # largest bandwidth, in both directions at once, in 10⁶ bytes/s each
    ahead_s: float  # seconds by which the other rank's clock is ahead


def gather_json(value: object, world: ProcessGroup) -> list[Any]:
    """A JSON-able value of every rank, in the order of ranks. All ranks call it together."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in world.gather(text, _WHAT)]


def compare_versions(facts: dict[str, str], place: str, world: ProcessGroup) -> list[DoctorFinding]:
    """Whether facts that must be the same, by name, are so on all machines. All ranks call it together."""
    by_place = dict(gather_json([place, facts], world))
    remedy = "install the same on all machines"
    return [
        finding
        for name in facts
        for finding in differences(name, {place: found[name] for place, found in by_place.items()}, remedy)
    ]


def check_network(world: ProcessGroup, places: list[str]) -> list[DoctorFinding]:
    """Latency, bandwidth and clocks between machines, or two ranks of a single one. All ranks call it together."""
    firsts = list({place: rank for rank, place in reversed(list(enumerate(places)))}.values())[::-1]
    is_one = len(firsts) == 1
    if world.size == 1:
        return []  # there is nobody to exchange messages with
    order = [0, world.size - 1] if is_one else sorted(firsts)
    links: dict[str, NetworkLink] = {}
    for pairs in pairs_in_rounds(len(order)):
        for index in pairs:
            pair = order[index], order[(index + 1) % len(order)]
            if world.rank == pair[0]:
                links[f"ranks {pair[0]}-{pair[1]}" if is_one else f"{places[pair[0]]}-{places[pair[1]]}"] = _measure(
                    pair[1], world
                )
            elif world.rank == pair[1]:
                _measure(pair[0], world)
    found = {name: NetworkLink(*link) for part in gather_json(links, world) for name, link in part.items()}
    return [finding for name, link in found.items() for finding in _judge(name, link)]


def _judge(name: str, link: NetworkLink) -> list[DoctorFinding]:
    findings, latency_ms, is_wrong = Findings(name), link.latency_s * 1e3, abs(link.ahead_s) > CLOCK_S
    remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the fastest interface that machines share"
    findings.warn_if(link.mb_per_s < SLOW_MB_PER_S, "bandwidth", f"{link.mb_per_s:,.0f} MB/s", remedy)
    findings.warn_if(latency_ms > SLOW_MS, "latency", f"{latency_ms:.2f} ms", remedy)
    ahead = f"{link.ahead_s:+.1f} s apart" if is_wrong else "agree"
    findings.warn_if(
        is_wrong, "clocks", ahead, "synchronize clocks (chrony, ntpd): times of logs and reports are wrong"
    )
    return findings.found


def _measure(peer: int, world: ProcessGroup) -> NetworkLink:
    """Exchange messages with another rank, which does the same."""
    trips: list[tuple[float, float]] = []
    for _ in range(NUM_ROUND_TRIPS):
        clock, begin = time.time(), time.perf_counter()
        message = torch.tensor([clock], dtype=torch.float64).view(torch.uint8)
        answer = world.exchange({peer: message}, [peer], _WHAT)[peer]
        seconds = time.perf_counter() - begin
        trips.append((seconds, float(answer.view(torch.float64)) - clock))
    block = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    fastest = float("inf")
    for _ in range(NUM_LARGE):
        world.exchange({peer: block[:1]}, [peer], _WHAT)
        begin = time.perf_counter()
        world.exchange({peer: block}, [peer], _WHAT)
        fastest = min(fastest, time.perf_counter() - begin)
    # Both send at about the same time, so that the two clocks in the fastest trip differ by no more than the trip took.
    return NetworkLink(median(seconds for seconds, _ in trips) / 2, NUM_BYTES / 1e6 / fastest, min(trips)[1])


def check_shared(folder: Path, place: str, world: ProcessGroup) -> list[DoctorFinding]:
    """Whether all machines see what the first one writes and renames in a folder, which is made if it is not there.

    All ranks call it together.
    """
    is_first = world.rank == 0
    name = world.broadcast_text(f".doctor-{uuid4().hex}" if is_first else "", 0, _WHAT)
    seconds: list[float | None] = []
    for content in ("first", "second"):
        objection = _written(folder, name, content) if is_first else ""
        # An error of the first rank is for all: it must not leave the others waiting.
        if objection := world.broadcast_text(objection, 0, _WHAT):
            findings = Findings("all")
            findings.fail_if(True, "files of rank 0", objection, "name another run.directory, or change its owner")
            return findings.found
        seconds.append(_seconds_until(folder / name, content))
        world.sum(torch.zeros(1), _WHAT)
    if is_first:
        (folder / name).unlink(missing_ok=True)
    results = dict(gather_json([place, seconds], world))
    remedy = "name a folder on storage that all machines share as run.directory, by an absolute path"
    found: list[DoctorFinding] = []
    for machine, delays in results.items():
        is_seen = None not in delays
        value = f"appear after {max(delays):.1f} s" if is_seen else "do not appear, or an older one does"
        findings = Findings(machine, found)
        findings.fail_if(not is_seen, "files of rank 0", value, remedy)
    return found


def _written(folder: Path, name: str, content: str) -> str:
    """Write and rename a file; return why it cannot be done, or nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.new").write_text(content, encoding="utf-8")
        (folder / f"{name}.new").replace(folder / name)
    except OSError as error:
        return f"cannot be written in {folder}: {error.strerror}"
    return ""


def _seconds_until(path: Path, content: str) -> float | None:
    """Seconds until a file has a content; None if that takes too long."""
    begin = time.monotonic()
    while time.monotonic() - begin < APPEARS_S:
        with suppress(OSError):  # it is not there yet, or is just being replaced
            if path.read_text(encoding="utf-8") == content:
                return time.monotonic() - begin
        time.sleep(0.05)
    return None


def check_collective(world: ProcessGroup, device: torch.device) -> list[DoctorFinding]:
    """Speed of a sum over all ranks on their devices. All ranks call it together."""
    values = torch.ones(NUM_BYTES // 4, device=device)
    dist.all_reduce(values)
    values.fill_(1)
    begin = time.perf_counter()
    dist.all_reduce(values)
    total = float(values[0])  # waits for the device
    seconds = time.perf_counter() - begin
    findings = Findings("all")
    value = f"{world.size} ranks, {NUM_BYTES / 1e6 / seconds:,.0f} MB/s on {device.type}"
    findings.fail_if(total != world.size, "sum over ranks", value, "the sum is wrong: replace the device")
    return findings.found


def check_together(place: RankInfo, folder: Path) -> list[DoctorFinding]:
    """Check all machines of a job; all ranks call it together, and each gets what all have found."""
    device = setup_device(place.local_rank, place.local_world_size)
    meet(place, device, timedelta(seconds=TIMEOUT_S))
    world = Transport(device.device, TIMEOUT_S).world
    # Launchers of one machine count as machines, as they can be tried so.
    machine = f"{socket.gethostname()}:{place.rank - place.local_rank}"
    places = [str(one) for one in gather_json(machine, world)]
    if len({one.partition(":")[0] for one in places}) == len(set(places)):
        places = [one.partition(":")[0] for one in places]
    here, num_machines = places[place.rank], len(set(places))
    own: list[DoctorFinding] = []
    if place.local_rank == 0:
        own = run_checks(here, [*CHECKS, folder_check(folder, is_shared=num_machines > 1)])
    found = [
        DoctorFinding.from_json(one)
        for part in gather_json([finding.to_json() for finding in own], world)
        for one in part
    ]
    facts = {"leaderless": source_hash()[:12], "python": platform.python_version(), "torch": torch.__version__}
    found += compare_versions(facts, here, world)
    found += check_shared(folder, here, world) + check_network(world, places) + check_collective(world, device.device)
    dist.destroy_process_group()
    return found
