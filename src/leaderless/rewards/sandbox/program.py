"""Runs the source of a program inside a confined process. Imports no torch."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from types import ModuleType

FILE_NAME = "program.py"


def run_as_script(source: str) -> None:
    """Run a program as `python program.py` would, and end this process with its exit code.

    Args:
        source: Source of the program.
    """
    sys.argv = [FILE_NAME]
    code = 0
    try:
        execute(source, "__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the boundary of the program: reported as an interpreter does
        traceback.print_exc()
        code = 1
    finally:
        leave(code)


def execute(source: str, name: str) -> ModuleType:
    """Execute a program as a module of this interpreter.

    Args:
        source: Source of the program.
        name: Name of the module.

    Returns:
        The module with what the program defined.
    """
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, FILE_NAME, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - confined, for this
    return module


def leave(code: int) -> None:
    """End this process as an interpreter ends; the supervisor's own clean-up, which it was forked with, is not run.

    Args:
        code: Exit code.
    """
    try:
        if "threading" in sys.modules:
            threading = sys.modules["threading"]
            for thread in threading.enumerate():
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join()
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no other way to call them
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
