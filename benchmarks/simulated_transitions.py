"""The cost model against the test bed: every transition measured by `benchmarks/data_coordinator.py`.

    python benchmarks/simulated_transitions.py

Prints, for each case and way, the median of what was measured, what `leaderless.planner.simulate` predicts, and the
error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulated.controllers import ComparedCluster, load_compared_cluster
from benchmarks.simulated.prediction import Errors, errors_of, predict
from benchmarks.transitions.case import RESPONSES, Case
from benchmarks.transitions.report import RESULTS
from benchmarks.transitions.transition import Results, Transition

from leaderless.planner.memory.rank import format_bytes
from leaderless.planner.simulate.rows import SimulatedRows
from leaderless.planner.simulate.transfers import Cost

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cluster", type=Path, default=ROOT / "recipes/clusters/testbed.yaml")
    options = parser.parse_args()
    results = Results.model_validate_json(options.results.read_text(encoding="utf-8"))
    cluster = load_compared_cluster(options.cluster)
    table = Table("kind", "hosts", "prompts", "tokens", "way", "seconds", "interface", "process", "errors")
    found: dict[str, list[Errors]] = {}
    for runs in by_case(results.transitions):
        case, way = runs[0].case, runs[0].way
        measured = median_of(runs)
        predicted = prediction(case, way, cluster)
        errors = errors_of(predicted, measured)
        found.setdefault(way, []).append(errors)
        table.add_row(
            *map(str, (case.kind, case.hosts, case.prompts, case.max_tokens, way)), *cells(measured, predicted, errors)
        )
    console = Console(width=160)
    console.print(table)
    for way, errors_of_way in found.items():
        means = (
            fmean(abs(getattr(errors, name)) for errors in errors_of_way)
            for name in ("seconds", "interface_bytes", "process_bytes")
        )
        console.print(
            f"{way}: mean error {' / '.join(f'{mean:.0%}' for mean in means)} (seconds / interface / process)"
        )


def by_case(transitions: Sequence[Transition]) -> Iterator[list[Transition]]:
    """The repeats of every case and way."""
    runs: dict[tuple[str, str], list[Transition]] = {}
    for run in transitions:
        runs.setdefault((run.case.model_dump_json(), run.way), []).append(run)
    yield from runs.values()


def median_of(runs: Sequence[Transition]) -> Cost:
    """The medians of the repeats."""
    return Cost(
        seconds=median(run.seconds for run in runs),
        interface_bytes=round(median(run.busiest_bytes for run in runs)),
        process_bytes=round(median(run.peak_bytes for run in runs)),
    )


def prediction(case: Case, way: str, cluster: ComparedCluster) -> Cost:
    """The prediction of the model."""
    rows = SimulatedRows(
        groups=np.repeat(np.arange(case.prompts), RESPONSES),
        prompt_tokens=case.prompt_lengths_of_rows.numpy(),
        response_tokens=case.response_lengths.numpy(),
        are_samples=True,
    )
    held = [(host, len(case.prompts_held(host)) * RESPONSES) for host in range(case.hosts)]
    holders = np.repeat([host for host, _ in held], [count for _, count in held])
    return predict(case.action, rows, holders, cluster, way)


def cells(measured: Cost, predicted: Cost, errors: Errors) -> tuple[str, ...]:
    """Measured -> predicted, and the errors."""
    return (
        f"{measured.seconds:.2f} -> {predicted.seconds:.2f}",
        f"{format_bytes(measured.interface_bytes)} -> {format_bytes(predicted.interface_bytes)}",
        f"{format_bytes(measured.process_bytes)} -> {format_bytes(predicted.process_bytes)}",
        f"{errors.seconds:+.0%} {errors.interface_bytes:+.0%} {errors.process_bytes:+.0%}",
    )


if __name__ == "__main__":
    main()
