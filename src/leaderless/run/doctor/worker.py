"""One of several ranks that check machines together: `python -m leaderless.run.doctor.worker JOB`."""

from __future__ import annotations

import json
import platform
import socket
import sys
from datetime import timedelta
from pathlib import Path

from leaderless.observability.run_directory import write_atomically
from leaderless.run.doctor.finding import DoctorFinding, run_checks
from leaderless.run.doctor.folder import folder_check
from leaderless.run.doctor.machine import CHECKS, source_hash
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import reported_failures
from leaderless.worker.supervision.stop import follow_launcher

TIMEOUT_S = 120.0
"""Longest wait for other ranks."""


def check_together(place: RankInfo, folder: Path) -> list[DoctorFinding]:
    """Check all machines of a job; all ranks call it together, and each gets what all have found."""
    import torch
    import torch.distributed as dist

    from leaderless.base.devices import setup_device
    from leaderless.distributed.transport import Transport
    from leaderless.run.doctor.collective_checks import (
        check_collective,
        check_network,
        check_shared,
        compare_versions,
        gather_json,
    )
    from leaderless.worker.build.join import meet

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
    facts = {"leaderless": source_hash(), "python": platform.python_version(), "torch": torch.__version__}
    found += compare_versions(facts, here, world)
    found += check_shared(folder, here, world) + check_network(world, places) + check_collective(world, device.device)
    dist.destroy_process_group()
    return found


def main() -> None:
    """Do the job that the command line names."""
    path = Path(sys.argv[1])
    follow_launcher(path.parent)
    place = RankInfo.from_environment()
    with reported_failures(place.rank):
        job = json.loads(path.read_text(encoding="utf-8"))
        found = check_together(place, Path(job["folder"]))
        if place.local_rank == 0:
            write_atomically(Path(job["found"]), json.dumps([finding.to_json() for finding in found]))


if __name__ == "__main__":
    main()
