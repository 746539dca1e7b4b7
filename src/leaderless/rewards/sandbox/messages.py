"""Messages between the grader and the supervisor: what a program may use, and how it ended. Imports no torch."""

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
        max_output_bytes: Bytes that it may print, on standard output and on standard error each.
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
        has_filter: Whether system calls are filtered.
        has_listener: Whether what is created is counted; without, nothing may be created.
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
        passed: Outcome of each test that came to an end; empty for a script.
        unfit: Reason why the tests themselves cannot be run; empty where they can.
    """

    cause: str
    code: int
    output: str
    passed: tuple[bool, ...] = ()
    unfit: str = ""


class Order(TypedDict):
    """First message of the grader.

    Attributes:
        setting: A `Setting`, as a list.
        limits: `Limits`, as a list.
        program: Source of the program.
        has_tests: Whether one `TestRequest` follows, or any number of `ScriptRequest`s.
    """

    setting: list[str | int | list[str]]
    limits: list[float]
    program: str
    has_tests: bool


class ScriptRequest(TypedDict):
    """Asks to run the program as a script.

    Attributes:
        input: Standard input of the program.
        deadline: End of the run at the latest, by the monotonic clock.
    """

    input: str
    deadline: float


class TestRequest(TypedDict):
    """Asks to test what the program defines.

    Attributes:
        pieces: Statements in their order, each with its kind: `test`, or `import` and `other` for what tests need.
        deadline: End of the tests at the latest, by the monotonic clock.
    """

    pieces: list[tuple[str, str]]
    deadline: float
