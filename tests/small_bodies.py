"""A small environment and small models of bodies, as a user would write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leaderless.cli.demonstrate import played
from leaderless.config import Recipe
from leaderless.data.demonstrations import EPISODES_FILE, Recorder
from leaderless.environments.bodies.protocol import Continuous, Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.protocol import Task
from leaderless.policies.protocol import Acted, BodyPolicy, BodyValue, Observed, Scores
from leaderless.workflow import load_recipe

BINS = 5
MODULE = "tests.small_bodies"


class Line(VectorEnvironment):
    """A point on a line that has to come to 0; the picture is one row of pixels, white where it is."""

    def __init__(self, num: int, *, max_steps: int = 6, fails_at: float | None = None) -> None:
        self.spaces = Spaces({"top": (1, 8)}, 2, Continuous((-1.0,), (1.0,)), max_steps, has_instructions=True)
        self.fails_at = fails_at
        self.place, self.steps = np.zeros(num, np.float32), np.zeros(num, np.int64)

    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:  # noqa: ARG002
        for row, seed in zip(which, seeds, strict=True):
            self.place[row] = np.random.default_rng(seed).uniform(-2, 2)
            if self.fails_at is not None and self.place[row] > self.fails_at:
                raise RuntimeError("the line is broken there")
            self.steps[row] = 0
        return self._seen(which)

    def _seen(self, which: Sequence[int]) -> Observations:
        image = np.zeros((len(which), 1, 8, 3), np.uint8)
        image[np.arange(len(which)), 0, np.clip((self.place[list(which)] + 2) * 2, 0, 7).astype(int)] = 255
        state = np.stack([self.place[list(which)], self.steps[list(which)] / 10], axis=1).astype(np.float32)
        return Observations({"top": image}, state, ("go to the middle",) * len(which))

    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        n, chunk = actions.shape[:2]
        rewards, count = np.zeros((n, chunk), np.float32), np.zeros(n, np.int64)
        done, cut = np.zeros(n, bool), np.zeros(n, bool)
        for row, number in enumerate(which):
            for place in range(chunk):
                self.place[number] += np.float32(np.clip(actions[row, place, 0], -1, 1))
                self.steps[number] += 1
                count[row] += 1
                done[row] = abs(self.place[number]) < 0.3
                rewards[row, place] = float(done[row])
                cut[row] = not done[row] and self.steps[number] >= self.spaces.max_steps
                if done[row] or cut[row]:
                    break
        return Steps(self._seen(which), rewards, count, done, cut, done.copy())

    def save(self, which: Sequence[int]) -> list[bytes]:
        return [struct.pack("<fq", self.place[one], self.steps[one]) for one in which]

    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        for one, state in zip(which, states, strict=True):
            self.place[one], self.steps[one] = struct.unpack("<fq", state)
        return self._seen(which)

    def expert(self, which: Sequence[int]) -> NDArray[np.generic]:
        return np.clip(-self.place[list(which)], -1, 1)[:, None].astype(np.float32)


def _features(observed: Observed) -> Tensor:
    pixels = observed.images["top"].flatten(1).float() / 255
    return torch.cat([observed.state, pixels, observed.instructions[1][:, None] / 16], dim=1)


class Bins(BodyPolicy):
    """Each number of an action is one of five."""

    def __init__(self, spaces: Spaces, *, chunk: int = 2, hidden_size: int = 16) -> None:
        super().__init__()
        self.spaces, self.chunk = spaces, chunk
        self.score_dim, self.choice_size, self.noise_size = 1, chunk, chunk
        self.inner, self.head = nn.Linear(2 + 24 + 1, hidden_size), nn.Linear(hidden_size, chunk * BINS)

    def _logits(self, observed: Observed, temperature: float) -> Tensor:
        hidden = torch.tanh(self.inner(_features(observed)))
        return (self.head(hidden).view(-1, self.chunk, BINS) / temperature).log_softmax(-1)

    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        logits = self._logits(observed, temperature)
        if noise is None:
            choices = logits.argmax(-1)
        else:
            choices = (logits.double().exp().cumsum(-1) < noise[..., None]).sum(-1).clamp(max=BINS - 1)
        log_probs = logits.gather(-1, choices[..., None])
        return Acted(self.actions_of(choices.float()), choices.float(), log_probs)

    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> Scores:
        logits = self._logits(observed, temperature)
        entropies = -(logits.exp() * logits).sum(-1, keepdim=True)
        return Scores(logits.gather(-1, choices.long()[..., None]), entropies)

    def actions_of(self, choices: Tensor) -> Tensor:
        return (choices / (BINS - 1) * 2 - 1)[..., None]

    def choices_of(self, actions: Tensor) -> Tensor:
        if bool((actions.abs() > 1).any()):
            raise ValueError(f"an action of {float(actions.abs().max())} is outside of -1 to 1")
        return ((actions[..., 0] + 1) / 2 * (BINS - 1)).round()


class Worth(BodyValue):
    """A critic of the same."""

    def __init__(self, spaces: Spaces, *, chunk: int = 2, hidden_size: int = 16) -> None:
        super().__init__()
        self.spaces, self.chunk = spaces, chunk
        self.inner, self.head = nn.Linear(2 + 24 + 1, hidden_size), nn.Linear(hidden_size, 1)

    def values(self, observed: Observed) -> Tensor:
        return self.head(torch.tanh(self.inner(_features(observed))))[:, 0]


def settings_of(folder: Path, *, workflow: str = "grpo", **changes: object) -> dict[str, object]:
    """Settings of a small run in a folder, with tasks, and with demonstrations if they are to be imitated."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"task": number}) + "\n" for number in range(64)))
    (folder / "held-out.jsonl").write_text("".join(json.dumps({"seed": 1000 + one}) + "\n" for one in range(32)))
    train, body = folder / "tasks.jsonl", {"type": f"{MODULE}:Line", "num_environments": 8, "max_steps": 6}
    if workflow == "imitation":
        train, body = folder / "demonstrations" / EPISODES_FILE, {**body, "demonstrations": f"{folder}/demonstrations"}
        with Recorder(folder / "demonstrations") as recorder:
            for (_, episode), _ in zip(played(Line(64), 0), range(16), strict=False):
                recorder.add(episode)
    critic = {"critic": {"body": f"{MODULE}:Worth"}} if workflow == "ppo" else {}
    settings: dict[str, object] = {
        "name": "line",
        "workflow": workflow,
        "models": {"policy": {"body": f"{MODULE}:Bins"}, **critic},
        "body": body,
        "data": {"train": {"path": str(train)}, "evaluation": {"path": str(folder / "held-out.jsonl")}},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "micro_batch_tokens": 1024},
        "optimizer": {"learning_rate": 1e-2},
        "run": {"directory": str(folder / "runs"), "recorded_prompts": 2},
        "steps": 4,
    }
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = settings
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        own = inner.get(name)
        inner[name] = {**own, **value} if isinstance(own, dict) and isinstance(value, Mapping) else value
    return settings


def body_recipe(folder: Path, *, workflow: str = "grpo", **changes: object) -> Recipe:
    """The recipe of `settings_of`, which is written into the folder, too."""
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(settings_of(folder, workflow=workflow, **changes)))
    return load_recipe(str(file), []).recipe
