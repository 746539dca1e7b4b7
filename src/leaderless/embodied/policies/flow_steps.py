"""Steps of flow policies, as pure functions: from noise (time 1) to actions (time 0).

A point on the way is x_t = (1 - t) a + t e, of an action a and noise e, and a network predicts the velocity v = e - a.

Source: pi_RL, arXiv 2510.25889. Deviation: the joint log-probability of a way is the sum over its steps; an
implementation of the paper takes their mean, so that its ratio is a root of the ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_NOISE = 1e-7
"""Noise is kept away from 0 and 1, where the normal distribution has no end."""
GOLDEN = 0.6180339887498949
"""Share by which noise is turned between the times at which a demonstration is scored; turns fill the circle evenly."""


def ode_step(x: Tensor, velocity: Tensor, times: Tensor, delta: float) -> Tensor:
    """The next point without noise: (1 - t + delta) a + (t - delta) e, where a = x - t v and e = x + (1 - t) v.

    Args:
        x: [n, steps, numbers] float32, points.
        velocity: [n, steps, numbers] float32, velocities there.
        times: [n] float32, from `delta` to 1.
        delta: Length of a step.
    """
    del times  # it cancels out
    return x - delta * velocity


def sde_step(x: Tensor, velocity: Tensor, times: Tensor, delta: float, noise_level: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the next point of Flow-SDE, which has the distribution that `ode_step` leads to.

    sigma = noise_level sqrt(t / (1 - t)), mean = (1 - t + delta) a + (t - delta - sigma^2 delta / (2 t)) e,
    deviation = sigma sqrt(delta). At t = 1, sigma's divisor belongs to the next time, `delta`.

    Args:
        x: [n, steps, numbers] float32, points.
        velocity: [n, steps, numbers] float32, velocities there.
        times: [n] float32, from `delta` to 1.
        delta: Length of a step.
        noise_level: Factor of the noise.

    Returns:
        The means [n, steps, numbers] and the deviations [n, 1, 1].
    """
    t = times[:, None, None]
    action, noise = x - t * velocity, x + (1 - t) * velocity
    variance = noise_level**2 * t / (1 - t).clamp(min=delta)
    mean = (1 - t + delta) * action + (t - delta - variance * delta / (2 * t)) * noise
    return mean, (variance * delta).sqrt()


def normal_log_density(x: Tensor, mean: Tensor | float, deviation: Tensor) -> Tensor:
    """Log of the density of normal distributions, number by number."""
    return -0.5 * ((x - mean) / deviation) ** 2 - deviation.log() - 0.5 * math.log(2 * math.pi)


def normal_entropy(deviation: Tensor) -> Tensor:
    """Entropy of normal distributions, number by number."""
    return deviation.log() + 0.5 * math.log(2 * math.pi * math.e)


def as_normal(uniform: Tensor) -> Tensor:
    """Normal float32 noise from noise that is uniform from 0 to 1."""
    middle = uniform.double().clamp(LEAST_NOISE, 1 - LEAST_NOISE)
    return (math.sqrt(2) * torch.erfinv(2 * middle - 1)).float()


def turned(uniform: Tensor, num: int) -> Tensor:
    """Several noises from one, [n, num, ...] from [n, ...]: each uniform from 0 to 1, and evenly spread together."""
    turns = torch.arange(num, device=uniform.device, dtype=torch.float64) * GOLDEN
    turns = turns.view(1, num, *[1] * (uniform.dim() - 1))
    return (uniform.double()[:, None] + turns).frac()
