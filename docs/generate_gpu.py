"""The measurements on a GPU, for the page about performance."""

from __future__ import annotations

import json

MARKS = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def with_gpu(page: str) -> str:
    """A page with the newest results of `benchmarks/gpu.py` between its two marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{measured()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def measured() -> str:
    """A picture and a table."""
    from benchmarks.gpu import PICTURE, RESULTS, table

    if not RESULTS.exists():
        return "There are no results yet: the script has not been run on a GPU."
    picture = f"![Tokens per second of the ways to generate, relative to the best](images/{PICTURE.name})"
    parts = [picture] if PICTURE.exists() else []
    return "\n\n".join([*parts, table(json.loads(RESULTS.read_text(encoding="utf-8")))])
