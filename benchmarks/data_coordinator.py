"""The data coordinator on several hosts, compared with a single controller: seconds, bytes, memory and balance.

    pip install --editable .[benchmarks]
    python benchmarks/data_coordinator.py && python docs/generate.py

Needs Linux and root: the hosts are network namespaces. Every transition is made in four ways, which take turns with the
same rows: by `leaderless.data.buffer.reshard`, by a controller over Ray, by one over gloo, and by one over gloo that
does not pad. An interrupted benchmark continues where it stopped if it is started with the same options.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hosts import obstacle
from benchmarks.transitions.case import KINDS, WAYS, Case, Way
from benchmarks.transitions.report import PICTURES, RESULTS, draw, save, tables
from benchmarks.transitions.session import Session
from benchmarks.transitions.transition import Results, Transition

ROOT = Path(__file__).resolve().parents[1]
BASE = (1024, 1024)
"""Prompts and longest response, while the number of hosts grows."""
LARGEST = ((256, 1024), (512, 1024), BASE, (2048, 1024), (256, 2048), (256, 4096), (256, 8192))
"""The same on the largest number of hosts, while batch and context grow."""
QUICK = ((32, 128),)
WARM_UP = (64, 256)


def main() -> None:
    options = parse()
    problem = obstacle()
    if not problem and "ray" in options.controllers and importlib.util.find_spec("ray") is None:
        problem = "ray is not installed: pip install --editable .[benchmarks], or name other --controllers"
    if problem:
        sys.exit(problem)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    folder: Path = options.folder.resolve()
    ways: tuple[Way, ...] = ("ours", *options.controllers)
    asked = {**{name: str(value) for name, value in vars(options).items()}, "code": digest_of_code()}
    journal = Journal(folder / "measured.jsonl", asked)
    measure(cases(options.hosts, options.quick), ways, options.repeats, options.mbit_per_s, journal)
    versions = {"python": platform.python_version(), "torch": version("torch")}
    if "ray" in ways:
        versions["ray"] = version("ray")
    results = Results(
        mbit_per_s=options.mbit_per_s,
        cores=os.cpu_count() or 1,
        versions=versions,
        transitions=tuple(journal.transitions),
    )
    save(results, folder / RESULTS.name if options.quick else RESULTS)
    draw(results, folder if options.quick else PICTURES)
    journal.remove()
    Console(width=200).print(tables(results), markup=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=[2, 4, 8], help="numbers of hosts; the most also vary batch and context"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--controllers", nargs="*", choices=WAYS[1:], default=WAYS[1:], help="controllers to compare ours with"
    )
    parser.add_argument("--mbit-per-s", type=float, default=500.0, help="bandwidth of each interface")
    parser.add_argument("--quick", action="store_true", help="one tiny batch; results stay in the folder")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/data-coordinator", help="folder for logs and the journal"
    )
    options = parser.parse_args()
    if odd := [number for number in options.hosts if number < 2 or number % 2]:
        parser.error(f"--hosts {odd[0]}: must be even and at least 2, for two pools of one size")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: must be at least 1")
    return options


def digest_of_code() -> str:
    """What determines the results: if it has changed, an interrupted benchmark starts again."""
    files = sorted([*(ROOT / "src/leaderless/data").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def cases(hosts: Sequence[int], quick: bool) -> dict[int, list[Case]]:
    """The cases to measure, by number of hosts."""
    sizes = {number: QUICK if quick else LARGEST if number == max(hosts) else (BASE,) for number in sorted(hosts)}
    return {
        number: [
            Case(kind=kind, hosts=number, prompts=prompts, max_tokens=max_tokens)
            for prompts, max_tokens in some
            for kind in KINDS
        ]
        for number, some in sizes.items()
    }


def measure(
    planned: Mapping[int, Sequence[Case]], ways: Sequence[Way], repeats: int, mbit_per_s: float, journal: Journal
) -> None:
    """Run all transitions that are not in the journal yet."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        total = repeats * len(ways) * sum(map(len, planned.values()))
        task = progress.add_task("starting", total=total, completed=len(journal.transitions))
        for number, some in planned.items():
            left = [turn for turn in turns(some, ways, repeats) if not journal.has(*turn)]
            if not left:
                continue
            progress.update(task, description=f"{number} hosts: starting")
            with Session(number, mbit_per_s, ways, journal.path.parent) as session:
                for way in ways:
                    warm_up(session, way, number)
                for way, case, repeat in left:
                    described = f"{case.kind}, {case.prompts} prompts, {case.max_tokens} tokens"
                    progress.update(task, description=f"{number} hosts: {way}, {described}")
                    journal.add(session.measure(way, case, repeat))
                    progress.advance(task)


def warm_up(session: Session, way: Way, hosts: int) -> None:
    """Run one transition untimed, so that connections exist and libraries are loaded."""
    prompts, max_tokens = WARM_UP
    for kind in KINDS:
        session.measure(way, Case(kind=kind, hosts=hosts, prompts=prompts, max_tokens=max_tokens), 0)


def turns(some: Sequence[Case], ways: Sequence[Way], repeats: int) -> Iterator[tuple[Way, Case, int]]:
    """All transitions of one number of hosts: the ways take turns, and each repeat begins with a different one."""
    for repeat in range(repeats):
        for case in some:
            for place in range(len(ways)):
                yield ways[(place + repeat) % len(ways)], case, repeat


class Journal:
    """Finished transitions, kept in a file until all results are written."""

    def __init__(self, path: Path, asked: Mapping[str, str]) -> None:
        """Continue the file if it is of the same measurement, else start a new one.

        Args:
            path: File to write.
            asked: Everything that determines what is measured.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.transitions: list[Transition] = []
        head = json.dumps(asked)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and lines[0] == head:
            self.transitions = [Transition.model_validate_json(line) for line in lines[1:]]
        else:
            path.write_text(f"{head}\n", encoding="utf-8")

    def has(self, way: Way, case: Case, repeat: int) -> bool:
        return any((t.way, t.case, t.repeat) == (way, case, repeat) for t in self.transitions)

    def add(self, transition: Transition) -> None:
        self.transitions.append(transition)
        with self.path.open("a", encoding="utf-8") as journal:
            journal.write(f"{transition.model_dump_json()}\n")

    def remove(self) -> None:
        """Let the next benchmark start again."""
        self.path.unlink()


if __name__ == "__main__":
    main()
