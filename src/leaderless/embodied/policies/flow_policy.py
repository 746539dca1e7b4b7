"""Common part of flow policies: how they draw actions, and how they score them.

With `sde`, one step of a decision is drawn, which one is drawn too, and the others follow without noise: the decision's
log-probability belongs to this step. With `noise`, each step is drawn, with a deviation that is learnt, and the
log-probability is the sum over the first noise and all steps. A point on the way from noise (time 1) to actions (time
0) is x_t = (1 - t) a + t e, of an action a and noise e, and a network predicts the velocity v = e - a.

Source: pi_RL, arXiv 2510.25889, Flow-SDE and Flow-Noise. Deviation: the joint log-probability of a way is the sum over
its steps; an implementation of the paper takes their mean, so that its ratio is a root of the ratio.

A decision is kept as one number, and points of its way: the step that was drawn, its point before and after, and the
last point (`sde`); or all points (`noise`). A demonstration has -1 as its number, noise and its action. Its score is no
log-probability, but -1/2 of the squared error of flow matching, averaged over as many times as there are steps.
"""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.protocol import Acted, BodyPolicy, DecisionScores, Observed, as_normal
from leaderless.embodied.simulators.protocol import Continuous, Spaces

LEARNT_DEVIATIONS = 0.08, 0.16
"""Smallest and largest deviation of a step that is learnt."""
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
    deviation = sigma sqrt(delta). At t = 1, sigma's divisor belongs to the next time, `delta`. Shapes are those of
    `ode_step`.

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


def turned(uniform: Tensor, num: int) -> Tensor:
    """Several noises from one, [n, num, ...] from [n, ...]: each uniform from 0 to 1, and evenly spread together."""
    turns = torch.arange(num, device=uniform.device, dtype=torch.float64) * GOLDEN
    turns = turns.view(1, num, *[1] * (uniform.dim() - 1))
    return (uniform.double()[:, None] + turns).frac()


@dataclass(frozen=True)
class FlowOptions:
    """How a flow policy draws.

    Attributes:
        method: Whether one step of a decision is drawn (`sde`), or all with a learnt deviation (`noise`).
        num_steps: Steps from noise to an action, at least 2.
        noise_level: Factor of the noise of `sde`, above 0.
    """

    method: str = "sde"
    num_steps: int = 4
    noise_level: float = 0.5

    def __post_init__(self) -> None:
        if self.method not in {"sde", "noise"}:
            raise ValueError(f"method='{self.method}': must be sde or noise")
        if self.num_steps < 2:
            raise ValueError(f"num_steps={self.num_steps}: must be at least 2")
        if not self.noise_level > 0:
            raise ValueError(f"noise_level={self.noise_level}: must be above 0")


