"""The stages of the soft actor-critic: episodes become transitions that are kept, and the policy learns from those."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from leaderless.algorithms.settings import SacConfig
from leaderless.config import RecipeError
from leaderless.data.batch import Batch, ragged_index
from leaderless.embodied.data.lerobot import Demonstration
from leaderless.embodied.data.replay_buffer import Transitions, record_type
from leaderless.embodied.policies.observations import images_of
from leaderless.embodied.policies.squashed import Squashed
from leaderless.embodied.stages.demonstrations import open_demonstrations
from leaderless.embodied.training.sac_learner import SacEngine
from leaderless.embodied.training.sharded_replay import joined
from leaderless.planner.workflow.columns import TAKEN_COLUMNS
from leaderless.stages.context import StageContext

FOLDER = "transitions"
"""Folder of a run with the transitions of all ranks."""
KEPT = "transitions"
"""Entry of the node that remembers in a checkpoint: the number of transitions after the step."""


def remember(batch: Batch, context: StageContext) -> Batch:
    """Keep the transitions of a step's episodes; those that are there of this step or later ones are dropped.

    Raises:
        RuntimeError: Transitions of earlier steps are missing.
    """
    with context.clock.doing("data"):
        engine = cast("SacEngine", context.role.train_engine)
        memory = engine.open_memory(context.run_directory.path / FOLDER, partial(_demonstrated, context, engine.policy))
        is_mine = torch.tensor(context.node.layout.represents(context.process_group.rank)).expand(len(batch))
        episodes, transitions = lived(batch.select(is_mine), engine.policy)
        memory.remember(context.step, episodes, transitions)
        before = int(context.state.get(KEPT, 0))
        if (found := len(memory) - memory.num_new) != before:
            raise RuntimeError(
                f"{context.run_directory.path / FOLDER} has {found} transitions of the steps before {context.step}, "
                f"but {before} were kept: bring back its files, or begin again with --fresh"
            )
        context.state[KEPT] = len(memory)
        context.metrics.max("sac/transitions", len(memory))
        context.metrics.max("sac/demonstrations", memory.num_demonstrations)
    return batch


def update_sac(batch: Batch, context: StageContext) -> Batch:
    """Improve critics, policy and temperature, as often as the decisions of the step ask for.

    Raises:
        RuntimeError: Nothing has been kept on these ranks.
    """
    engine, config = cast("SacEngine", context.role.train_engine), context.recipe.algorithm.sac
    assert config is not None
    memory = engine.memory
    if memory is None:
        raise RuntimeError("a node that runs 'remember' must come before, with the same role on the same ranks")

    num_updates = num_due(config, len(memory)) - num_due(config, len(memory) - memory.num_new)
    for number in range(num_updates):
        numbers = engine.improve(memory.draw)
        context.progress((number + 1) / num_updates)
        if number == num_updates - 1:
            for name, value in numbers.items():
                context.metrics.max(f"sac/{name}", value)
    context.metrics.max("sac/updates", num_updates)
    return batch


def num_due(config: SacConfig, num_decisions: int) -> int:
    """Updates of the policy from the beginning of the run, for a number of decisions."""
    return int(config.updates_per_decision * max(0, num_decisions + 1 - config.first_decisions))


def lived(batch: Batch, policy: Squashed) -> tuple[NDArray[np.int64], Transitions]:
    """The transitions of episodes, with the number of the episode of each; failed episodes are left out."""
    seen, states = batch.jagged("frames"), batch.jagged("states")
    actions, rewards, steps, helped = (batch.jagged(name) for name in TAKEN_COLUMNS)
    counts, total = actions.lengths, len(steps.values)  # of which there are none where all episodes have failed
    before = ragged_index(seen.offsets[:-1], counts)
    is_last = torch.zeros(int(counts.sum()), dtype=torch.bool)
    is_last[(counts.cumsum(0) - 1)[counts > 0]] = True
    is_cut = batch.dense("truncated").repeat_interleave(counts)
    images, next_images = (
        {name: one.numpy() for name, one in images_of(seen.values[index], policy.spaces).items()}
        for index in (before, before + 1)
    )
    transitions = Transitions(
        images=images,
        state=states.values[before].numpy(),
        next_images=next_images,
        next_state=states.values[before + 1].numpy(),
        actions=actions.values.view(total, policy.chunk, policy.score_dim).numpy(),
        rewards=rewards.values.view(total, policy.chunk).numpy(),
        num_steps=steps.values.numpy(),
        terminated=(is_last & ~is_cut).numpy(),
        truncated=(is_last & is_cut).numpy(),
        intervened=helped.values.view(total, policy.chunk).numpy(),
    )
    return batch.ids.repeat_interleave(counts).numpy(), transitions


def _demonstrated(context: StageContext, policy: Squashed) -> Transitions:
    """The transitions of the recipe's demonstrations."""
    config = context.recipe.body
    assert config is not None
    parts = [no_transitions(policy)]
    if config.demonstrations is not None:
        folder = open_demonstrations(config.demonstrations, policy.spaces)
        for number in range(len(folder)):
            try:
                parts.append(shown(folder.read(number), policy))
            except ValueError as error:
                raise RecipeError.at("body.demonstrations", str(error)) from error
    return joined(parts)


def shown(one: Demonstration, policy: Squashed) -> Transitions:
    """The transitions of a demonstration: from each step, with the actions that follow it.

    Where rewards were not recorded, it ends with success, for a reward of 1. What came after the last step of an
    episode that was cut is not known, so that there are no transitions to it.

    Raises:
        ValueError: It is of another body, or an action is outside of what the environment takes.
    """
    length, chunk = len(one.actions), policy.chunk
    if one.actions.shape[1:] != (policy.score_dim,) or one.states.shape[1] != policy.spaces.state_size:
        raise ValueError(
            f"a demonstration has actions of shape {one.actions.shape[1:]} and states of {one.states.shape[1]} "
            f"numbers, but the environment takes ({policy.score_dim},) and shows {policy.spaces.state_size}: record it "
            "there"
        )
    first = np.arange(length if one.is_terminated else max(0, length - chunk))
    num_steps = np.minimum(chunk, length - first)
    index = np.minimum(first[:, None] + np.arange(chunk), length - 1)
    is_done = np.arange(chunk) < num_steps[:, None]
    actions = one.actions[index].astype(np.float32)
    policy.choices_of(torch.from_numpy(actions))  # refuses what is out of range
    earned = np.eye(1, length, length - 1, dtype=np.float32)[0] if one.rewards is None else one.rewards
    after = np.minimum(first + num_steps, length - 1)
    return Transitions(
        images={camera: images[first] for camera, images in one.images.items()},
        state=one.states[first],
        next_images={camera: images[after] for camera, images in one.images.items()},
        next_state=one.states[after],
        actions=actions * is_done[..., None],
        rewards=(earned[index] * is_done).astype(np.float32),
        num_steps=num_steps,
        terminated=first + num_steps == length if one.is_terminated else np.zeros(len(first), np.bool_),
        truncated=np.zeros(len(first), np.bool_),
        intervened=np.broadcast_to(is_done, (len(first), chunk)).copy(),
    )


def no_transitions(policy: Squashed) -> Transitions:
    """A list of no transitions of a body."""
    record, found = np.zeros(0, record_type(policy.spaces, policy.chunk)), dict[str, object]()
    for kind in ("images", "next_images"):
        found[kind] = {camera: record[f"{kind}/{camera}"] for camera in policy.spaces.images}
    found |= {one.name: record[one.name] for one in fields(Transitions) if one.name not in found}
    return Transitions(**found)  # type: ignore[arg-type]
