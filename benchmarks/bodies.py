"""What each simulator does here: rules that it keeps, versions, steps per second.

    make test-bodies          # makes .venv-bodies
    MUJOCO_GL=osmesa .venv-bodies/bin/python benchmarks/bodies.py && python docs/generate.py

Steps are random actions, single ones in one process, with resets at the end of episodes. With `--subprocesses`,
processes of Stable-Baselines3 step the same environment of Fetch on the same cores (pip install stable-baselines3).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np

from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.conformance import report
from leaderless.embodied.simulators.protocol import Continuous, VectorEnvironment
from leaderless.embodied.simulators.registry import find_body

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/bodies.json"
FETCH = "gymnasium_robotics:FetchReach-v4"
CASES: Mapping[str, tuple[str, Mapping[str, object], str]] = {
    "table of blocks, 28 x 28": ("table", {}, "leaderless"),
    "HalfCheetah": ("gymnasium", {"id": "HalfCheetah-v5", "max_steps": 200}, "mujoco"),
    "Ant": ("gymnasium", {"id": "Ant-v5", "max_steps": 200}, "mujoco"),
    "FetchReach": ("gymnasium", {"id": FETCH}, "gymnasium-robotics"),
    "FetchPickAndPlace": ("gymnasium", {"id": "gymnasium_robotics:FetchPickAndPlace-v4"}, "gymnasium-robotics"),
    "FetchReach, 64 x 64": ("gymnasium", {"id": FETCH, "image_size": 64, "max_steps": 10}, "gymnasium-robotics"),
    "Meta-World MT10": ("metaworld", {"max_steps": 100}, "metaworld"),
    "ManiSkill PickCube": ("maniskill", {"max_steps": 50}, "mani-skill"),
    "BabyAI GoToRedBallGrey, 56 x 56": ("babyai", {}, "minigrid"),
    "BabyAI PickupLoc, symbols": ("babyai", {"id": "BabyAI-PickupLoc-v0", "tile_size": 0}, "minigrid"),
    "PandaReach": ("panda", {}, "panda-gym"),
    "PandaPickAndPlace": ("panda", {"id": "PandaPickAndPlace-v3"}, "panda-gym"),
    "PushT, 96 x 96": ("pusht", {"max_steps": 100}, "gym-pusht"),
    "PushT, state": ("pusht", {"max_steps": 100, "has_images": False}, "gym-pusht"),
}
"""Type, options and package of each environment."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a measurement, of which there are three")
    parser.add_argument("--subprocesses", action="store_true", help="compare with Stable-Baselines3 on FetchReach")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    if options.subprocesses:
        table["fetch_reach"] = compare(options.seconds)
    else:
        names = [name for name, (_, _, package) in CASES.items() if is_installed(package)]
        table["environments"] = {name: measure(name, options.seconds) for name in names}
    options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def is_installed(package: str) -> bool:
    """Whether a package can be measured here; says so if not."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        print(f"left out: {package} is not installed", flush=True)
        return False
    return True


def measure(name: str, seconds: float) -> dict[str, object]:
    kind, arguments, package = CASES[name]
    make = partial(find_body(BodyConfig(type=kind, options=arguments)), **arguments)
    with redirect_stdout(None):
        rules = report(make)
        rates = [steps_per_second(make, 4, seconds) for _ in range(3)]
    result: dict[str, object] = {
        "type": kind,
        "package": f"{package} {metadata.version(package)}",
        "broken": {rule: said for rule, said in rules.items() if said != "held"},
        "num_rules": len(rules),
        "steps_per_second": [round(rate) for rate in sorted(rates)],
    }
    print(name, json.dumps(result), flush=True)
    return result


def steps_per_second(make: Callable[[int], VectorEnvironment], num: int, seconds: float) -> float:
    one, chance, seeds = make(num), np.random.default_rng(0), iter(range(10**9))
    which = list(range(num))
    one.reset(which, [{}] * num, [next(seeds) for _ in which])
    count, until_s, space = 0, time.perf_counter() + seconds, one.spaces.actions
    while time.perf_counter() < until_s:
        if isinstance(space, Continuous):
            actions = chance.uniform(space.low, space.high, (num, 1, space.dim)).astype(np.float32)
        else:
            actions = chance.integers(space.num_choices, size=(num, 1))
        steps = one.step(which, actions)
        count += num
        over = np.flatnonzero(steps.terminated | steps.truncated).tolist()
        if over:
            one.reset(over, [{}] * len(over), [next(seeds) for _ in over])
    one.close()
    return count / (seconds + time.perf_counter() - until_s)


def compare(seconds: float) -> dict[str, list[int]]:
    """Steps per second of FetchReach, in turns: here, and in Stable-Baselines3's one process and two processes."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    found: dict[str, list[float]] = {"singles": [], "dummy": [], "subprocesses": []}
    options = {"id": FETCH}
    make = partial(find_body(BodyConfig(type="gymnasium", options=options)), **options)
    theirs = {"dummy": DummyVecEnv, "subprocesses": SubprocVecEnv}
    for _ in range(5):
        found["singles"].append(steps_per_second(make, 8, seconds))
        for name, kind in theirs.items():
            worlds = kind([their_fetch] * 8)
            worlds.reset()
            count, begin_s, chance = 0, time.perf_counter(), np.random.default_rng(0)
            while time.perf_counter() < begin_s + seconds:
                worlds.step(chance.uniform(-1, 1, (8, 4)).astype(np.float32))
                count += 8
            found[name].append(count / (time.perf_counter() - begin_s))
            worlds.close()
    return {name: [round(rate) for rate in sorted(rates)] for name, rates in found.items()} | {
        "ratio_percent": [
            round(100 * ours / other) for ours, other in zip(found["singles"], found["subprocesses"], strict=True)
        ]
    }


def their_fetch() -> object:
    """The environment as Stable-Baselines3 gets it, in a process of its own."""
    import gymnasium
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium.make("FetchReach-v4")


if __name__ == "__main__":
    main()
