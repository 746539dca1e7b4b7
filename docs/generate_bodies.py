"""What became of each simulator, for its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from generate_markup import table_of

from leaderless.embodied.simulators.registry import ADAPTERS

RESULTS = Path(__file__).parent / "performance/bodies.json"
MEMORY = Path(__file__).parent / "performance/body_memory.json"
FETCH = Path(__file__).parent / "performance/fetch_reach.json"
HALVES = Path(__file__).parent / "performance/halves.json"
UNMEASURED = {
    "ManiSkill PickCube": ("maniskill", "mani-skill 3.0.1", "all, with a Vulkan driver"),
    "LIBERO": ("libero", "robosuite 1.4.0", "tried with stand-ins for the largest assets"),
    "Isaac Lab": ("isaaclab", "none", "run only with a stand-in"),
}
"""Type, package and what is known of the rules, of environments whose speed was not measured."""
FETCH_HEAD = """
## PPO on FetchReach

Steps of the environment per second, updates included, of `recipes/robots/fetch_reach.yaml` and of PPO of
Stable-Baselines3 with the same network, rows, epochs and dense reward, in turns on the same two cores, which did
nothing else (`benchmarks/fetch_reach.py`):

| | steps/s | from | to |
| --- | ---: | ---: | ---: |
"""
NOT_RACED = " How far either learns was not compared.\n"
RACE_HEAD = """
How soon both reach 95 % success in the same 64 held-out episodes, by the likeliest actions: steps of the environment,
and seconds of training without starts and evaluations. There is an evaluation every 3,200 steps, and a run ends after
38,400. Stable-Baselines3 has sixteen processes with one environment each. Seed by seed they take turns, and the one
that begins alternates (`benchmarks/fetch_reach.py --race`):

"""
RACE_TARGET = 0.95
"""Share of successes at which a race ends."""
Curve = Sequence[tuple[int, float, float]]
"""Steps of the environment, seconds, and success."""
FETCH_NAMES = {
    "leaderless": "this package, two processes with eight environments each",
    "sb3_2": "Stable-Baselines3, two processes with one each",
    "sb3_16": "Stable-Baselines3, sixteen processes with one each",
}
HALVES_HEAD = """
## Lockstep and halves

Environments in processes (`body.processes`) step by halves: one half steps while the policy decides for the
other. Steps of the table of blocks per second with 32 environments and a small `cnn` on one thread, medians of five
rounds in turns, on two cores that did nothing else (`benchmarks/halves.py`):

"""
HALVES_TAIL = """
A half is a smaller pass of the policy, and steps are hidden behind it where a core is free or the environment waits.
How long environments compute or wait is not known in advance, so halves are not turned off where no core is free. Up to
the rounding of smaller passes, episodes are the same: the noise of a decision follows from its episode and its number.
"""
MEMORY_HEAD = """
## Memory

Most that the only worker of a run on the table of blocks held, and what `leaderless plan` expects
(`benchmarks/body_memory.py`):

"""
HEAD = """# Simulators

Each was tried with its package: the rules that every environment of bodies must keep
(`python -m leaderless.embodied.simulators.conformance TYPE '{options}'`), and steps per second of random actions in one
process, with resets: the middle, least and most of three measurements on two cores of a virtual machine that did
nothing else. `make test-bodies` tries the rules again, and
`.venv-bodies/bin/python benchmarks/bodies.py` writes this table.

| environment | `body.type` | package | rules kept | steps/s | from | to |
| --- | --- | --- | --- | --- | --- | --- |
"""
COMPARISON = """
Eight episodes of FetchReach at a time, random actions, five measurements in turns, on the same cores:

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
        page += f"| {name} | {_linked(one['type'])} | {one['package']} | {kept} | {_rates(one['steps_per_second'])} |\n"
    for name, (kind, package, rules) in UNMEASURED.items():
        if name not in table["environments"]:
            page += f"| {name} | {_linked(kind)} | {package} | {rules} | not measured | | |\n"
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


def _linked(kind: str) -> str:
    """A name of recipes, with a link to its page if it has one."""
    return f"[`{kind}`](simulators/{kind}.md)" if kind in ADAPTERS else f"`{kind}`"


