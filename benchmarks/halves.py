"""Steps per second of episodes: in the rank itself, and in processes, in lockstep or by halves.

    python benchmarks/halves.py

In lockstep all environments wait while the policy decides, and the policy waits while they step. By halves, one half
steps while the policy decides for the other. Ways take turns, so that a busy machine slows all of them alike; the
median of the rounds is kept. Each step of the environment takes the time given, on top of that of the table of blocks:
as computation, or as waiting, which is what a real arm or a simulator on a device does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from leaderless.config.environment import BodyConfig
from leaderless.embodied.policies.cnn import Cnn
from leaderless.embodied.policies.protocol import BodyPolicy
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask
from leaderless.embodied.rollout.vector_envs import ProcessVectorEnvs, VectorEnvs, open_worlds, spaces_of
from leaderless.embodied.simulators.protocol import Steps
from leaderless.embodied.simulators.tabletop import TableTask
from leaderless.observability.clock import Clock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/halves.json"
NUM, EPISODES = 32, 64
sys.path.insert(0, str(ROOT))  # where processes of environments find this file


class Slow(TableTask):
    """A table whose steps take longer, for all episodes that step together."""

    def __init__(self, num: int, *, work_ms: float = 0.0, wait_ms: float = 0.0) -> None:
        """Make room for episodes; times are those of a step of one episode."""
        super().__init__(num, max_steps=16)
        self._work_s, self._wait_s = work_ms / 1000, wait_ms / 1000

    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        """See `VectorEnvironment`."""
        num = len(which) * actions.shape[1]
        until_s = time.thread_time() + self._work_s * num
        while time.thread_time() < until_s:
            pass
        time.sleep(self._wait_s * num)
        return super().step(which, actions)


class Lockstep(ProcessVectorEnvs):
    """Processes whose environments all step together."""

    def halves(self) -> Sequence[Sequence[int]]:
        """See `VectorEnvs`."""
        return [[slot for half in super().halves() for slot in half]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, int]] = {}
    for name, slow in {"table": {}, "work of 0.2 ms": {"work_ms": 0.2}, "wait of 0.2 ms": {"wait_ms": 0.2}}.items():
        table[name] = measure(slow, options.rounds)
        print(name, table[name], flush=True)
    options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def measure(slow: Mapping[str, float], rounds: int) -> dict[str, int]:
    """Median steps per second of each way, by its name."""

    def config(processes: int) -> BodyConfig:
        return BodyConfig(
            type="benchmarks.halves:Slow", options=dict(slow), num_environments=NUM, processes=processes, max_steps=16
        )

    policy = Cnn(spaces_of(config(0)), chunk=2).eval().requires_grad_(False)
    ways: dict[str, Callable[[], VectorEnvs]] = {"in the rank": lambda: open_worlds(config(0), 2)}
    for count in (1, 2):
        ways[f"lockstep, {count}"] = lambda count=count: Lockstep(config(count), 2)  # type: ignore[misc]
        ways[f"halves, {count}"] = lambda count=count: ProcessVectorEnvs(config(count), 2)  # type: ignore[misc]
    engines = {name: BodyEngine(policy, open_one, torch.device("cpu")) for name, open_one in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            rate = steps_per_second(engine, policy)
            if number:  # processes start in the first round
                rates[name].append(rate)
    for engine in engines.values():
        engine.close()
    return {name: round(median(found)) for name, found in rates.items()}


def steps_per_second(engine: BodyEngine, policy: BodyPolicy) -> float:
    assert policy.chunk
    tasks = [BodyTask(number, {}, number) for number in range(EPISODES)]
    begin = time.perf_counter()
    episodes = engine.play(tasks, seed=0, temperature=1.0, progress=lambda _: None, clock=Clock())
    return sum(sum(one.num_steps) for one in episodes) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
