"""What all ranks agree on at the end of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leaderless.data.transport import ProcessGroup
from leaderless.observability.events import GuardEvent


@dataclass(frozen=True)
class StepEnd:
    """How a step has ended, the same on every rank.

    Attributes:
        is_stopping: A signal has asked some rank to stop.
        is_checkpoint_due: A checkpoint is due on some rank.
        data_position: Number of prompts taken from the data.
        events: Events that the guards of all nodes have reported.
    """

    is_stopping: bool
    is_checkpoint_due: bool
    data_position: int
    events: tuple[GuardEvent, ...] = ()


def agree(mine: StepEnd, world: ProcessGroup) -> StepEnd:
    """Combine what each rank knows. All ranks call it together.

    More than four numbers are exchanged only where a guard has reported an event.

    Args:
        mine: What this rank knows; each event is known to one rank only.
        world: Process group of all ranks.
    """
    numbers = [int(mine.is_stopping), int(mine.is_checkpoint_due), mine.data_position, len(mine.events)]
    is_stopping, is_due, data_position, num_events = world.max(torch.tensor(numbers), "how the step ended").tolist()
    if not num_events:
        return StepEnd(bool(is_stopping), bool(is_due), data_position)
    lines = "".join(json.dumps([event.to_json(), str(event.value)]) + "\n" for event in mine.events)
    encoded = torch.tensor(list(lines.encode()), dtype=torch.uint8)
    gathered = torch.cat(world.gather(encoded, "what guards have seen"))
    events = _decode(bytes(gathered.numpy()).decode().splitlines())
    return StepEnd(bool(is_stopping), bool(is_due), data_position, events)


def _decode(lines: Sequence[str]) -> tuple[GuardEvent, ...]:
    """Events with their exact values, some of which JSON cannot hold."""
    events: list[GuardEvent] = []
    for line in lines:
        values, number = json.loads(line)
        events.append(GuardEvent.from_json(values | {"value": float(number)}))
    return tuple(events)
