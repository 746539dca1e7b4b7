"""The results of `weight_differences.py` as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/weight_differences.json"
WHOLE, DIFFERENCE = "whole", "difference"


@dataclass(frozen=True)
class Way:
    """New weights of each update, sent in one form.

    Attributes:
        num_bytes: Bytes on the wire, once for each update.
        seconds: Seconds until all have arrived, once for each update.
        cpu_seconds: Seconds of processors, of both ranks together, once for each update.
    """

    num_bytes: list[int]
    seconds: list[float]
    cpu_seconds: list[float]


@dataclass(frozen=True)
class Travel:
    """A model that is trained on one host, and whose weights are sent to another.

    Attributes:
        model: Name of its folder.
        learning_rate: Learning rate of AdamW.
        mbit_per_s: Rate of the interface of each host.
        changed: Share of the numbers that differ from those sent before, once for each update.
        whole: All numbers.
        difference: Changed numbers.
    """

    model: str
    learning_rate: float
    mbit_per_s: float
    changed: list[float]
    whole: Way
    difference: Way


def load(file: Path = RESULTS) -> list[Travel]:
    """What has been measured."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return [Travel(**{**one, WHOLE: Way(**one[WHOLE]), DIFFERENCE: Way(**one[DIFFERENCE])}) for one in found]


def table(travels: Sequence[Travel]) -> str:
    """A row for each form, in Markdown."""
    titles = ("model", "learning rate", "numbers changed", "sent", "MB on the wire", "seconds (range)", "of processors")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for one in travels:
        changed = f"{min(one.changed):.2%} to {max(one.changed):.2%}"
        for name, way in ((WHOLE, one.whole), (DIFFERENCE, one.difference)):
            lines.append(
                f"| {one.model} | {one.learning_rate:g} | {changed} | {name} | {fmean(way.num_bytes) / 1e6:,.1f} | "
                f"{median(way.seconds):.2f} ({min(way.seconds):.2f}-{max(way.seconds):.2f}) | "
                f"{median(way.cpu_seconds):.2f} |"
            )
    return "\n".join(lines)


def conditions(travels: Sequence[Travel]) -> str:
    """The conditions, and what is saved, for readers."""
    one, numbers = travels[0], sorted({len(x.changed) for x in travels})
    fewer = [fmean(x.whole.num_bytes) / fmean(x.difference.num_bytes) for x in travels]
    return (
        f"{' or '.join(map(str, numbers))} updates, between two hosts with {one.mbit_per_s:g} Mbit/s on 2 cores. "
        f"Differences have {' and '.join(f'{times:.0f}' for times in fewer)} times fewer bytes."
    )
