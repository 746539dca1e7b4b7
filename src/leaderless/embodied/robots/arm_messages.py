"""Descriptions of arms, and outcomes, as frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.embodied.robots.arm import ArmSpec, Image, Reading, Station
from leaderless.embodied.robots.command_outcome import CommandOutcome
from leaderless.embodied.robots.frames import FrameError, MessageFrame
from leaderless.embodied.robots.safety_limits import Axis

IMAGE = "image/"
"""Prefix of the names of pictures among the arrays of an outcome."""
_ARRAYS = ("rewards", "actions", "executed", "intervened", "clipped", "limited")
_DTYPES = {"intervened": "bool", "clipped": "bool", "limited": "bool"}
_FACTS = ("is_terminated", "is_truncated", "cut", "num_idle", "time_s", "facts")


@dataclass(frozen=True)
class Description:
    """Description of an arm that a server sends to its clients.

    Attributes:
        arm: The arm.
        max_steps: Number of steps after which an episode is cut.
        max_chunk: Largest number of steps in one command.
        instruction: Instruction for the policy.
    """

    arm: ArmSpec
    max_steps: int
    max_chunk: int
    instruction: str

    @classmethod
    def of(cls, station: Station) -> Description:
        """The description of a station."""
        return cls(station.arm.spec, station.max_steps, station.max_chunk, station.instruction)

    def to_json(self) -> dict[str, Json]:
        """The description as JSON."""
        return cast("dict[str, Json]", asdict(self))

    @classmethod
    def from_json(cls, found: Mapping[str, Json]) -> Description:
        """The description that `to_json` gave.

        Raises:
            FrameError: It is none.
        """
        try:
            arm = dict(cast("Mapping[str, Json]", found["arm"]))
            axes = tuple(Axis(**one) for one in cast("list[dict[str, float]]", arm.pop("axes")))  # type: ignore[arg-type]
            cameras = cast("Mapping[str, list[int]]", arm.pop("cameras"))
            sizes = {name: (int(height), int(width)) for name, (height, width) in cameras.items()}
            spec = ArmSpec(axes=axes, cameras=sizes, **arm)  # type: ignore[arg-type]
            return cls(spec, **{one.name: found[one.name] for one in fields(cls)[1:]})  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the server describes its arm in a way that cannot be read: {error}") from error


def to_frame(outcome: CommandOutcome, header: Mapping[str, Json]) -> MessageFrame:
    """An outcome as a frame."""
    reading = outcome.reading
    arrays: dict[str, NDArray[np.generic]] = {name: getattr(outcome, name) for name in _ARRAYS}
    arrays |= {"position": reading.position, "state": reading.state}
    arrays |= {IMAGE + name: image for name, image in reading.images.items()}
    facts = {name: getattr(outcome, name) for name in _FACTS}
    return MessageFrame({**header, **facts, "is_fresh": reading.is_fresh}, arrays)


def from_frame(frame: MessageFrame, description: Description) -> CommandOutcome:
    """The outcome that `to_frame` was given.

    Raises:
        FrameError: The frame is no outcome of this arm.
    """
    spec, arrays = description.arm, frame.arrays
    dim = len(spec.axes)
    try:
        num = len(arrays["rewards"])
        shapes: dict[str, tuple[int, ...]] = {
            name: (num, dim) if name in {"actions", "executed"} else (num,) for name in _ARRAYS
        }
        shapes |= {"position": (dim,), "state": (spec.state_size,)}
        shapes |= {IMAGE + name: (*size, 3) for name, size in spec.cameras.items()}
        for name, shape in shapes.items():
            dtype = "uint8" if name.startswith(IMAGE) else _DTYPES.get(name, "float32")
            dtype = "float64" if name == "position" else dtype
            if arrays[name].shape != shape or arrays[name].dtype != dtype:
                found = f"{arrays[name].dtype}{list(arrays[name].shape)}"
                raise FrameError(f"array '{name}' is {found}, and the arm has {dtype}{list(shape)}")
        images = {name: cast("Image", arrays[IMAGE + name]) for name in spec.cameras}
        reading = Reading(
            cast("NDArray[np.float64]", arrays["position"]),
            cast("NDArray[np.float32]", arrays["state"]),
            images,
            is_fresh=bool(frame.header["is_fresh"]),
        )
        return CommandOutcome(
            reading,
            **{name: arrays[name] for name in _ARRAYS},  # type: ignore[arg-type]
            **{name: frame.header[name] for name in _FACTS},  # type: ignore[arg-type]
        )
    except (KeyError, TypeError) as error:
        raise FrameError(f"the server's answer lacks {error}") from error
