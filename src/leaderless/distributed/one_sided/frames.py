"""Notifications between endpoints: what each says, as bytes. Nothing is pickled. Imports no torch."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

PROTOCOL = 1
"""Version of what endpoints say to each other."""
_HEADER = Struct("<BBqqqqqqi")


class FrameKind(IntEnum):
    """Meaning of a notification.

    Attributes:
        WHOLE: A small message, which is in it.
        PART: A part of a message may be read, at an address.
        TAKEN: A part has been read, or a small message been used.
        CLOSED: The sender has stopped, and gives a reason.
        HERE: Nothing; the sender finds out whether the receiver can be reached.
    """

    WHOLE = 1
    PART = 2
    TAKEN = 3
    CLOSED = 4
    HERE = 5


class Frame(NamedTuple):
    """A notification.

    Attributes:
        kind: Meaning.
        tag: Number of the process group.
        number: Position of the message among those that the process group has sent the same way.
        size: Bytes of the whole message.
        begin: First byte of the part.
        span: Bytes of the part.
        address: Place of the part in the memory of its sender.
        device: Number of its device; -1 for the host.
        content: The message, the metadata of memory that the receiver may not know yet, or the reason.
    """

    kind: FrameKind
    tag: int = 0
    number: int = 0
    size: int = 0
    begin: int = 0
    span: int = 0
    address: int = 0
    device: int = -1
    content: bytes = b""

    def encode(self) -> bytes:
        """The notification as bytes."""
        return _HEADER.pack(PROTOCOL, *self[:-1]) + self.content

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """The notification from bytes.

        Raises:
            ValueError: They are not of this protocol.
        """
        if len(data) < _HEADER.size or data[0] != PROTOCOL:
            raise ValueError(f"a notification of {len(data)} bytes is not of version {PROTOCOL} of the protocol")
        kind, tag, number, size, begin, span, address, device = _HEADER.unpack_from(data)[1:]
        return cls(FrameKind(kind), tag, number, size, begin, span, address, device, data[_HEADER.size :])