def _rates(rates: list[int]) -> str:
    return f"{rates[len(rates) // 2]:,} | {rates[0]:,} | {rates[-1]:,}"


def _learning() -> str:
    """What `benchmarks/fetch_reach.py` measured."""
    if not FETCH.exists():
        return ""
    table = json.loads(FETCH.read_text(encoding="utf-8"))
    turns, page = table["steps_per_second"], FETCH_HEAD
    for key, name in FETCH_NAMES.items():
        page += f"| {name} | {_rates(sorted(round(turn[key]) for turn in turns))} |\n"
    num = f"{len(turns)} turns" if len(turns) > 1 else "One turn, which shows no spread"
    page += f"\n{num}, in which the first iteration of each is left out."
    return page + (f"\n{RACE_HEAD}{race(table['race'])}\n" if "race" in table else NOT_RACED)


def race(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """A table of steps and seconds to the target by seed, with what it says.

    Args:
        curves: Curves of `leaderless` and of `sb3_16` by seed; seeds that one of them lacks are left out.
    """
    seeds = [seed for seed in curves["leaderless"] if seed in curves["sb3_16"]]
    pairs = [tuple(_end(curves[name][seed]) for name in ("leaderless", "sb3_16")) for seed in seeds]
    rows = [(seed, *(text for end in pair for text in _shown(*end))) for seed, pair in zip(seeds, pairs, strict=True)]
    titles = ("seed", "this package, steps", "seconds", "Stable-Baselines3, steps", "seconds")
    page = table_of(titles, rows)
    both = [(ours, theirs) for ours, theirs in pairs if ours[2] and theirs[2]]
    if not both:
        return page
    steps, seconds = (sorted(ours[i] / theirs[i] for ours, theirs in both) for i in (0, 1))
    what = ", by one seed, which shows no spread" if len(both) == 1 else "; medians, with the least and the most"
    return (
        f"{page}\n\nSeeds with which both reached it: {len(both)} of {len(pairs)}. This package took "
        f"{_spread(steps)} the steps and {_spread(seconds)} the seconds of Stable-Baselines3{what}."
    )


def _spread(ratios: Sequence[float]) -> str:
    span = f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f} times{span}"


def _end(curve: Curve) -> tuple[int, float, bool]:
    """Steps and seconds of a curve's last point, and whether it has reached the target."""
    steps, seconds, success = curve[-1]
    return steps, seconds, success >= RACE_TARGET


def _shown(steps: int, seconds: float, is_there: bool) -> tuple[str, str]:
    more = "" if is_there else "more than "
    return f"{more}{steps:,}", f"{more}{seconds:.0f}"


def _halves() -> str:
    """What `benchmarks/halves.py` measured."""
    if not HALVES.exists():
        return ""
    table = json.loads(HALVES.read_text(encoding="utf-8"))
    ways = list(next(iter(table.values())))
    lines = [f"| a step of an environment | {' | '.join(ways)} |", f"| --- |{' ---: |' * len(ways)}"]
    lines += [f"| {name} | {' | '.join(f'{rates[way]:,}' for way in ways)} |" for name, rates in table.items()]
    return f"{HALVES_HEAD}{chr(10).join(lines)}\n\n{halves_said(table)}\n{HALVES_TAIL}"


def halves_said(table: Mapping[str, Mapping[str, int]]) -> str:
    """How often halves were slower than lockstep with as many processes, and by how much.

    Args:
        table: Steps per second by what a step is, and by `lockstep, N` and `halves, N` for numbers of processes.
    """
    changes = [
        100 * (rates[way] / rates[way.replace("halves", "lockstep")] - 1)
        for rates in table.values()
        for way in rates
        if way.startswith("halves")
    ]
    said = []
    for word, found in (("slower", [-one for one in changes if one < 0]), ("faster", [x for x in changes if x > 0])):
        if found:
            least, most = (f"{one:.0f}" for one in (min(found), max(found)))
            said.append(f"{word} in {len(found)}, by {least if least == most else f'{least} to {most}'} %")
    said = said or ["as fast in all"]
    return f"The number is that of processes. Of {len(changes)} comparisons, halves were {', and '.join(said)}."


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
