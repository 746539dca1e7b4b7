"""Soft actor-critic, and RLPD, its form that learns from demonstrations too: critics, densities and targets."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """Several critics of states and actions with weights of their own, computed together.

    Each layer but the last is followed by layer normalization, which keeps values of actions that were never tried near
    the values of tried ones.

    Source: Ball et al., arXiv 2302.02948, sections 4.2 (layer normalization) and 4.4 (ensembles).
    """

    def __init__(self, num_inputs: int, hidden_size: int, num_layers: int, num_heads: int) -> None:
        """Make critics with random weights; `num_inputs` counts the numbers of state and action together."""
        super().__init__()
        sizes = [num_inputs, *[hidden_size] * num_layers, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        self.scales = nn.ParameterList()
        for before, after in pairwise(sizes):
            bound = before**-0.5
            self.weights.append(nn.Parameter(torch.empty(num_heads, before, after).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.zeros(num_heads, 1, after)))
        self.scales.extend(nn.Parameter(torch.ones(num_heads, 1, after)) for after in sizes[1:-1])

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        """[heads, n]: values of actions [n, numbers] in states [n, state_size]."""
        inputs = torch.cat([states, actions], dim=1)
        hidden = inputs.expand(len(self.weights[0]), *inputs.shape)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.bmm(hidden, weight)
            if layer < last:
                normal = nn.functional.layer_norm(hidden, hidden.shape[-1:])
                hidden = (normal * self.scales[layer] + bias).relu()
            else:
                hidden = hidden + bias
        return hidden[..., 0]


def squashed_log_densities(drawn: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Log-density of each number of tanh(drawn), where `drawn` is normal with `mean` and `log_deviation`.

    Source: Haarnoja et al., arXiv 1801.01290, equation 21, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)).
    """
    normal = -0.5 * ((drawn - mean) / log_deviation.exp()) ** 2 - log_deviation - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - drawn - nn.functional.softplus(-2 * drawn))
    return normal - squash


def targets(rewards: Tensor, num_steps: Tensor, is_terminated: Tensor, following: Tensor, discount: float) -> Tensor:
    """[n]: what critics should say of decisions of several steps.

    Formula: sum_{i<k} discount^i r_i + discount^k V, with k executed steps; V is 0 where the task has come to its end,
    but not where the episode was only cut.

    Args:
        rewards: [n, chunk], 0 for steps that were not executed.
        num_steps: [n] int64, executed steps.
        is_terminated: [n] bool.
        following: [n], value of what is seen after the decision.
        discount: Gamma, per step of the environment.
    """
    powers = discount ** torch.arange(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    later = discount ** num_steps.to(rewards.dtype)
    return (rewards * powers).sum(1) + torch.where(is_terminated, 0.0, later * following)
