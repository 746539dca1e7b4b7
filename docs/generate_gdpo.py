"""What GDPO learned of two rewards, for its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from generate_gallery import Chart, _smoothed, draw_chart
from generate_markup import between, table_of

RESULTS = Path(__file__).parent / "performance/gdpo.json"
TARGET = 0.9
WAYS = {"grpo": "GRPO", "scaled": "GRPO, both in one scale", "gdpo": "GDPO"}
PARTS = {"digit": "right digit", "end": "ends in time"}


def with_gdpo(page: str) -> str:
    """A page with the newest results of `benchmarks/gdpo.py` between its two marks."""
    return between(page, "gdpo", _text(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else None)


def gdpo_pictures() -> Mapping[str, str]:
    """The curves of the small reward as SVG, by name."""
    if not RESULTS.exists():
        return {}
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    curves = {
        label: [_smoothed(run["end"], width=5) for run in runs if run["way"] == way] for way, label in WAYS.items()
    }
    return {"gdpo": draw_chart(Chart("step", curves))}


def _text(found: Mapping[str, Any]) -> str:
    rows = []
    for way, label in WAYS.items():
        runs = [run for run in found["runs"] if run["way"] == way]
        steps = [", ".join(_first_at(run[part]) for run in runs) for part in PARTS]
        last = [", ".join(f"{sum(run[part][-10:]) / 10:.0%}" for run in runs) for part in PARTS]
        rows.append((label, steps[0], steps[1], last[0], last[1]))
    seeds = sorted({run["seed"] for run in found["runs"]})
    first, second = PARTS.values()
    return (
        f"Values of seeds {', '.join(map(str, seeds))}. A share is the mean reward of a step's samples, as a share of "
        f"the largest; a reward is learned at the first of five steps in a row of {TARGET:.0%} or more; the last two "
        f"columns are means of the last ten of {found['steps']} steps.\n\n"
        + table_of(
            (
                "way",
                f"*{first}* learned at step",
                f"*{second}* learned at step",
                f"*{first}* at the end",
                f"*{second}* at the end",
            ),
            rows,
        )
    )


def _first_at(curve: Sequence[float], width: int = 5) -> str:
    """The first of some steps in a row that reach the target."""
    for step in range(len(curve) - width + 1):
        if min(curve[step : step + width]) >= TARGET:
            return str(step + 1)
    return "never"
