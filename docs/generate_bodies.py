"""What became of each simulator, for its page."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "performance/bodies.json"
MEMORY = Path(__file__).parent / "performance/body_memory.json"
FETCH = Path(__file__).parent / "performance/fetch_reach.json"
HALVES = Path(__file__).parent / "performance/halves.json"
UNMEASURED = {"ManiSkill PickCube": ("maniskill", "mani-skill 3.0.1")}
"""Environments whose rules were tried where there is a Vulkan driver, and whose speed was not measured."""
FETCH_HEAD = """
## PPO on FetchReach

Steps of the environment per second, updates included, of `recipes/robots/fetch_reach.yaml` and of PPO of
Stable-Baselines3 with the same network, rows, epochs and dense reward, in turns on the same two cores, which other
programs used as well (`benchmarks/fetch_reach.py`):

| | steps/s | from | to |
| --- | ---: | ---: | ---: |
"""
FETCH_TAIL = """In a step of this package of 11.4 s, 7.7 s went into the environment, 2.3 s
into updates and 1.3 s into decisions, so that the simulator sets the pace. How far either learns was not compared.
"""
FETCH_NAMES = {
    "leaderless": "this package, two processes with eight environments each",
    "sb3_2": "Stable-Baselines3, two processes with one each",
    "sb3_16": "Stable-Baselines3, sixteen processes with one each",
}
HALVES_HEAD = """
## Lockstep and halves

Environments in processes (`body.processes`) step by halves: one half steps while the policy decides for the
other. Steps of the table of blocks per second with 32 environments and a small `cnn`, medians of two rounds in turns,
on two cores that other programs used as well (`benchmarks/halves.py`):

"""
HALVES_TAIL = """
The number is that of processes. On these busy cores, halves were slower in five of six comparisons, by 9 to 21 %:
each half is a smaller pass of the policy, and no core is free to hide it on. With one process whose environments wait,
as for a real arm, they were 5 % faster. Cores of their own were not tried.
"""
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
    for name, (kind, package) in UNMEASURED.items():
        if name not in table["environments"]:
            page += f"| {name} | `{kind}` | {package} | all | not measured | | |\n"
    if "fetch_reach" in table:
        page += COMPARISON
        for key, name in NAMES.items():
            page += f"| {name} | {_rates(table['fetch_reach'][key])} |\n"
        ratios = sorted(table["fetch_reach"]["ratio_percent"])
        page += (
            f"\nOne process of this package makes {ratios[len(ratios) // 2]} % of the steps of the eight processes "
            f"({ratios[0]} to {ratios[-1]} %).\n"
        )
    return page + _learning() + _halves() + _memory()


def _rates(rates: list[int]) -> str:
    return f"{rates[len(rates) // 2]:,} | {rates[0]:,} | {rates[-1]:,}"


def _learning() -> str:
    """What `benchmarks/fetch_reach.py` measured."""
    if not FETCH.exists():
        return ""
    turns, page = json.loads(FETCH.read_text(encoding="utf-8"))["steps_per_second"], FETCH_HEAD
    for key, name in FETCH_NAMES.items():
        page += f"| {name} | {_rates(sorted(round(turn[key]) for turn in turns))} |\n"
    num = f"{len(turns)} turns" if len(turns) > 1 else "One turn, which shows no spread"
    return page + f"\n{num}, two iterations each after the first. " + FETCH_TAIL


def _halves() -> str:
    """What `benchmarks/halves.py` measured."""
    if not HALVES.exists():
        return ""
    table = json.loads(HALVES.read_text(encoding="utf-8"))
    ways = list(next(iter(table.values())))
    lines = [f"| a step of an environment | {' | '.join(ways)} |", f"| --- |{' ---: |' * len(ways)}"]
    lines += [f"| {name} | {' | '.join(f'{rates[way]:,}' for way in ways)} |" for name, rates in table.items()]
    return HALVES_HEAD + "\n".join(lines) + "\n" + HALVES_TAIL


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
