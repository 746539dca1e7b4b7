"""Reinforcement learning in a program of your own, on a server that trains: additions, as in the quickstart.

    leaderless serve runs/quickstart-base --train --port 8010
    python examples/training_service/additions.py http://127.0.0.1:8010

The program runs anywhere, and needs no accelerator: it has the tasks and the reward, and `tinker` is its only package.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tinker
from tinker import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, TensorData, TrainingClient

PROMPTS, RESPONSES, MAX_TOKENS = 32, 16, 6


class Task(NamedTuple):
    """An addition: the tokens of the question, and the answer."""

    prompt: list[int]
    answer: str


class Addition:
    """Tasks, and how a response is graded."""

    def __init__(self, file: Path, model: TrainingClient) -> None:
        self._tokenizer = model.get_tokenizer()
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        self.tasks = [Task(self._tokenizer.encode(row["question"]), row["answer"]) for row in rows]

    def reward(self, tokens: Sequence[int], task: Task) -> float:
        """1 for the right sum, else 0."""
        return float(self._tokenizer.decode(tokens, skip_special_tokens=True) == task.answer)


def accuracy(sampler: SamplingClient, held_out: Addition) -> float:
    """Share of tasks that are solved with the most likely tokens."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    futures = [sampler.sample(ModelInput.from_ints(task.prompt), 1, params) for task in held_out.tasks]
    rewards = [
        held_out.reward(future.result().sequences[0].tokens, task)
        for future, task in zip(futures, held_out.tasks, strict=True)
    ]
    return sum(rewards) / len(rewards)


def trajectories(sampler: SamplingClient, additions: Addition, tasks: Sequence[Task], seed: int) -> list[Datum]:
    """Sampled responses whose reward differs from the mean of their siblings', for the policy gradient."""
    futures = [
        sampler.sample(
            ModelInput.from_ints(task.prompt),
            RESPONSES,
            SamplingParams(max_tokens=MAX_TOKENS, seed=seed * 1000 + place),
        )
        for place, task in enumerate(tasks)
    ]
    data: list[Datum] = []
    for future, task in zip(futures, tasks, strict=True):
        sequences = future.result().sequences
        rewards = [additions.reward(one.tokens, task) for one in sequences]
        mean = sum(rewards) / len(rewards)
        for one, reward in zip(sequences, rewards, strict=True):
            if reward != mean:
                before, advantage = len(task.prompt) - 1, (reward - mean) / (PROMPTS * RESPONSES)
                whole, count = [*task.prompt, *one.tokens], len(one.tokens)
                inputs = {
                    "target_tokens": TensorData(data=whole[1:], dtype="int64"),
                    "logprobs": TensorData(data=[0.0] * before + [*(one.logprobs or [])], dtype="float32"),
                    "advantages": TensorData(data=[0.0] * before + [advantage] * count, dtype="float32"),
                }
                data.append(Datum(model_input=ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs))
    return data


def improve(model: TrainingClient, data: list[Datum], learning_rate: float) -> float:
    """Take a step of policy gradient; returns the loss. Both requests are sent before the first one has ended."""
    passed = model.forward_backward(data, "importance_sampling")
    stepped = model.optim_step(AdamParams(learning_rate=learning_rate, beta2=0.99, grad_clip_norm=1.0))
    stepped.result()
    return passed.result().metrics["loss:sum"]


def learn(url: str, folder: Path, steps: int, every: int, learning_rate: float = 2e-3) -> list[float]:
    """Train adapters on a server, and print and return the accuracy on held-out tasks at first and now and then."""
    service = tinker.ServiceClient(base_url=url, api_key=os.environ.get("TINKER_API_KEY", "tml-none"))
    base = tinker.RestClient(base_url=url, api_key=os.environ.get("TINKER_API_KEY", "tml-none"))
    name = base.get_server_capabilities().result().supported_models[0].model_name
    assert name is not None
    model = service.create_lora_training_client(name, rank=16, seed=0).result()
    train, held_out = Addition(folder / "train.jsonl", model), Addition(folder / "test.jsonl", model)
    curve: list[float] = []
    for step in range(steps + 1):
        sampler = model.save_weights_and_get_sampling_client().result()
        if step % every == 0:
            curve.append(accuracy(sampler, held_out))
            print(f"step {step}: {curve[-1]:.1%} of held-out sums are right", flush=True)
        if step == steps:
            break
        first = step * PROMPTS % len(train.tasks)
        data = trajectories(sampler, train, train.tasks[first : first + PROMPTS], step)
        if data:
            improve(model, data, learning_rate)
    print("saved as", model.save_state("learned").result().path)
    service.close("success").result()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart-data"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10)
    given = parser.parse_args()
    learn(given.url, given.data, given.steps, given.every)
