"""Losses of the Tinker API: a number for each token, whose sum over all sequences of a request is the loss.

Source: https://tinker-docs.thinkingmachines.ai/losses. Nothing is averaged: clients put denominators into weights and
advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms.losses.ppo import clipped_policy_loss
from leaderless.algorithms.packed import log_ratio_of, ratio_of

Settings = Mapping[str, float]
Inputs = Mapping[str, Tensor]
"""Tensors of a loss by name, [R] float32 each."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss of the API.

    Attributes:
        inputs: Names of its inputs, besides `target_tokens`.
        defaults: Its settings, with their defaults.
        compute: Function of log-probabilities, [R] float32 with gradient, inputs and settings; returns [R].
    """

    inputs: tuple[str, ...]
    defaults: Settings
    compute: Callable[[Tensor, Inputs, Settings], Tensor]

    def settings(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """All settings, of which a client has given some.

        Raises:
            ValueError: There is no such setting, or it is no number.
        """
        for name, value in given.items():
            if name not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                raise ValueError(f"loss_fn_config has '{name}', but this loss has the settings: {known}")
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"loss_fn_config['{name}'] is {value!r}: give a number")
        return {**self.defaults, **{name: float(value) for name, value in given.items()}}


def cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:  # noqa: ARG001
    """The weighted negative log-probability: -w log p."""
    return -log_probs * inputs["weights"]


def importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:  # noqa: ARG001
    """The policy gradient with the ratio to the sampling policy: -p / q A."""
    return -ratio_of(log_ratio_of(log_probs, inputs["logprobs"])) * inputs["advantages"]


def ppo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The clipped ratio, for each token: -min(r A, clip(r) A)."""
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    log_ratio = log_ratio_of(log_probs, inputs["logprobs"])
    return clipped_policy_loss(log_ratio, inputs["advantages"], clip_low=1 - low, clip_high=high - 1).loss


def cispo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The policy gradient weighted by the clipped ratio without gradient: -sg[clip(r)] A log p."""
    ratio = ratio_of(log_ratio_of(log_probs, inputs["logprobs"])).detach()
    weight = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -weight * inputs["advantages"] * log_probs


def dro(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Direct reward optimization: -(A log p - beta / 2 (log p - log q)^2)."""
    squares = log_ratio_of(log_probs, inputs["logprobs"]).square()
    return -(log_probs * inputs["advantages"] - settings["beta"] / 2 * squares)


_OF_SAMPLES = ("logprobs", "advantages")
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(("weights",), {}, cross_entropy),
    "importance_sampling": TokenLoss(_OF_SAMPLES, {}, importance_sampling),
    "ppo": TokenLoss(_OF_SAMPLES, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, ppo),
    "cispo": TokenLoss(_OF_SAMPLES, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, cispo),
    "dro": TokenLoss(_OF_SAMPLES, {"beta": 0.05}, dro),
}
"""Losses by name. A loss of the client's own is `cross_entropy` with weights that the client computes."""


def loss_of(name: str) -> TokenLoss:
    """The loss with a name.

    Raises:
        ValueError: There is none.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn='{name}' is not offered here: use one of {', '.join(LOSSES)}, or a custom loss")
    return LOSSES[name]


def total(losses: Tensor) -> float:
    """The sum of losses, in double precision."""
    return float(losses.detach().to(torch.float64).sum())
