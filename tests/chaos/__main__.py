"""`make chaos`: kills workers in every phase of training, and compares the results with undisturbed runs."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.chaos.harness import PLACEMENTS, STEPS, Run, check, draw_kills, phases_of, run, undisturbed

KILLS_PER_RUN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed for ranks, phases and moments")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    options = parser.parse_args()
    console, runs = Console(), []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        plain = {
            name: run(Path(folder) / name, name, [])
            for name in track(options.placements, "undisturbed", console=console)
        }
        # Few kills are divided among all placements.
        num_runs = max(min(options.kills, len(options.placements)), -(-options.kills // KILLS_PER_RUN))
        for number in track(range(num_runs), "with kills", console=console):
            placement = options.placements[number % len(options.placements)]
            count = options.kills // num_runs + (number < options.kills % num_runs)
            kills = draw_kills(phases_of(plain[placement]), count, STEPS, options.seed + number)
            disturbed = run(Path(folder) / f"run-{number}", placement, kills)
            runs.append((placement, disturbed))
            again = Path(folder) / f"run-{number}-again"
            check(disturbed, undisturbed(again, placement, disturbed, plain[placement]))
    console.print(_by_phase([done for _, done in runs]))
    console.print(_by_placement(runs))
    console.print("every curve is that of the undisturbed run, every prompt was used once in an epoch, nothing is left")


def _by_phase(runs: list[Run]) -> Table:
    table = Table(title="workers killed, by what they were doing", title_justify="left")
    for column in ("phase", "kills", "ranks", "steps"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    phases: dict[str, list[dict[str, object]]] = {}
    for done in runs:
        for kill in done.kills:
            phases.setdefault(" + ".join(kill["phases"]) or "between phases", []).append(dict(kill))
    for phase, kills in sorted(phases.items()):
        ranks, steps = ({kill[name] for kill in kills} for name in ("rank", "step"))
        table.add_row(phase, str(len(kills)), *(", ".join(map(str, sorted(found))) for found in (ranks, steps)))
    return table


def _by_placement(runs: list[tuple[str, Run]]) -> Table:
    table = Table(title="what it cost", title_justify="left")
    for column in ("placement", "runs", "kills", "started by hand", "steps lost a kill", "seconds to be back (median)"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    for placement in PLACEMENTS:
        here = [done for name, done in runs if name == placement]
        if not here:
            continue
        kills = sum(len(done.kills) for done in here)
        lost = [event["lost_steps"] for done in here for event in done.events if event["event"] == "restart"]
        back = [event["seconds"] for done in here for event in done.events if event["event"] == "resumed"]
        table.add_row(
            placement,
            str(len(here)),
            str(kills),
            str(sum(done.num_starts - 1 for done in here)),
            f"{sum(lost) / len(lost):.2f}" if lost else "",
            f"{median(back):.1f}" if back else "",
        )
    return table


if __name__ == "__main__":
    main()
