"""What students learned of a teacher, for the page of distillation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from generate_gallery import Chart, draw_chart
from generate_markup import between, table_of

RESULTS = Path(__file__).parent / "algorithms/distillation.json"


def with_distillation(page: str) -> str:
    """A page with the newest results of `benchmarks/distillation.py` between its two marks."""
    return between(page, "distillation", _text(_read()) if RESULTS.exists() else None)


def distillation_pictures() -> Mapping[str, str]:
    """The curves of accuracy as SVG, by name."""
    if not RESULTS.exists():
        return {}
    curves = {
        way: [[*zip(run["steps"], run["accuracy"], strict=True)] for run in runs] for way, runs in _by_way().items()
    }
    return {"distillation": draw_chart(Chart("step", curves))}


def _read() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def _by_way() -> dict[str, list[Mapping[str, Any]]]:
    runs = _read()["runs"]
    return {way: [run for run in runs if run["way"] == way] for way in dict.fromkeys(run["way"] for run in runs)}


def _text(found: Mapping[str, Any]) -> str:
    rows = []
    for way, runs in _by_way().items():
        middle = [run["accuracy"][len(run["accuracy"]) // 2 - 1] for run in runs]
        last = [run["accuracy"][-1] for run in runs]
        rows.append((way, f"{fmean(middle):.1%}", f"{fmean(last):.1%}", f"{min(last):.1%} to {max(last):.1%}"))
    steps = found["runs"][0]["steps"]
    seeds = sorted({run["seed"] for run in found["runs"]})
    return (
        f"Seeds {', '.join(map(str, seeds))}; {found['steps']} steps of {found['prompts']} prompts with one response "
        f"each, on one CPU core. Of the held-out additions the student, after {found['imitation_steps']} steps of "
        f"imitation, answers {found['student']:.1%}, and the teacher, after {found['teacher_steps']} further steps of "
        f"grpo, {found['teacher']:.1%}.\n\n"
        + table_of(
            ("learned from", f"accuracy after {steps[len(steps) // 2 - 1]} steps", "after all steps", "min to max"),
            rows,
        )
    )
