"""`leaderless doctor`."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from leaderless.observability.console import console, print_json, print_line
from leaderless.run.doctor.finding import DoctorFinding, merged, run_checks
from leaderless.run.launch.rendezvous import Nodes
from leaderless.worker.rank_info import RankInfo

STYLES = {"ok": "green", "warning": "yellow", "error": "red bold"}


def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder of all runs, as in run.directory.")] = Path("runs"),
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0 checks it without any.")] = 0,
    nodes: Annotated[str, typer.Option(metavar="MIN:MAX", help="Number of machines; start this command on each.")] = "",
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address at which the machines meet.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, or all machines of a job: versions, devices, limits, folders, network.

    Ends with exit code 1 if a run would fail.
    """
    machines = _machines(nodes, rendezvous)
    if RankInfo.is_given():
        from leaderless.run.doctor.worker import check_together

        place = RankInfo.from_environment()
        found = check_together(place, folder)
        if place.rank > 0:
            return
    elif workers or machines is not None:
        found = _with_workers(folder, max(1, workers), machines)
    else:
        from leaderless.run.doctor.folder import folder_check
        from leaderless.run.doctor.machine import CHECKS, port_check

        port = int(rendezvous.rpartition(":")[2]) if rendezvous else 29500
        checks = [*CHECKS, port_check(port), folder_check(folder, is_shared=False)]
        found = run_checks(socket.gethostname(), checks)
    found = merged(found)
    if as_json:
        print_json([finding.to_json() for finding in found])
    else:
        _print(found)
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(1)


def _machines(nodes: str, rendezvous: str) -> Nodes | None:
    if not nodes and not rendezvous:
        return None
    try:
        parsed = Nodes.parse(nodes or "1", rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return parsed if nodes else None


def _with_workers(folder: Path, workers: int, machines: Nodes | None) -> list[DoctorFinding]:
    """Start workers as a run does, and read what they have found."""
    from leaderless.observability.run_directory import RunDirectory
    from leaderless.run.launch.agent import Agent, Launch
    from leaderless.run.launch.restarts import Restarts
    from leaderless.worker.supervision.failure import WorkersFailed

    with tempfile.TemporaryDirectory(prefix="leaderless-doctor-") as name:
        directory, result = RunDirectory(Path(name)), Path(name) / "found.json"
        job = json.dumps({"folder": str(folder), "found": str(result)})
        launch = Launch("leaderless.run.doctor.worker", job, workers, directory.logs, 5.0, "doctor", machines)
        try:
            Agent(launch, Restarts(directory, 0, print_line)).run()
        except WorkersFailed as error:
            remedy = "check `leaderless doctor` on each machine, and that the others reach the address of --rendezvous"
            return [DoctorFinding("workers", error.failure.message, "error", remedy, (socket.gethostname(),))]
        return [DoctorFinding.from_json(one) for one in json.loads(result.read_text(encoding="utf-8"))]


def _print(found: Sequence[DoctorFinding]) -> None:
    places = {place for finding in found for place in finding.places}
    machines = {finding.places for finding in found}
    table = Table()
    for title in ("check", "found", *(("where",) if len(machines) > 1 else ())):
        table.add_column(title)
    for finding in found:
        style = STYLES[finding.level]
        value = escape(finding.value) + (f"\n[bold]{escape(finding.remedy)}" if finding.remedy else "")
        where = "all" if len(finding.places) == len(places) else ", ".join(finding.places)
        row = (f"[{style}]{escape(finding.name)}", value, *((escape(where),) if len(machines) > 1 else ()))
        table.add_row(*row)
    console.print(table)
    counts = {level: sum(finding.level == level for finding in found) for level in STYLES}
    print_line(f"{counts['ok']} as they should be, {counts['warning']} warnings, {counts['error']} errors")
