"""The measurements on a GPU, and what is counted without one, for the page about performance."""

from __future__ import annotations

import json

from generate_markup import between


def with_gpu(page: str) -> str:
    """A page with the newest results of `benchmarks/gpu.py` between its two marks."""
    return between(page, "gpu", measured())


def with_decode_counts(page: str) -> str:
    """A page with the newest results of `benchmarks/decode_counts.py` between its two marks."""
    from benchmarks.decode_counts import RESULTS, table

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    return between(page, "decode counts", table(results) if results else None)


def measured() -> str:
    """A picture and a table."""
    from benchmarks.gpu import PICTURE, RESULTS, table

    if not RESULTS.exists():
        return "There are no results yet: the script has not been run on a GPU."
    picture = f"![Tokens per second of the ways to generate, relative to the best](images/{PICTURE.name})"
    parts = [picture] if PICTURE.exists() else []
    return "\n\n".join([*parts, table(json.loads(RESULTS.read_text(encoding="utf-8")))])
