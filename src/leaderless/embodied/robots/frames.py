"""Messages between a server and its clients: JSON and named arrays, with their lengths. Nothing is pickled.

A frame is `b"LLR1"`, the lengths of header and body as unsigned 32-bit numbers in network order, the header as JSON and
the arrays' bytes, one after the other. The header's `arrays` lists name, type and shape of each.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.embodied.robots.arm import ArmSpec, CommandOutcome, Image, Reading
from leaderless.embodied.robots.safety_limits import Axis

MAGIC = b"LLR1"
VERSION = 1
"""Version of the protocol. Server and client must have the same."""
PREFIX = struct.Struct("!4sII")
MAX_HEADER_BYTES = 1 << 16
MAX_REQUEST_BYTES = 1 << 20
"""Largest body of a request, which has actions alone."""
MAX_REPLY_BYTES = 1 << 28
DTYPES = frozenset({"bool", "uint8", "int64", "float32", "float64"})

Header = Mapping[str, Json]


class FrameError(ValueError):
    """Bytes that are no frame of this protocol."""


@dataclass(frozen=True)
class MessageFrame:
    """A message.

    Attributes:
        header: Content of the request or the answer, without the arrays.
        arrays: Arrays by their names.
    """

    header: Header
    arrays: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The frame as bytes."""
        listed = [[name, str(array.dtype), list(array.shape)] for name, array in self.arrays.items()]
        header = json.dumps({**self.header, "arrays": listed}, allow_nan=False).encode()
        body = b"".join(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
                        for array in self.arrays.values())  # fmt: skip
        return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


def lengths(prefix: bytes, max_bytes: int) -> tuple[int, int]:
    """Lengths of header and body of a frame that begins with `prefix`.

    Raises:
        FrameError: It is no frame, or longer than allowed.
    """
    magic, num_header, num_body = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise FrameError(f"a message begins with {magic!r} and not with {MAGIC!r}: this port is for robots' clients")
    if num_header > MAX_HEADER_BYTES or num_body > max_bytes:
        raise FrameError(f"a message has {num_header:,} + {num_body:,} bytes: {max_bytes:,} are allowed")
    return num_header, num_body


def decode(header: bytes, body: bytes) -> MessageFrame:
    """The frame of a header and a body.

    Raises:
        FrameError: They do not fit together, or have something that the protocol does not.
    """
    try:
        found = json.loads(header, parse_constant=_refuse_constant)
        listed = [(str(name), str(dtype), _shape(shape)) for name, dtype, shape in found.pop("arrays")]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise FrameError(f"the header of a message cannot be read: {error}") from error
    arrays: dict[str, NDArray[np.generic]] = {}
    offset = 0
    for name, dtype, shape in listed:
        if dtype not in DTYPES or name in arrays:
            raise FrameError(f"array '{name}' of type {dtype}: types are {', '.join(sorted(DTYPES))}, names differ")
        type_, num = np.dtype(dtype).newbyteorder("<"), prod(shape)
        num_bytes = num * type_.itemsize
        if offset + num_bytes > len(body):
            raise FrameError(f"array '{name}' of shape {list(shape)} is longer than the message")
        if dtype == "bool" and (np.frombuffer(body, np.uint8, num, offset) > 1).any():
            raise FrameError(f"array '{name}' is bool, and has other numbers than 0 and 1")
        array = np.frombuffer(body, type_, num, offset).reshape(shape)
        arrays[name] = array.astype(np.dtype(dtype))  # a copy, which may be written
        offset += num_bytes
    if offset != len(body):
        raise FrameError(f"a message has {len(body) - offset:,} bytes that belong to no array")
    return MessageFrame(found, arrays)


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > 4 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} must have at most 4 sizes of at least 0")
    return tuple(shape)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


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
    def from_json(cls, found: Mapping[str, Json]) -> Description:
        """The description whose fields a server has sent as JSON.

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