class FlowPolicy(BodyPolicy):
    """A policy whose actions come from noise in some steps.

    Its network plans `horizon` steps of `numbers` numbers; the first `chunk` steps and `score_dim` numbers are executed
    and scored. Classes derived from it call `begin`, and say what the velocity is.

    Attributes:
        horizon: Steps that the network plans.
        numbers: Numbers of an action of the network.
        limits: Numbers of the environment that -1 and 1 of the network stand for.
        flow: Options of drawing.
        deviations: Network of learnt deviations; None for `sde`.
    """

    horizon: int
    numbers: int
    limits: ActionLimits
    flow: FlowOptions
    deviations: DeviationNet | None

    def begin(self, spaces: Spaces, *, limits: ActionLimits, sizes: tuple[int, int, int], flow: FlowOptions) -> None:
        """Set sizes: the chunk, the horizon, and the numbers of an action of the network.

        Raises:
            ValueError: The environment takes choices, or more than the network plans.
        """
        if not isinstance(spaces.actions, Continuous):
            raise ValueError("a flow policy moves by real numbers, but the environment takes choices: use mlp or cnn")
        self.spaces, self.limits, self.flow = spaces, limits, flow
        self.chunk, self.horizon, self.numbers = sizes
        self.score_dim = spaces.actions.dim
        if self.chunk < 1 or self.chunk > self.horizon or self.score_dim > self.numbers:
            raise ValueError(
                f"chunk={self.chunk} steps of {self.score_dim} numbers: the network plans {self.horizon} steps of "
                f"{self.numbers} numbers"
            )
        size = self.horizon * self.numbers
        points = 3 if flow.method == "sde" else flow.num_steps + 1
        self.choice_size = 1 + points * size
        self.noise_size = 1 + (2 if flow.method == "sde" else flow.num_steps + 1) * size

    @abstractmethod
    def look(self, observed: Observed) -> object:
        """Input of the steps about n observations, in a form that `velocity` takes."""

    @abstractmethod
    def velocity(self, looked: object, rows: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Velocities, and where learnt deviations are within their range; 0 is its middle.

        Args:
            looked: See `look`.
            rows: [m] int64, observation of each point.
            x: [m, horizon, numbers] float32, points.
            times: [m] float32, from 0 to 1.

        Returns:
            Both [m, horizon, numbers] float32; the latter is used by `noise` alone.
        """

    def with_deviations(self, velocity: Tensor, features: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Result of `velocity`, where deviations are alike in all steps that the network plans.

        Args:
            velocity: [m, horizon, numbers] float32.
            features: [m, num_features], inputs of the network of deviations.
            times: [m] float32.
        """
        if self.deviations is None:
            return velocity, velocity
        return velocity, self.deviations(features, times).float()[:, None].expand_as(velocity)

    def _step(
        self, x: Tensor, times: Tensor, predicted: tuple[Tensor, Tensor], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and deviation of a drawn step."""
        velocity, delta = predicted[0], 1 / self.flow.num_steps
        if self.flow.method == "noise":
            low, high = (math.log(limit) for limit in LEARNT_DEVIATIONS)
            deviation = (low + (high - low) * predicted[1].sigmoid()).exp() * temperature
            return ode_step(x, velocity, times, delta), deviation
        mean, deviation = sde_step(x, velocity, times, delta, self.flow.noise_level)
        return mean, (deviation * temperature).expand_as(mean)

    @override
    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        """Decide step by step; without noise, all steps are the likeliest, from the likeliest first noise."""
        n, num_steps = len(observed), self.flow.num_steps
        looked, device = self.look(observed), observed.state.device
        rows = torch.arange(n, device=device)
        shape = (n, self.horizon, self.numbers)
        parts = torch.full((n, self.noise_size), 0.5, dtype=torch.float64, device=device) if noise is None else noise
        normal = as_normal(parts[:, 1:]).view(n, -1, *shape[1:])
        drawn_step = torch.zeros_like(rows) if noise is None else (parts[:, 0] * num_steps).long()
        x, way = normal[:, 0], [normal[:, 0]]
        log_probs = torch.zeros(shape, device=device)
        before = after = x
        for step in range(num_steps):
            times = torch.full((n,), 1 - step / num_steps, device=device)
            predicted = self.velocity(looked, rows, x, times)
            mean, deviation = self._step(x, times, predicted, temperature)
            if self.flow.method == "noise":
                point = mean + deviation * normal[:, 1 + step]
                log_probs = log_probs + normal_log_density(point, mean, deviation)
            else:
                is_drawn = (drawn_step == step)[:, None, None]
                flown = ode_step(x, predicted[0], times, 1 / num_steps)
                # Without noise, the drawn step is the one of the others, so that nothing depends on which it is.
                point = flown if noise is None else torch.where(is_drawn, mean + deviation * normal[:, 1], flown)
                log_probs = torch.where(is_drawn, normal_log_density(point, mean, deviation), log_probs)
                before, after = torch.where(is_drawn, x, before), torch.where(is_drawn, point, after)
            x = point
            way.append(x)
        if self.flow.method == "noise":
            log_probs = log_probs + normal_log_density(way[0], 0.0, torch.ones_like(x))
        else:
            way = [before, after, x]
        choices = torch.cat([drawn_step[:, None].float(), torch.stack(way, dim=1).flatten(1)], dim=1)
        return Acted(self.actions_of(choices), choices, self._executed(log_probs))

    @override
    def score(self, observed: Observed, choices: Tensor, temperature: float = 1.0) -> DecisionScores:
        """Score with one call of the network, whatever is scored, so that ranks stay together."""
        points = choices[:, 1:].view(len(choices), -1, self.horizon, self.numbers)
        drawn, shown = _drawn_and_shown(choices)
        rows, x, times = (
            torch.cat(pair)
            for pair in zip(self._drawn(choices, points, drawn), self._shown(points, shown), strict=True)
        )
        velocity, learnt = self.velocity(self.look(observed), rows, x, times)
        num_drawn = len(rows) - len(shown) * self.flow.num_steps
        found = torch.zeros(len(choices), 2, self.horizon, self.numbers, device=choices.device)
        of_drawn = (x[:num_drawn], times[:num_drawn], (velocity[:num_drawn], learnt[:num_drawn]))
        found = found.index_add(0, drawn, self._score_drawn(points[drawn], of_drawn, temperature))
        # x = (1 - t) a + t e, so the velocity e - a is (x - a) / t.
        action = points[shown][:, -1].repeat_interleave(self.flow.num_steps, 0)
        wanted = (x[num_drawn:] - action) / times[num_drawn:, None, None]
        errors = -0.5 * (velocity[num_drawn:] - wanted) ** 2
        matched = errors.view(len(shown), self.flow.num_steps, self.horizon, self.numbers).mean(1)
        found = found.index_add(0, shown, torch.stack([matched, torch.zeros_like(matched)], dim=1))
        return DecisionScores(self._executed(found[:, 0]), self._executed(found[:, 1]))

    def _drawn(self, choices: Tensor, points: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Observation, point and time of each step of decisions that was drawn."""
        num_steps = self.flow.num_steps
        if self.flow.method == "sde":
            return drawn, points[drawn, 0], 1 - choices[drawn, 0] / num_steps
        times = 1 - torch.arange(num_steps, device=choices.device) / num_steps
        return drawn.repeat_interleave(num_steps), points[drawn, :-1].flatten(0, 1), times.repeat(len(drawn))

    def _shown(self, points: Tensor, shown: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Observation, point and time at which demonstrations are scored: one time in each step."""
        num_steps = self.flow.num_steps
        noise = as_normal(turned(points[shown, 0], num_steps).flatten(0, 1))
        late = torch.arange(num_steps, device=points.device) + 1 - turned(points[shown, 1, 0, 0], num_steps)
        times = (late / num_steps).float().clamp(min=1e-3).flatten()
        action = points[shown, -1].repeat_interleave(num_steps, 0)
        t = times[:, None, None]
        return shown.repeat_interleave(num_steps), (1 - t) * action + t * noise, times

    def _score_drawn(
        self, points: Tensor, of_steps: tuple[Tensor, Tensor, tuple[Tensor, Tensor]], temperature: float
    ) -> Tensor:
        """Log-probabilities and entropies [m, 2, horizon, numbers] of m decisions, of whose steps all is known."""
        mean, deviation = self._step(*of_steps, temperature)
        if self.flow.method == "sde":
            return torch.stack([normal_log_density(points[:, 1], mean, deviation), normal_entropy(deviation)], dim=1)
        after = points[:, 1:].flatten(0, 1)
        both = torch.stack([normal_log_density(after, mean, deviation), normal_entropy(deviation)], dim=1)
        total = both.view(len(points), self.flow.num_steps, 2, self.horizon, self.numbers).sum(1)
        one = torch.ones_like(points[:, 0])
        return total + torch.stack([normal_log_density(points[:, 0], 0.0, one), normal_entropy(one)], dim=1)

    def _executed(self, values: Tensor) -> Tensor:
        return values[:, : self.chunk, : self.score_dim]

    @override
    def actions_of(self, choices: Tensor) -> Tensor:
        points = choices[:, 1:].view(len(choices), -1, self.horizon, self.numbers)
        return self.limits.restore(self._executed(points[:, -1]))

    @override
    def choices_of(self, actions: Tensor) -> Tensor:
        """Plan the actions; what is planned beyond the chunk repeats its last action."""
        planned = self.limits.normalize(actions)
        planned = nn.functional.pad(planned, (0, self.numbers - self.score_dim))
        planned = torch.cat([planned, planned[:, -1:].expand(-1, self.horizon - self.chunk, -1)], dim=1)
        # Noise follows from what is shown, whoever reads it.
        rng = np.random.default_rng(zlib.crc32(actions.detach().float().contiguous().cpu().numpy().tobytes()))
        points = torch.zeros(len(actions), (self.choice_size - 1) // planned[:1].numel(), *planned.shape[1:])
        points[:, :2] = torch.from_numpy(rng.random(points[:, :2].shape, dtype=np.float32))
        points[:, -1] = planned
        return torch.cat([torch.full((len(actions), 1), -1.0), points.flatten(1)], dim=1)


def _drawn_and_shown(choices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of decisions that were drawn, and of demonstrations."""
    if choices.is_meta:  # only sizes are wanted
        rows = torch.arange(len(choices), device=choices.device)
        return rows, rows[:0]
    is_shown = choices[:, 0] < 0
    return torch.nonzero(~is_shown)[:, 0], torch.nonzero(is_shown)[:, 0]


class DeviationNet(nn.Module):
    """Where learnt deviations are within their range, from features of what is seen and the time."""

    def __init__(self, num_features: int, num_outputs: int, hidden_size: int = 64) -> None:
        """Make the layers; at first, all deviations are in the middle of their range."""
        super().__init__()
        self.hidden, self.out = nn.Linear(num_features + 1, hidden_size), nn.Linear(hidden_size, num_outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor, times: Tensor) -> Tensor:
        """See the class: [m, num_outputs] from features [m, num_features] and times [m]."""
        told = torch.cat([features, times[:, None]], dim=1).to(self.hidden.weight.dtype)
        found: Tensor = self.out(torch.tanh(self.hidden(told)))
        return found
