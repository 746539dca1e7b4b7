"""What is written down of a transition."""

from __future__ import annotations

from benchmarks.transitions.case import Case, Message, Way


class Transition(Message):
    """One transition, measured.

    Attributes:
        way: How rows went from layout to layout.
        case: Which rows, and which layouts.
        repeat: From 0.
        seconds: From the moment when all had their rows under the one layout to that when all had them under the other.
        sent: Bytes through each host's interface, as the kernel counts them.
        received: Likewise.
        busiest_bytes: Both together, of the interface that most passed.
        peak_bytes: Most memory that one process took, above what it had before.
        balance: Cost of the fullest consumer's rows, in that of the mean.
        busy_cores: Mean number of the machine's cores in use, by whatever ran on it.
        shares: Fingerprint of every consumer's rows, in hexadecimal; not kept with the results.
    """

    way: Way
    case: Case
    repeat: int
    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    busiest_bytes: int
    peak_bytes: int
    balance: float
    busy_cores: float
    shares: tuple[str, ...] = ()


class Results(Message):
    """All that a benchmark has measured, and on what.

    Attributes:
        mbit_per_s: What each interface sends, and what it receives, at most.
        cores: Of the machine that all hosts share.
        versions: Of Python and of the libraries.
        transitions: In the order in which they were measured.
    """

    mbit_per_s: float
    cores: int
    versions: dict[str, str]
    transitions: tuple[Transition, ...]
