"""Guards: checks of the loss, gradient and entropy that may prevent an optimizer update.

All numbers are sums over the ranks of the node, so every rank reaches the same decision without further communication.
What guards remember is part of the node's state, which is checkpointed and restored by a roll-back.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from leaderless.config.run import GuardAction, GuardsConfig
from leaderless.observability.events import LOWER_BOUNDS, strongest
from leaderless.stages.context import StageContext
from leaderless.training.engine import Trainable, UpdateInfo

NORM_WINDOW = 50
"""Number of past gradient norms that a new one is compared with."""
MIN_NORMS = 5
"""Least number of past norms for a comparison."""
_SKIPPED, _IN_A_ROW = "guard/skipped", "guard/skipped_in_a_row"
_NORM, _NUM_NORMS = "guard/norm/", "guard/num_norms"


class Breach(NamedTuple):
    """A guard whose condition is violated; see `StageContext.report_event`."""

    guard: str
    value: float
    limit: float | None
    action: GuardAction


def find_breaches(
    config: GuardsConfig, loss: float, grad_norm: float, entropy: float | None = None, usual_norm: float | None = None
) -> list[Breach]:
    """The guards that an update violates, given its numbers over all ranks before it is made.

    The norm is that of the gradient before clipping; the usual one is the median of those of earlier updates, or None
    while there are too few.
    """
    times_usual = grad_norm / usual_norm if usual_norm else None
    watched: tuple[tuple[str, float | None, float | None, GuardAction], ...] = (
        ("grad_norm_limit", grad_norm, config.grad_norm_limit, config.grad_norm_action),
        ("grad_norm_factor", times_usual, config.grad_norm_factor, config.grad_norm_action),
        ("entropy_limit", entropy, config.entropy_limit, config.entropy_action),
    )
    breaches = []
    if not math.isfinite(loss):
        breaches.append(Breach("non_finite_loss", loss, None, config.non_finite_loss))
    if not math.isfinite(grad_norm):
        breaches.append(Breach("non_finite_gradient", grad_norm, None, config.non_finite_gradient))
    for guard, value, limit, action in watched:
        if value is None or limit is None or not math.isfinite(value):
            continue
        if value < limit if guard in LOWER_BOUNDS else value > limit:
            breaches.append(Breach(guard, value, limit, action))
    return breaches


def guarded_step(engine: Trainable, context: StageContext, loss: float, entropy: float | None) -> UpdateInfo:
    """Make an optimizer update unless a guard prevents it, and report what guards found.

    All ranks of the node call it together, with the loss of the mini-batch over all of them and the mean entropy of the
    tokens that count, or None without one.
    """
    config, state = context.recipe.guards, context.state
    norms = [value for name, value in state.items() if name.startswith(_NORM)]
    usual_norm = statistics.median(norms) if len(norms) >= MIN_NORMS else None
    breaches: list[Breach] = []

    def allow(grad_norm: float) -> bool:
        breaches.extend(find_breaches(config, loss, grad_norm, entropy, usual_norm))
        return all(breach.action == "warn" for breach in breaches)

    info = engine.optimizer_step(allow)
    if info.is_made:
        state.pop(_IN_A_ROW, None)
        # A norm of 0 says nothing about the usual size.
        if config.grad_norm_factor is not None and info.grad_norm > 0:
            count = int(state.get(_NUM_NORMS, 0))
            state[f"{_NORM}{count % NORM_WINDOW}"] = info.grad_norm
            state[_NUM_NORMS] = count + 1
    elif strongest(breach.action for breach in breaches) == "skip":
        for name in (_SKIPPED, _IN_A_ROW):
            state[name] = state.get(name, 0.0) + 1
        if state[_IN_A_ROW] > config.max_skips:
            breaches.append(Breach("max_skips", state[_IN_A_ROW], config.max_skips, "stop"))
    for breach in breaches:
        context.report_event(*breach)
    if state.get(_SKIPPED):
        context.metrics.max(f"guard/skipped/{context.node.node.role}", state[_SKIPPED])
    return info
