"""What a program may use, and how it ended: what the grader and the supervisor tell each other. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Limits(NamedTuple):
    """What one run of a program may use.

    Attributes:
        test_timeout_s: Seconds of the clock for one test, above 0.
        memory_mib: Address space of each of its processes.
        max_processes: Processes and threads that it may start.
        max_files: Files and folders that it may make.
        max_file_bytes: Size of each of its files.
        max_output_bytes: What it may print, on standard output and on standard error each.
    """

    test_timeout_s: float
    memory_mib: int
    max_processes: int
    max_files: int
    max_file_bytes: int
    max_output_bytes: int


class Setting(NamedTuple):
    """Where programs run.

    Attributes:
        scratch: Empty folder, in which each process has a folder of its own.
        readable: Files and folders that a program may read: the interpreter's own.
        listable: Folders whose names it may list.
        landlock: Version of the kernel's Landlock; 0 to do without.
        has_filter: Filter system calls.
        has_listener: Count what is created; without, nothing may be created.
    """

    scratch: str
    readable: tuple[str, ...]
    listable: tuple[str, ...]
    landlock: int
    has_filter: bool
    has_listener: bool


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        cause: `exited`, `timeout` or `output` (it printed too much).
        code: Exit code, negative for the signal that ended it; meaningful for `exited` only.
        output: What it printed on standard output, bytes that are no UTF-8 replaced.
        passed: Of each test that came to an end, whether it passed; empty for a run with input.
        unfit: Why the tests themselves cannot be run; empty where they can.
    """

    cause: str
    code: int
    output: str
    passed: tuple[bool, ...] = ()
    unfit: str = ""


class Order(TypedDict):
    """The first that the grader says.

    Attributes:
        setting: A `Setting`, as a list.
        limits: `Limits`, as a list.
        program: Source.
        has_tests: Whether a `Trial` follows, once, or a `Run` any number of times.
    """

    setting: list[str | int | list[str]]
    limits: list[float]
    program: str
    has_tests: bool


class Run(TypedDict):
    """Have the program run as a script.

    Attributes:
        input: Its standard input.
        deadline: When it ends at the latest, by the monotonic clock.
    """

    input: str
    deadline: float


class Trial(TypedDict):
    """Have what the program defines tested.

    Attributes:
        pieces: Statements in their order, each with its kind: `test`, or `import` and `other` for what tests need.
        deadline: When the tests end at the latest, by the monotonic clock.
    """

    pieces: list[tuple[str, str]]
    deadline: float
