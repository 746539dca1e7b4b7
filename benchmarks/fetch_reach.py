"""PPO on FetchReach with its dense reward: this package and Stable-Baselines3, in turns, on the same cores.

    .venv-bodies/bin/python -m pip install stable-baselines3
    .venv-bodies/bin/python benchmarks/fetch_reach.py --turns 3          # speed
    .venv-bodies/bin/python benchmarks/fetch_reach.py --learn            # success by steps of the environment

Both have the network, rows and updates of recipes/robots/fetch_reach.yaml: two hidden layers of 64,
1,600 steps for 32 updates of 400 rows in 8 epochs, gamma 0.95, lambda 0.9, learning rate 1e-3. This package has two
processes with 8 environments each, Stable-Baselines3 a process for each of two or of 16 environments.
Success is that the goal was reached at some step of an episode, by the likeliest actions, in 64 held-out episodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/fetch_reach.json"
RECIPE = ROOT / "recipes/robots/fetch_reach.yaml"
STEP = 1600
"""Steps of the environment between updates."""
HELD_OUT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=0, help="comparisons of speed")
    parser.add_argument("--iterations", type=int, default=4, help="iterations of each, of which the first is left out")
    parser.add_argument("--learn", action="store_true", help="let Stable-Baselines3 learn, and evaluate it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    for _ in range(options.turns):
        turn = {"leaderless": ours(options.iterations)}
        turn |= {f"sb3_{num}": theirs(num, options.iterations) for num in (2, 16)}
        print(json.dumps(turn), flush=True)
        table.setdefault("steps_per_second", []).append(turn)
        options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if options.learn:
        curve = learn(options.seed)
        table.setdefault("sb3_success", {})[str(options.seed)] = curve
        options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def ours(iterations: int) -> float:
    """Steps of the environment per second, updates included."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={iterations}", "evaluation.every_steps=0", f"run.directory={folder}", "name=one"]
        command = [sys.executable, "-m", "leaderless", "train", str(RECIPE), *settings]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
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


def learn(seed: int, iterations: int = 16, every: int = 4) -> list[tuple[int, float, float]]:
    """Steps, success of held-out episodes, and mean return of the last training episodes."""
    import numpy as np

    model, worlds = model_of(2, seed)
    judge = their_fetch()
    curve: list[tuple[int, float, float]] = []
    for iteration in range(0, iterations + 1, every):
        if iteration:
            model.learn(STEP * every, reset_num_timesteps=False)
        done = 0
        for episode in range(HELD_OUT):
            seen, _ = judge.reset(seed=1_000_000 + episode)
            for _ in range(50):
                action, _ = model.predict(seen, deterministic=True)
                seen, _, _, _, info = judge.step(action)
                if info["is_success"]:
                    done += 1
                    break
        returns = [one["r"] for one in model.ep_info_buffer or []]
        curve.append((iteration * STEP, done / HELD_OUT, float(np.mean(returns)) if returns else float("nan")))
        print(curve[-1], flush=True)
    worlds.close()
    return curve


def their_fetch():  # noqa: ANN201
    """The environment as Stable-Baselines3 gets it, in a process of its own."""
    import gymnasium
    import gymnasium_robotics
    from stable_baselines3.common.monitor import Monitor

    gymnasium.register_envs(gymnasium_robotics)
    return Monitor(gymnasium.make("FetchReachDense-v4"))


if __name__ == "__main__":
    main()
