"""Sizes on which the memory of a model of a body depends, and their measurement: such models have no fixed families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from leaderless.algorithms.settings import SacConfig
from leaderless.base.named_functions import load_callable
from leaderless.config.environment import BodyConfig
from leaderless.config.models import ModelConfig

MEASURED = "leaderless.embodied.policies.policy_size"
"""Module whose functions measure a model that is made without numbers."""


@dataclass(frozen=True)
class BodySize:
    """Sizes of a model of a body.

    Attributes:
        num_parameters: Weights.
        num_trained: Weights with a gradient.
        num_root: Weights that are gathered for the whole of a pass.
        num_layer: Weights of the largest layer, of those that are gathered one by one; 0 without such layers.
        trained_bytes: Bytes at the fullest moment of a forward and backward pass, for each decision, without gradients
            of weights.
        scored_bytes: Bytes at the fullest moment of a pass without gradients, for each decision.
        chunk: Steps of a decision.
        num_units: Log-probabilities of a decision, at most.
        frame_bytes: Bytes of an observation: its images and its state.
        choice_bytes: Bytes of what says what was chosen.
    """

    num_parameters: int
    num_trained: int
    num_root: int
    num_layer: int
    trained_bytes: int
    scored_bytes: int
    chunk: int
    num_units: int
    frame_bytes: int
    choice_bytes: int


@dataclass(frozen=True)
class LearnerSize:
    """Sizes of what SAC learns with, next to its policy.

    Attributes:
        num_critics: Weights of the critics.
        trained_bytes: Bytes at the fullest moment of an update, for each transition, without gradients of weights.
    """

    num_critics: int
    trained_bytes: int


def measure_body(model: ModelConfig, key: str, body: BodyConfig, *, is_critic: bool) -> BodySize:
    """Measure a model for an environment.

    Args:
        model: Settings of the model.
        key: Setting of the model, for errors.
        body: Settings of the environment, which is opened once.
        is_critic: Whether it is a value model.

    Raises:
        RecipeError: One of them cannot be made.
        NotImplementedError: What the model computes depends on numbers that are not there.
    """
    measure = load_callable(f"{MEASURED}:measure_body", key, "function")
    return cast("BodySize", measure(model, key, body, is_critic=is_critic))


def measure_learner(model: ModelConfig, key: str, body: BodyConfig, sac: SacConfig) -> LearnerSize:
    """Measure the critics of a policy; errors as in `measure_body`."""
    return cast("LearnerSize", load_callable(f"{MEASURED}:measure_learner", key, "function")(model, key, body, sac))
