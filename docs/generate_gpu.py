"""The measurements on a GPU, and what is counted without one, for the page about performance."""

from __future__ import annotations

import json

from generate_markup import between


def with_gpu(page: str) -> str:
    """A page with the newest results of `benchmarks/gpu.py`, and the peaks of GPUs, each between its two marks."""
    from benchmarks.published import peaks

    return between(between(page, "gpu", measured()), "peaks", peaks())


def with_decode_counts(page: str) -> str:
    """A page with the newest results of `benchmarks/decode_counts.py` between its two marks."""
    from benchmarks.decode_counts import RESULTS, table

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None
    return between(page, "decode counts", table(results) if results else None)


def with_published(page: str) -> str:
    """A page with what others have published, next to our newest results, between its two marks."""
    from benchmarks.gpu_report import RESULTS
    from benchmarks.published import tables

    results = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"] if RESULTS.exists() else {}
    return between(page, "published", tables(results))


def measured() -> str:
    """The goals, pictures and a table."""
    from benchmarks.gpu_goals import goals
    from benchmarks.gpu_report import PICTURE, RESULTS, TIMELINE, table

    if not RESULTS.exists():
        return f"There are no results yet: the script has not been run on a GPU.\n\n{goals({})}"
    pictures = {
        PICTURE: "Tokens per second of the ways to generate, relative to the best",
        TIMELINE: "What the device and the host do in three steps of decoding and in a pass of training",
    }
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    shown = [f"![{text}](../images/{path.name})" for path, text in pictures.items() if path.exists()]
    return "\n\n".join([goals(results["parts"]), *shown, table(results)])
