"""The encoding of protocol buffers: fields of messages, as bytes and back.

Source: https://protobuf.dev/programming-guides/encoding/. A message is a sequence of fields in any order: a number with
a kind, then a value. Which fields a message has is up to its reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5
"""Kinds of values: a whole number, 8 bytes, bytes with a length, and 4 bytes."""
LONGEST_VARINT = 10
"""Bytes of the largest number of 64 bits, in groups of 7."""

Value = int | float | bytes
"""A value of a field; text and messages are bytes."""


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message with their numbers, in the order in which they were written.

    Raises:
        ValueError: The bytes are no message.
    """
    place = 0
    while place < len(message):
        key, place = _varint_at(message, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, place = _varint_at(message, place)
            yield number, value
            continue
        if kind == BYTES:
            size, place = _varint_at(message, place)
        elif kind in {DOUBLE, FLOAT}:
            size = 8 if kind == DOUBLE else 4
        else:
            raise ValueError(f"field {number} has kind {kind}, which no message of this API has")
        if place + size > len(message):
            raise ValueError(f"field {number} has {size} bytes, but the message ends after {len(message) - place}")
        content = message[place : place + size]
        place += size
        yield number, content if kind == BYTES else struct.unpack("<d" if kind == DOUBLE else "<f", content)[0]


def _varint_at(message: bytes, place: int) -> tuple[int, int]:
    """A whole number at a place, and the place after it."""
    value = 0
    for shift, byte in enumerate(message[place : place + LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, place + shift + 1
    raise ValueError(f"no number ends after byte {place}")


def numbers(value: Value) -> list[int]:
    """The whole numbers of a repeated field: one, or several packed into bytes."""
    if not isinstance(value, bytes):
        return [int(value)]
    found: list[int] = []
    place = 0
    while place < len(value):
        number, place = _varint_at(value, place)
        found.append(number)
    return found


def varint(value: int) -> bytes:
    """Write a whole number that is not negative."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def field(number: int, value: int | float | bytes | str) -> bytes:
    """Write a field: a whole number, a double, or bytes, of which texts and messages are some."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | DOUBLE) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(content)) + content
