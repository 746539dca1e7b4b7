"""Small models of bodies, as a user would write them, and recipes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from tests.small_worlds import Line
from torch import Tensor, nn

from leaderless.config import Recipe
from leaderless.embodied.data.lerobot import EPISODES_FILE, DemonstrationWriter
from leaderless.embodied.policies.protocol import Acted, BodyPolicy, BodyValue, DecisionScores, Observed
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.embodied.simulators.scripted_expert import played
from leaderless.planner.workflow import load_recipe

BINS = 5
MODULE, WORLD = "tests.small_bodies", "tests.small_worlds"


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

    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        logits = self._logits(observed, temperature)
        entropies = -(logits.exp() * logits).sum(-1, keepdim=True)
        return DecisionScores(logits.gather(-1, choices.long()[..., None]), entropies)

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
    train, body = folder / "tasks.jsonl", {"type": f"{WORLD}:Line", "num_environments": 8, "max_steps": 6}
    if workflow == "imitation":
        train, body = folder / "demonstrations" / EPISODES_FILE, {**body, "demonstrations": f"{folder}/demonstrations"}
        with DemonstrationWriter(folder / "demonstrations") as recorder:
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
        "loggers": [],
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
