"""The measurements of generation, for the page about performance."""

from __future__ import annotations

from generate_markup import between


def with_generation(page: str) -> str:
    """A page with the newest results of `benchmarks/generation.py` between its two marks."""
    return between(page, "generation", measured())


def measured() -> str:
    """A picture and tables."""
    from benchmarks.generation import OURS, PICTURE, RESULTS, load, table

    parts: list[str] = []
    results = load()
    if results is not None:
        repeats = max(len({run["repeat"] for run in results["runs"]}), 1)
        versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        read = (
            "Bars are speeds relative to ours within a repeat: medians, with lines from the smallest to the largest. "
            f"The table shows how many times as fast {OURS} was, with the smallest and the largest ratio in brackets "
            f"if it was measured more than once; empty cells were not measured. {results['cores']} cores, {versions}; "
            f"repeats: up to {repeats}. All runs are in `docs/performance/{RESULTS.name}`."
        )
        parts += [
            f"![Speed of each engine relative to ours, by workload and model](../images/{PICTURE.name})",
            read,
            table(results),
        ]
        parts += [f"Failed: {case}: {why}" for case, why in results["failures"].items()]
    return "\n\n".join(parts or ["There are no results yet: the script has not been run for this version."])
