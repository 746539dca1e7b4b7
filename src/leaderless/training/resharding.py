"""Moves the state of a trained model from the ranks of one layout to the ranks of another."""

from __future__ import annotations

import torch

from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import fill_weights, send_weights
from leaderless.training.engine import Trainable


def move_state(
    role: str, held: Trainable | None, wanted: Trainable | None, pools: tuple[Pool, Pool], process_group: ProcessGroup
) -> None:
    """Write what one instance keeps, weights and optimizer alike, into another one; nothing is rounded.

    All ranks of both layouts call it together; other ranks may. Each element is sent once, from a rank that holds it to
    each that wants it.

    Args:
        role: Role of the model.
        held: Instance of this rank in the old layout, if it is in it.
        wanted: Instance of this rank in the new layout, if it is in it.
        pools: Old and new layout, and how the back end divides tensors over each.
        process_group: Some ranks, among them all of both layouts.
    """
    source, target = (None if engine is None else _parts(engine) for engine in (held, wanted))
    known = source or target
    if known is None:
        return
    for dtype in known:
        parts = known[dtype]
        route = WeightRoute(f"weights of role '{role}'", parts.shapes, *pools, dtype, process_group.rank)
        own = None if source is None else source[dtype]
        if target is None:
            assert own is not None, "a rank without any of this state takes no part"
            send_weights(route, own, process_group)
        else:
            fill_weights(route, target[dtype], process_group, own)


def _parts(engine: Trainable) -> dict[torch.dtype, HeldWeights]:
    """The state of an instance as this rank holds it, by type, in the order of the model."""
    parts: dict[torch.dtype, list[LocalWeight]] = {}
    for name, value in engine.state().items():
        parts.setdefault(value.dtype, []).append(LocalWeight.of(name, value))
    return {dtype: HeldWeights.of(some, engine.policy_version) for dtype, some in parts.items()}
