"""Writes torchrl_gae.json: advantages of several agents by torchrl, an independent implementation.

    pip install torchrl==0.14.1
    python tests/unit/algorithms/torchrl_gae.py

torchrl has one time axis; the turns of all agents are put on it in the order in which they were taken, play after play,
with `done` at the end of each. Its estimator of several agents has one value for each agent and step, and gives all
agents the same reward; it agrees with a chain from agent to agent where nothing is discounted.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
from tensordict import TensorDict
from torchrl.objectives.value import MultiAgentGAE
from torchrl.objectives.value.functional import generalized_advantage_estimate

FILE = Path(__file__).with_suffix(".json")
Turns = list[tuple[int, int, list[float], list[float]]]
"""Play, agent, rewards and values of the tokens, in the order of the turns."""


def random_turns(random: Random, num_plays: int, num_agents: int) -> Turns:
    """Plays of up to five turns of up to four tokens each, by any agents."""
    numbers = [[round(random.gauss(0, 1), 2) for _ in range(8)] for _ in range(num_plays * 5)]
    return [
        (play, random.randrange(num_agents), some[:4][:size], some[4:][:size])
        for play in range(num_plays)
        for some, size in zip(numbers[play * 5 :][: random.randint(1, 5)], (3, 1, 4, 2, 2), strict=False)
    ]


def chain(turns: Turns, level: str, turn_discount: float, token_discount: float, decay: float) -> dict[str, object]:
    """Advantages and returns of each step of the chain: of each turn, or of each token."""
    rewards: list[float] = []
    values: list[float] = []
    discounts: list[float] = []
    is_last: list[bool] = []
    for place, (play, _, gains, known) in enumerate(turns):
        rewards += gains if level == "token" else [sum(gains)]
        values += known if level == "token" else known[:1]
        num_more = len(gains) - 1 if level == "token" else 0
        is_end = place + 1 == len(turns) or turns[place + 1][0] != play
        discounts += [token_discount] * num_more + [turn_discount]
        is_last += [False] * num_more + [is_end]
    state, reward, gamma = (torch.tensor(some, dtype=torch.float64)[:, None] for some in (values, rewards, discounts))
    following = torch.cat([state[1:], state.new_full((1, 1), 7.0)])  # behind the last one it must not matter
    done = torch.tensor(is_last)[:, None]
    found = generalized_advantage_estimate(gamma, decay, state, following, reward, done)
    advantages, returns = (some.squeeze(1).tolist() for some in found)
    settings = {"level": level, "turn_discount": turn_discount, "token_discount": token_discount, "decay": decay}
    return {"turns": turns, "settings": settings, "advantages": advantages, "returns": returns}


def team(random: Random, num_steps: int, num_agents: int) -> dict[str, object]:
    """Two plays in which all agents act in each step, the last of which is rewarded."""
    values = [[[round(random.gauss(0, 1), 2) for _ in range(num_agents)] for _ in range(num_steps)] for _ in range(2)]
    rewards = [[round(random.gauss(0, 1), 2) for _ in range(num_steps)] for _ in range(2)]
    state, reward = torch.tensor(values).double()[..., None], torch.tensor(rewards).double()[..., None]
    done = torch.zeros_like(reward, dtype=torch.bool)
    done[:, -1] = True
    following = torch.cat([state[:, 1:], torch.zeros_like(state[:, :1])], dim=1)
    batch = TensorDict({"state_value": state, "done": done, "terminated": done, "reward": reward}, [2, num_steps])
    result: dict[str, object] = {"values": values, "rewards": rewards}
    for name, is_normalized in (("advantages", False), ("whitened", True)):
        estimate = MultiAgentGAE(gamma=1.0, lmbda=1.0, value_network=None, average_gae=is_normalized)
        given = batch.clone()
        given["next"] = TensorDict(
            {"state_value": following, "done": done, "terminated": done, "reward": reward}, [2, num_steps]
        )
        result[name] = estimate(given)["advantage"].squeeze(-1).tolist()
    return result


def main() -> None:
    random = Random(0)
    settings = [("token", 1.0, 1.0, 1.0), ("token", 0.9, 0.97, 0.8), ("token", 0.5, 1.0, 0.0)]
    settings += [("action", 0.9, 1.0, 0.7), ("action", 1.0, 1.0, 0.95)]
    cases = [chain(random_turns(random, 4, 3), *some) for some in settings]
    versions = {name: version(name) for name in ("torchrl", "torch")}
    content = {"versions": versions, "chains": cases, "team": team(random, 3, 2)}
    FILE.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
