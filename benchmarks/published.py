"""Published speeds of vLLM, TRL and verl next to ours, as tables: `docs/performance/published.json` has the former.

Ours are the parts `published_...` of `benchmarks/gpu.py`, which `docs/performance/gpu.json` has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).resolve().parents[1] / "docs/performance/published.json"
PREFIX = "published_"
"""Beginning of the names of the parts that repeat published work."""
NOT_MEASURED = "not measured"


def load() -> dict[str, list[dict[str, Any]]]:
    """What others have published: on one GPU, with a key, a value and its unit; and on many."""
    published: dict[str, list[dict[str, Any]]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return published


def our_figures(parts: Mapping[str, Any]) -> dict[str, float]:
    """Our value for each key, from results of `benchmarks/gpu.py` by part."""
    good = [part for name, part in parts.items() if name.startswith(PREFIX) and "error" not in part]
    return {key: value for part in good for key, value in part["figures"].items()}


def tables(parts: Mapping[str, Any]) -> str:
    """Both tables in Markdown.

    Args:
        parts: Results of `benchmarks/gpu.py` by part; empty before it was run.
    """
    published, ours = load(), our_figures(parts)
    device = parts.get("environment", {}).get("device", "a GPU")
    one = table(
        ("by", "model", "work", "published", "in our unit", f"ours on {device}"),
        [one_gpu_row(entry, ours) for entry in published["one_gpu"]],
    )
    many = table(
        ("by", "model", "work", "published", "which means"), [many_gpus_row(e) for e in published["many_gpus"]]
    )
    return f"On one GPU:\n\n{one}\n\nOn many GPUs, or without a speed; one GPU cannot repeat these:\n\n{many}"


def one_gpu_row(entry: Mapping[str, Any], ours: Mapping[str, float]) -> tuple[str, ...]:
    """What was published of some work on one GPU, and what we measured of it."""
    unit = entry["unit"]
    own = figure(ours[entry["key"]], unit) if entry["key"] in ours else NOT_MEASURED
    converted = figure(entry["value"], unit)
    if "conversion" in entry:
        converted += f", {entry['conversion']}"
    return source(entry), f"{entry['model']}, {entry['gpus']}", entry["work"], entry["published"], converted, own


def many_gpus_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """What was published of some work on many GPUs."""
    return source(entry), f"{entry['model']}, {entry['gpus']}", entry["work"], entry["published"], entry["derived"]


def source(entry: Mapping[str, Any]) -> str:
    return f"{entry['by']}, [{entry['source']}]({entry['address']}), {entry['date']}"


def figure(value: float, unit: str) -> str:
    return f"{value:,.1f} {unit}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
