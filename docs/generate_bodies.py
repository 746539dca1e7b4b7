"""What became of each simulator, for its page."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "performance/bodies.json"
MEMORY = Path(__file__).parent / "performance/body_memory.json"
MEMORY_HEAD = """
## Memory

Most that the only worker of a run on the table of blocks held, and what `leaderless plan` expects
(`benchmarks/body_memory.py`):

"""
HEAD = """# Simulators

Each was tried with its package: the rules that every environment of bodies must keep
(`python -m leaderless.environments.bodies.conformance TYPE '{options}'`), and steps per second of random actions in one
process, with resets: the middle, least and most of three measurements on two shared cores of a virtual machine, which
other programs used as well. `make test-bodies` tries the rules again, and
`.venv-bodies/bin/python benchmarks/bodies.py` writes this table.

| environment | `body.type` | package | rules kept | steps/s | from | to |
| --- | --- | --- | --- | --- | --- | --- |
"""
COMPARISON = """
Eight episodes of FetchReach at a time, random actions, five measurements in turns, on the same busy cores:

| stepped by | steps/s | from | to |
| --- | --- | --- | --- |
"""
NAMES = {
    "singles": "this package, one process",
    "dummy": "`DummyVecEnv` of Stable-Baselines3, one process",
    "subprocesses": "`SubprocVecEnv` of Stable-Baselines3, eight processes",
}


def bodies_page() -> str:
    """The page of simulators, from the results of `benchmarks/bodies.py`."""
    table = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = HEAD
    for name, one in table["environments"].items():
        kept = f"{one['num_rules'] - len(one['broken'])} of {one['num_rules']}"
        page += f"| {name} | `{one['type']}` | {one['package']} | {kept} | {_rates(one['steps_per_second'])} |\n"
    if "fetch_reach" in table:
        page += COMPARISON
        for key, name in NAMES.items():
            page += f"| {name} | {_rates(table['fetch_reach'][key])} |\n"
        ratios = sorted(table["fetch_reach"]["ratio_percent"])
        page += (
            f"\nOne process of this package makes {ratios[len(ratios) // 2]} % of the steps of the eight processes "
            f"({ratios[0]} to {ratios[-1]} %).\n"
        )
    return page + _memory()


def _rates(rates: list[int]) -> str:
    return f"{rates[len(rates) // 2]:,} | {rates[0]:,} | {rates[-1]:,}"


def _memory() -> str:
    """What `benchmarks/body_memory.py` measured, next to what plans expect."""
    if not MEMORY.exists():
        return ""
    table = json.loads(MEMORY.read_text(encoding="utf-8"))
    lines = ["| run | measured, MiB | planned, MiB | measured / planned |", "| --- | ---: | ---: | ---: |"]
    for name, sizes in table.items():
        measured, planned = (sizes[kind] / 2**20 for kind in ("measured", "planned"))
        lines.append(f"| {name} | {measured:,.0f} | {planned:,.0f} | {measured / planned:.2f} |")
    return MEMORY_HEAD + "\n".join(lines) + "\n"
