"""The stage that makes samples of demonstrations: each step, with the actions that follow it, is a decision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.embodied.data.lerobot import Demonstration, Demonstrations
from leaderless.embodied.policies.observations import frame_bytes
from leaderless.embodied.policies.protocol import BodyPolicy
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.training.decision_units import DecisionUnits
from leaderless.embodied.training.policy_engine import BodyPolicyEngine
from leaderless.stages.context import StageContext

NUMBER = "episode_index"
"""Column of the dataset that says which demonstration a row stands for."""


def demonstrations(batch: Batch, context: StageContext) -> Batch:
    """Add what was seen and done in the demonstrations that rows stand for.

    Raises:
        RecipeError: A row names none, or one does not fit the environment.
    """
    config = context.recipe.body
    assert config is not None
    assert config.demonstrations is not None
    policy = cast("BodyPolicyEngine", context.role.train_engine).policy
    folder = open_demonstrations(config.demonstrations, policy.spaces)
    read = [_read(folder, row) for row in batch.objects("rows")]
    lengths = torch.tensor([len(one.actions) for one in read], dtype=torch.int64)
    executed = [[min(policy.chunk, length - step) for step in range(length)] for length in lengths.tolist()]
    units = DecisionUnits.of(config.log_prob, executed, policy.score_dim)
    seen = lengths + 1  # the last observation stands for the end, which demonstrations do not show
    pixels = [torch.zeros(0, frame_bytes(policy.spaces), dtype=torch.uint8), *map(_pixels, read)]
    states = [torch.zeros(0, policy.spaces.state_size), *(_with_end(torch.from_numpy(one.states)) for one in read)]
    choices = [torch.zeros(0, policy.choice_size), *(_choices(one, policy, folder) for one in read)]
    instructions = [policy.instruction_ids(one.instruction) or [0] for one in read]
    return batch.with_columns(
        {
            "prompt_tokens": Jagged.from_lists(instructions, torch.int64, "prompt_tokens"),
            "tokens": Jagged(units.places, units.lengths, "tokens"),
            "response_mask": Jagged(torch.ones(len(units.places), dtype=torch.bool), units.lengths, "tokens"),
            "frames": Jagged(torch.cat(pixels), seen, "observations"),
            "states": Jagged(torch.cat(states), seen, "observations"),
            "choices": Jagged(torch.cat(choices), lengths, "decisions"),
            "turns": Jagged(units.turns.int(), units.lengths, "response_tokens"),
        }
    )


_opened = cache(Demonstrations)


def open_demonstrations(path: str, spaces: Spaces) -> Demonstrations:
    """Open a folder of demonstrations in an environment.

    Raises:
        RecipeError: It cannot be read, or its cameras, its state or its actions differ from the environment's.
    """
    key = "body.demonstrations"
    try:
        folder = _opened(Path(path))
    except ValueError as error:
        raise RecipeError.at(key, str(error)) from error
    if dict(folder.cameras) != dict(spaces.images):
        raise RecipeError.at(
            key,
            f"{path} has the cameras {dict(folder.cameras)}, but the environment {dict(spaces.images)} (height and "
            "width): record them with the options of this environment",
        )
    dim = spaces.actions.dim if isinstance(spaces.actions, Continuous) else 1
    if (folder.state_size, folder.action_size) != (spaces.state_size, dim):
        raise RecipeError.at(
            key,
            f"{path} has {folder.state_size} numbers in a state and {folder.action_size} in an action, but the "
            f"environment {spaces.state_size} and {dim}: record them with this environment and its options",
        )
    return folder


def _read(folder: Demonstrations, row: Json) -> Demonstration:
    number = row.get(NUMBER) if isinstance(row, Mapping) else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise RecipeError.at(
            "data.train.path",
            f"a row has no whole number as '{NUMBER}': let it be {folder.list_path}",
        )
    try:
        return folder.read(number)
    except ValueError as error:
        raise RecipeError.at("body.demonstrations", str(error)) from error


def _choices(one: Demonstration, policy: BodyPolicy, folder: Demonstrations) -> Tensor:
    """The actions that follow each step, [T, choice_size], as the policy would choose them.

    At the end the last one comes again, where it has no unit.
    """
    index = np.minimum(np.arange(len(one.actions))[:, None] + np.arange(policy.chunk), len(one.actions) - 1)
    try:
        return policy.choices_of(torch.from_numpy(np.ascontiguousarray(one.actions[index])))
    except ValueError as error:
        raise RecipeError.at("body.demonstrations", f"{folder.folder}: {error}") from error


def _pixels(one: Demonstration) -> Tensor:
    """All cameras before each step, [T + 1, bytes] uint8."""
    parts = [image.reshape(len(image), -1) for image in one.images.values()]
    flat = np.concatenate(parts, axis=1) if parts else np.zeros((len(one.actions), 0), dtype=np.uint8)
    return _with_end(torch.from_numpy(flat))


def _with_end(values: Tensor) -> Tensor:
    return torch.cat([values, values[-1:]])
