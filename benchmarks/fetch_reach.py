"""PPO on FetchReach with its dense reward: this package and Stable-Baselines3, in turns, on the same cores.

    .venv-bodies/bin/python -m pip install stable-baselines3
    .venv-bodies/bin/python benchmarks/fetch_reach.py --turns 3          # speed
    .venv-bodies/bin/python benchmarks/fetch_reach.py --race 0 1 2       # steps and seconds to 95 % success

Both have the network, rows and updates of recipes/robots/fetch_reach.yaml: two hidden layers of 64,
1,600 steps for 32 updates of 400 rows in 8 epochs, gamma 0.95, lambda 0.9, learning rate 1e-3. This package has two
processes with 8 environments each, Stable-Baselines3 a process for each of two or of 16 environments; in a race it
has 16, so that both learn from 32 whole episodes at a time.
Success is that the goal was reached at some step of an episode, by the likeliest actions, in the same 64 held-out
episodes. A race takes turns, seed by seed, and the one that begins alternates. Starts and evaluations are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from until import has_reached, train_until

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/fetch_reach.json"
RECIPE = ROOT / "recipes/robots/fetch_reach.yaml"
STEP = 1600
"""Steps of the environment between updates."""
HELD_OUT = 64
TARGET, ITERATIONS, EVERY = 0.95, 24, 2
"""Success at which a race ends, its most iterations, and iterations between evaluations."""
Curve = list[tuple[int, float, float]]
"""Steps of the environment, seconds of training, and success, by evaluation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=0, help="comparisons of speed")
    parser.add_argument("--iterations", type=int, default=4, help="iterations of each, of which the first is left out")
    parser.add_argument("--race", type=int, nargs="*", default=[], help="seeds with which both learn to 95 %% success")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    for _ in range(options.turns):
        turn = {"leaderless": ours(options.iterations)}
        turn |= {f"sb3_{num}": theirs(num, options.iterations) for num in (2, 16)}
        print(json.dumps(turn), flush=True)
        table.setdefault("steps_per_second", []).append(turn)
        options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for number, seed in enumerate(options.race):
        racers = {"leaderless": our_race, "sb3_16": their_race}
        for name in list(racers)[:: -1 if number % 2 else 1]:
            curve = racers[name](seed)
            print(seed, name, curve, flush=True)
            table.setdefault("race", {}).setdefault(name, {})[str(seed)] = curve
        options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def ours(iterations: int) -> float:
    """Steps of the environment per second, updates included."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={iterations}", "evaluation.every_steps=0", f"run.directory={folder}", "name=one"]
        command = [sys.executable, "-m", "leaderless", "train", str(RECIPE), *settings]
        # One thread, as there: with more, threads of torch wait for cores that environments use.
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=one_thread)
        lines = (Path(folder) / "one/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [row["time/step"] for row in map(json.loads, lines) if row["step"] > 1]
    return round(STEP * len(seconds) / sum(seconds), 1)


def model_of(num: int, seed: int):  # noqa: ANN201
    """PPO of Stable-Baselines3 with as many environments, each in a process of its own."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv

    torch.set_num_threads(1)
    worlds = SubprocVecEnv([their_fetch] * num)
    model = PPO(
        "MultiInputPolicy",
        worlds,
        n_steps=STEP // num,
        batch_size=STEP // 4,
        n_epochs=8,
        gamma=0.95,
        gae_lambda=0.9,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        policy_kwargs={"log_std_init": -0.69, "net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    return model, worlds


def theirs(num: int, iterations: int) -> float:
    """The same of Stable-Baselines3."""
    model, worlds = model_of(num, 0)
    model.learn(STEP)
    begin = time.perf_counter()
    model.learn(STEP * (iterations - 1), reset_num_timesteps=False)
    rate = STEP * (iterations - 1) / (time.perf_counter() - begin)
    worlds.close()
    return round(rate, 1)


def our_race(seed: int) -> Curve:
    """How this package learns, until the target or the last iteration."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs/race"
        settings = {
            "name": run.name,
            "seed": seed,
            "steps": ITERATIONS,
            "evaluation.every_steps": EVERY,
            "checkpoint.every_steps": 0,
            "data.train.path": RECIPE.parent / "tasks.jsonl",
            "data.evaluation.path": RECIPE.parent / "held_out.jsonl",
        }
        changes = [f"{name}={value}" for name, value in settings.items()]
        rows = train_until(str(RECIPE), changes, run, has_reached(TARGET))
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("time/step", 0.0)
        if "evaluation/mean@1" in row:
            curve.append((STEP * int(row["step"]), round(seconds, 1), row["evaluation/mean@1"]))
    return curve


def their_race(seed: int) -> Curve:
    """How Stable-Baselines3 learns, until the target or the last iteration."""
    model, worlds = model_of(16, seed)
    judge = their_fetch()
    curve, seconds = [(0, 0.0, success_of(model, judge))], 0.0
    while curve[-1][0] < STEP * ITERATIONS and curve[-1][2] < TARGET:
        begin = time.perf_counter()
        model.learn(STEP * EVERY, reset_num_timesteps=False)
        seconds += time.perf_counter() - begin
        curve.append((curve[-1][0] + STEP * EVERY, round(seconds, 1), success_of(model, judge)))
    worlds.close()
    return curve


def success_of(model, judge) -> float:  # noqa: ANN001
    """Share of held-out episodes in which a policy of Stable-Baselines3 reaches the goal."""
    done = 0
    for episode in range(HELD_OUT):
        seen, _ = judge.reset(seed=1_000_000 + episode)
        is_over = False
        while not is_over:
            action, _ = model.predict(seen, deterministic=True)
            seen, _, is_terminated, is_truncated, info = judge.step(action)
            is_over = is_terminated or is_truncated or bool(info["is_success"])
        done += bool(info["is_success"])
    return done / HELD_OUT


def their_fetch():  # noqa: ANN201
    """The environment as Stable-Baselines3 gets it, in a process of its own."""
    import gymnasium
    import gymnasium_robotics
    from stable_baselines3.common.monitor import Monitor

    gymnasium.register_envs(gymnasium_robotics)
    return Monitor(gymnasium.make("FetchReachDense-v4"))


if __name__ == "__main__":
    main()
