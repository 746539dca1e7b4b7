"""An interpreter that executes one piece of code after another. Imports no torch."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
from types import ModuleType, TracebackType

_FILE_NAME = "<call {}>"


def interpret(asks: int, code: int, replies: int) -> None:
    """Execute code whenever asked, until the asking end is closed.

    Args:
        asks: File descriptor on which one byte asks for one call.
        code: File descriptor of a file that holds the code of the call.
        replies: File descriptor that gets one byte when the call has ended.
    """
    own, number = os.getpid(), 0
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    while os.read(asks, 1):
        number += 1
        # The code before may have closed or replaced them.
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        output = sys.stdout
        source = os.pread(code, os.fstat(code).st_size, 0).decode()
        _execute(source, vars(module), _FILE_NAME.format(number))
        if not output.closed:
            output.flush()
        if os.getpid() != own:
            os._exit(0)  # a process that the code has started, and that has come to the end of the code
        os.write(replies, b".")


def _execute(source: str, names: dict[str, object], file: str) -> None:
    """Execute code, and print the value of its last expression, or the error."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    try:
        tree = ast.parse(source, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file, "exec", dont_inherit=True), names)  # noqa: S102 - confined, for this
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval", dont_inherit=True), names)  # noqa: S307
            if value is not None:
                names["_"] = value
                print(repr(value))  # noqa: T201 - what an interpreter does
    except BaseException as error:  # noqa: BLE001 - the boundary of the code: told as an interpreter does
        lines = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
        print("".join(lines), end="")  # noqa: T201


def _own_frames(found: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the code."""
    while found is not None and not found.tb_frame.f_code.co_filename.startswith("<call "):
        found = found.tb_next
    return found
