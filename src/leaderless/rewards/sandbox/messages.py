"""Messages between a supervisor and the process that has started it, its owner. Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict


class SandboxError(RuntimeError):
    """The sandbox does not work on this machine, or its supervisor has ended: nothing that a program does is one."""


class SandboxLimits(NamedTuple):
    """Limits of one run of a program, or of one call of an interpreter.

    They are the settings of `reward.code` that have these names. Files count over all calls of an interpreter.
    """

    test_timeout_s: float
    memory_mib: int
    max_processes: int
    max_files: int
    max_file_bytes: int
    max_output_bytes: int


class Setting(NamedTuple):
    """Surroundings of programs.

    Attributes:
        scratch: Empty folder, in which each process has a folder of its own.
        readable: The interpreter's files and folders, which a program may read.
        listable: Folders whose names it may list.
        landlock: Version of the kernel's Landlock; 0 to do without.
        has_filter: Whether system calls are filtered.
        has_listener: Whether created processes and files are counted; without, nothing may be created.
    """

    scratch: str
    readable: tuple[str, ...]
    listable: tuple[str, ...]
    landlock: int
    has_filter: bool
    has_listener: bool


class ProgramEnd(NamedTuple):
    """How a run or a call ended.

    Attributes:
        cause: `answered` (a call after which the interpreter continues), `exited`, `timeout` or `output` (it printed
            too much).
        code: Exit code, negative for the signal that ended it; meaningful for `exited` only.
        output: Standard output, with replacements for bytes that are no UTF-8.
        passed: Outcome of each test that ended; empty for a script.
        unfit: Reason why the tests themselves cannot be run; empty if they can.
    """

    cause: str
    code: int
    output: str
    passed: tuple[bool, ...] = ()
    unfit: str = ""


class SandboxOrder(TypedDict):
    """First message of the owner: a program, with a `Setting` and `SandboxLimits` as lists.

    One `TestRequest` follows for a trial; else any number of `ScriptRequest`s, or of `CallRequest`s for an interpreter,
    which begins with no program.
    """

    setting: list[str | int | list[str]]
    limits: list[float]
    program: str
    kind: Literal["script", "trial", "interpreter"]


class ScriptRequest(TypedDict):
    """Asks to run the program as a script with an input, until a deadline by the monotonic clock."""

    input: str
    deadline: float


class TestRequest(TypedDict):
    """Asks to test what the program defines, until a deadline by the monotonic clock.

    The statements are in their order, each with its kind: `test`, or `import` and `other` for what tests need.
    """

    pieces: list[tuple[str, str]]
    deadline: float


class CallRequest(TypedDict):
    """Asks an interpreter to execute code."""

    code: str
