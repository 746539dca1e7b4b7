"""Several machines that train together. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Nodes:
    """How many machines may train together, and where they meet.

    Attributes:
        smallest: Number of machines that a run needs.
        largest: Number of machines that it can use.
        rendezvous: `HOST:PORT`, reachable from all; the machine of that name holds the store there.
    """

    smallest: int
    largest: int
    rendezvous: str

    @property
    def is_loopback(self) -> bool:
        """Whether all of them are this machine."""
        return self.rendezvous.rpartition(":")[0] in LOOPBACK

    @classmethod
    def parse(cls, text: str, rendezvous: str) -> Nodes:
        """Read what a command line says.

        Args:
            text: `MIN:MAX`, or one number for both.
            rendezvous: `HOST:PORT`.

        Raises:
            ValueError: One of them is not like that.
        """
        smallest, colon, largest = text.partition(":")
        numbers = (smallest, largest if colon else smallest)
        if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
            raise ValueError(f"--nodes {text}: must be a number of machines, or MIN:MAX with 1 <= MIN <= MAX, as 2:4")
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"--rendezvous {rendezvous!r}: must be HOST:PORT, the same on all machines, as node0:29500: "
                "the machine named there holds the store at which all meet"
            )
        return cls(int(numbers[0]), int(numbers[1]), rendezvous)
