"""The measurements on several hosts, for the page about scaling."""

from __future__ import annotations

from generate_markup import between

ALTS = {
    "hosts": "Seconds, bytes and memory of a transition by number of hosts, for ours and the controllers",
    "batch": "Seconds, bytes and memory of a transition by number of prompts, for ours and the controllers",
    "context": "Seconds, bytes and memory of a transition by longest response, for ours and the controllers",
}
"""Description of each picture."""


def with_hosts(page: str) -> str:
    """A page with the newest results of `benchmarks/data_coordinator.py` between its two marks."""
    return between(page, "several hosts", measured())


def measured() -> str:
    """Pictures and tables."""
    from benchmarks.transitions.report import AXES, KIND_NAMES, load, tables

    results = load()
    if results is None:
        return "There are no results yet: the script below has not been run for this version."
    pictures = [f"![{ALTS[axis.name]}](../images/scaling-{axis.name}.png)" for axis in AXES]
    read = (
        f"The upper charts are of *{KIND_NAMES['balance']}*, the lower of *{KIND_NAMES['pools']}*. Lines are medians, "
        "bands go from the smallest to the largest value. In the tables, ours is in seconds and megabytes, and the "
        "controllers are multiples of ours in the same repeat. All transitions are in `docs/scaling/hosts.json`."
    )
    return "\n\n".join([*pictures, read, tables(results)])
