"""Published speeds of others, some of them next to ours, and peaks of devices, as tables.

`docs/performance/published.json` has what was published. Ours are the parts `published_...` of `benchmarks/gpu.py`,
which `docs/performance/gpu.json` has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PUBLISHED = Path(__file__).resolve().parents[1] / "docs/performance/published.json"
PREFIX = "published_"
"""Beginning of the names of the parts that repeat published work."""
NOT_MEASURED = "not measured"


def load() -> dict[str, list[dict[str, Any]]]:
    """What others have published: what we repeat has a key, a value and its unit; peaks are by names of devices."""
    published: dict[str, list[dict[str, Any]]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return published


class Ours(NamedTuple):
    """Our value for some published work, and the name of the device on which it was measured."""

    value: float
    device: str


def our_figures(parts: Mapping[str, Any]) -> dict[str, Ours]:
    """Our value for each key, from results of `benchmarks/gpu.py` by part."""
    good = [part for name, part in parts.items() if name.startswith(PREFIX) and "error" not in part]
    return {key: Ours(value, device_of(part)) for part in good for key, value in part["figures"].items()}


def device_of(part: Mapping[str, Any]) -> str:
    """Name of the device on which a part was measured."""
    return str(part.get("device", "an unknown device"))


def tables(parts: Mapping[str, Any]) -> str:
    """All tables in Markdown: what we repeat, training, weights, and the rest.

    Args:
        parts: Results of `benchmarks/gpu.py` by part; empty before it was run.
    """
    published, ours = load(), our_figures(parts)
    one = table(
        ("by", "model", "work", "published", "in our unit", "ours"),
        [one_gpu_row(entry, ours) for entry in published["one_gpu"]],
    )
    first = f"Generation and updates on one GPU{'' if ours else '; ours have not been run on any'}:"
    return "\n\n".join([first, one, *map(not_repeated, NOT_REPEATED)])


NOT_REPEATED = {
    "training": "Steps of training alone, optimizer included, of models and lengths that are not repeated:",
    "weights": "New weights on their way from trainers to engines, over several machines:",
    "many_gpus": "Whole steps on many GPUs, or without a speed:",
}
"""What stands above the tables of work that we have not repeated, by their names in the file."""


def not_repeated(name: str) -> str:
    """A table of published work next to which there is nothing of ours."""
    titles = ("by", "model", "work", "published", "which means")
    return f"{NOT_REPEATED[name]}\n\n{table(titles, [row(entry) for entry in load()[name]])}"


def peaks() -> str:
    """The peaks of devices in Markdown, by the names that torch gives them."""
    rows = [
        (", ".join(entry["names"]), f"{entry['tflops']:,}", f"[the maker's page]({entry['maker']}), {copied(entry)}")
        for entry in load()["peaks"]
    ]
    return table(("device", "TFLOP/s in bfloat16, without sparsity", "named on"), rows)


def copied(entry: Mapping[str, Any]) -> str:
    """Where a peak was read, which names the page of the maker."""
    return f"as in [{entry['source']}]({entry['address']}), {entry['date']}"


def one_gpu_row(entry: Mapping[str, Any], ours: Mapping[str, Ours]) -> tuple[str, ...]:
    """What was published of some work on one GPU, and what we measured of it."""
    unit, own = entry["unit"], NOT_MEASURED
    if entry["key"] in ours:
        own = f"{figure(ours[entry['key']].value, unit)}, {ours[entry['key']].device}"
    converted = figure(entry["value"], unit)
    if "conversion" in entry:
        converted += f", {entry['conversion']}"
    return source(entry), f"{entry['model']}, {entry['gpus']}", entry["work"], entry["published"], converted, own


def row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """What was published of some other work."""
    return source(entry), f"{entry['model']}, {entry['gpus']}", entry["work"], entry["published"], entry["derived"]


def source(entry: Mapping[str, Any]) -> str:
    return f"{entry['by']}, [{entry['source']}]({entry['address']}), {entry['date']}"


def figure(value: float, unit: str) -> str:
    return f"{value:,.1f} {unit}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
