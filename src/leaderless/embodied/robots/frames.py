"""Messages between a server and its clients: a JSON object and named arrays, with their lengths. Nothing is pickled.

A frame is `b"LLR1"`, the lengths of header and body as unsigned 32-bit numbers in network order, the header as JSON and
the arrays' bytes, one after the other. The header's `arrays` lists name, type and shape of each.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json

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
