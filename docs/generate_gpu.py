"""The measurements on a GPU, for the page about performance."""

from __future__ import annotations

import json

from generate_markup import between


def with_gpu(page: str) -> str:
    """A page with the newest results of `benchmarks/gpu.py` between its two marks."""
    return between(page, "gpu", measured())


def measured() -> str:
    """A picture and a table."""
    from benchmarks.gpu import PICTURE, RESULTS, table

    if not RESULTS.exists():
        return "There are no results yet: the script has not been run on a GPU."
    picture = f"![Tokens per second of the ways to generate, relative to the best](images/{PICTURE.name})"
    parts = [picture] if PICTURE.exists() else []
    return "\n\n".join([*parts, table(json.loads(RESULTS.read_text(encoding="utf-8")))])
