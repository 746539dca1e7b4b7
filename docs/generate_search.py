"""What the search example learns, for its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from generate_markup import between

RESULTS = Path(__file__).parent / "performance/search.json"


def with_search(page: str) -> str:
    """A page with the newest results of `benchmarks/search.py` between its two marks."""
    content = _table(json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]) if RESULTS.exists() else None
    return between(page, "search", content)


def _table(runs: list[Mapping[str, Mapping[str, float]]]) -> str:
    """Held-out accuracies of each seed, from imitation to the last step, and messages per episode there."""
    steps = list(runs[0]["search"])
    columns = "".join(f" step {step} |" for step in steps[1:])
    lines = [
        f"| seed | best guess | without searching | after imitation |{columns} messages |",
        f"| --- {'| ---: ' * (len(steps) + 3)}|",
    ]
    for run in runs:
        last = list(run["closed_book"].values())[-1]
        shares = [run["guess"], last, *run["search"].values()]
        messages = list(run["messages"].values())[-1]
        lines.append(f"| {run['seed']} | {' | '.join(f'{share:.1%}' for share in shares)} | {messages:.2f} |")
    return "\n".join(lines)
