"""One of several ranks that check machines together: `python -m leaderless.run.doctor.worker JOB`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from leaderless.observability.run_directory import write_atomically
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import reported_failures
from leaderless.worker.supervision.stop import follow_launcher


def main() -> None:
    """Do the job that the command line names."""
    path = Path(sys.argv[1])
    follow_launcher(path.parent)
    place = RankInfo.from_environment()
    with reported_failures(place.rank):
        job = json.loads(path.read_text(encoding="utf-8"))
        from leaderless.run.doctor.collective_checks import check_together  # imports torch

        found = check_together(place, Path(job["folder"]))
        if place.local_rank == 0:
            write_atomically(Path(job["found"]), json.dumps([finding.to_json() for finding in found]))


if __name__ == "__main__":
    main()
