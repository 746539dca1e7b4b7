"""The record of a transition."""

from __future__ import annotations

from benchmarks.transitions.case import Case, Message, Way


class Transition(Message):
    """One measured transition.

    Attributes:
        way: Data path between the layouts.
        case: Rows and layouts.
        repeat: Number of the repeat, from 0.
        seconds: Time from when all ranks had their rows in the source layout until all had them in the target layout.
        sent: Bytes sent through each host's interface, as the kernel counts them.
        received: Bytes received, likewise.
        busiest_bytes: Bytes sent and received by the busiest interface.
        peak_bytes: Most memory that one process took, above what it had before.
        balance: Cost of the fullest consumer's rows, divided by the mean.
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
    """All measurements of a benchmark, and their conditions.

    Attributes:
        mbit_per_s: Bandwidth of each interface, in either direction.
        cores: Cores of the machine that all hosts share.
        versions: Versions of Python and of the libraries.
        transitions: Transitions in the order in which they were measured.
    """

    mbit_per_s: float
    cores: int
    versions: dict[str, str]
    transitions: tuple[Transition, ...]
