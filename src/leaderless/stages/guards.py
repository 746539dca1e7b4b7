"""Guards: checks of the loss, gradient and entropy that may prevent an optimizer update.

All numbers are sums over the ranks of the node, so every rank reaches the same decision without further communication.
A guard's memory is part of the node's state, which is checkpointed and restored by a roll-back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import MutableMapping
from dataclasses import dataclass

from leaderless.config.run import GuardAction, GuardsConfig
from leaderless.observability.events import LOWER_BOUNDS, strongest
from leaderless.stages.context import StageContext
from leaderless.training.engine import Trainable, UpdateInfo

NORM_WINDOW = 50
"""Number of past gradient norms that a new one is compared with."""
MIN_NORMS = 5
"""Least number of past norms for a comparison."""
_SKIPPED, _IN_A_ROW, _NUM_NORMS = "guard/skipped", "guard/skipped_in_a_row", "guard/num_norms"


@dataclass(frozen=True)
class Breach:
    """A guard whose condition is violated.

    Attributes:
        guard: Setting that holds its limit, or its action if it has no limit.
        value: Observed value.
        limit: Limit that the value violates; None if the value has to be finite.
        action: Action that the guard asks for.
    """

    guard: str
    value: float
    limit: float | None
    action: GuardAction


@dataclass(frozen=True)
class UpdateNumbers:
    """Numbers of an update before it is made, over all ranks.

    Attributes:
        loss: Loss of the mini-batch.
        grad_norm: Norm of the gradient before clipping.
        entropy: Mean entropy over the tokens of the mini-batch; None without one.
        usual_norm: Median of the norms of earlier updates; None while there are too few.
    """

    loss: float
    grad_norm: float
    entropy: float | None = None
    usual_norm: float | None = None


def find_breaches(config: GuardsConfig, numbers: UpdateNumbers) -> list[Breach]:
    """The guards that an update violates."""
    norm, is_finite = numbers.grad_norm, math.isfinite(numbers.grad_norm)
    times_usual = norm / numbers.usual_norm if is_finite and numbers.usual_norm else None
    watched: tuple[tuple[str, float | None, float | None, GuardAction], ...] = (
        ("grad_norm_limit", norm if is_finite else None, config.grad_norm_limit, config.grad_norm_action),
        ("grad_norm_factor", times_usual, config.grad_norm_factor, config.grad_norm_action),
        ("entropy_limit", numbers.entropy, config.entropy_limit, config.entropy_action),
    )
    finite: tuple[tuple[str, float, GuardAction], ...] = (
        ("non_finite_loss", numbers.loss, config.non_finite_loss),
        ("non_finite_gradient", norm, config.non_finite_gradient),
    )
    breaches = [Breach(guard, value, None, action) for guard, value, action in finite if not math.isfinite(value)]
    for guard, value, limit, action in watched:
        if value is not None and limit is not None and (value < limit if guard in LOWER_BOUNDS else value > limit):
            breaches.append(Breach(guard, value, limit, action))
    return breaches


def guarded_step(engine: Trainable, context: StageContext, loss: float, entropy: float | None) -> UpdateInfo:
    """Make an optimizer update unless a guard prevents it. All ranks of the node call it together.

    Args:
        engine: Engine that holds the gradient.
        context: Context of the node; receives the events of guards.
        loss: Loss of the mini-batch over all ranks.
        entropy: Mean entropy over all ranks; None without one.
    """
    config, history = context.recipe.guards, _History(context.state)
    breaches: list[Breach] = []

    def allow(grad_norm: float) -> bool:
        breaches.extend(find_breaches(config, UpdateNumbers(loss, grad_norm, entropy, history.usual_norm)))
        return all(breach.action == "warn" for breach in breaches)

    info = engine.optimizer_step(allow)
    if info.is_made:
        history.made(info.grad_norm, keep_norm=config.grad_norm_factor is not None)
    elif strongest(breach.action for breach in breaches) == "skip":
        in_a_row = history.skipped()
        if in_a_row > config.max_skips:
            breaches.append(Breach("max_skips", in_a_row, config.max_skips, "stop"))
    for breach in breaches:
        context.report_event(breach.guard, breach.value, breach.limit, breach.action)
    if history.num_skipped:
        context.metrics.max(f"guard/skipped/{context.node.node.role}", history.num_skipped)
    return info


class _History:
    """The guards' memory of a node's updates."""

    def __init__(self, state: MutableMapping[str, float]) -> None:
        self._state = state

    @property
    def usual_norm(self) -> float | None:
        """Median of the last norms; None while there are too few."""
        norms = [value for name, value in self._state.items() if name.startswith("guard/norm/")]
        return statistics.median(norms) if len(norms) >= MIN_NORMS else None

    @property
    def num_skipped(self) -> float:
        """Updates that have been skipped since the run began."""
        return self._state.get(_SKIPPED, 0.0)

    def made(self, grad_norm: float, *, keep_norm: bool) -> None:
        """Note that an update was made. Norms of 0 are ignored: they say nothing about the usual size."""
        self._state.pop(_IN_A_ROW, None)
        if keep_norm and grad_norm > 0:
            count = int(self._state.get(_NUM_NORMS, 0))
            self._state[f"guard/norm/{count % NORM_WINDOW}"] = grad_norm
            self._state[_NUM_NORMS] = count + 1

    def skipped(self) -> float:
        """Note that an update was skipped; returns how many were skipped in a row."""
        self._state[_SKIPPED] = self.num_skipped + 1
        self._state[_IN_A_ROW] = self._state.get(_IN_A_ROW, 0.0) + 1
        return self._state[_IN_A_ROW]
