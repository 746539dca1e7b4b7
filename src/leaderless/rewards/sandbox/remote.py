"""Tests, and the program that they test, in two processes that exchange plain values over two pipes.

The tests see built-in values, or `Remote` objects that stand for the program's own objects. So the program can do what
it likes to its interpreter (`sys.exit`, `AssertionError`, `__eq__`, its stack) without an effect on the tests, and the
values that the tests expect are not in its memory. Imports no torch.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TextIO

from .confined import execute  # relative, for the supervisor runs without the package

Wire = None | bool | int | float | str | list["Wire"]
"""JSON; the first item of a list is the name of the type that it stands for."""
_Message = Mapping[str, Any]

_LARGEST_PLAIN_INT = 2**63
_ITEMS: Mapping[type, Callable[..., Iterator[object]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
"""The types' own iterators, as a subclass's may show other items."""


class UnfitTestError(BaseException):
    """A test does something that is impossible across processes; no `except` in a test should hide it."""


def encode(value: object, refer: Callable[[object], int]) -> Wire:
    """A value as JSON; subclasses of built-in types become these types, and `refer` gives other objects a number."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < _LARGEST_PLAIN_INT else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return ["complex", complex.__complex__(value).real, complex.__complex__(value).imag]
    if isinstance(value, bytes | bytearray):
        return [("bytes" if isinstance(value, bytes) else "bytearray"), bytes(memoryview(value)).hex()]
    for kind, items in _ITEMS.items():
        if isinstance(value, kind):
            return [kind.__name__, *(encode(item, refer) for item in items(value))]
    if isinstance(value, dict):
        return ["dict", *(encode(part, refer) for pair in dict.items(value) for part in pair)]
    return ["object", refer(value)]


def decode(wire: Wire, find: Callable[[int], object]) -> object:
    """The value that `encode` was given; `find` gives the object of a number."""
    if not isinstance(wire, list):
        return wire
    kind, *parts = wire
    if kind == "object":
        return find(operator.index(parts[0]))  # type: ignore[arg-type]
    if kind == "int":
        return int(str(parts[0]), 16)
    if kind in {"bytes", "bytearray"}:
        return getattr(builtins, str(kind)).fromhex(parts[0])
    if kind == "complex":
        return complex(*map(float, parts))  # type: ignore[arg-type]
    values = [decode(part, find) for part in parts]
    if kind == "dict":
        return dict(zip(values[::2], values[1::2], strict=True))
    makers: Mapping[str, Callable[[list[object]], object]] = {maker.__name__: maker for maker in _ITEMS}
    return makers[str(kind)](values)


_OPERATIONS: Mapping[str, Callable[..., object]] = {
    **{name: getattr(builtins, name) for name in ("isinstance", "getattr", "setattr", "len", "iter", "next")},
    **{name: getattr(builtins, name) for name in ("repr", "str", "bool")},
    **{name: getattr(operator, name) for name in ("call", "getitem", "setitem", "eq", "lt", "le", "gt", "ge")},
}


def serve(source: str, requests: int, replies: int) -> None:
    """Execute a program, and then the tests' requests on its objects until the tests end.

    Requests and replies are lines of JSON, read from and written to file descriptors.
    """
    objects: list[object] = []

    def refer(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    def work(request: _Message) -> _Message:
        arguments = [decode(part, objects.__getitem__) for part in request["arguments"]]
        named = {name: decode(part, objects.__getitem__) for name, part in request["named"].items()}
        value = _OPERATIONS[request["operation"]](*arguments, **named)
        # A function may have changed its arguments, which are copies here.
        return {"value": encode(value, refer), "arguments": ["list", *(encode(item, refer) for item in arguments)]}

    with os.fdopen(requests, encoding="ascii") as asked, os.fdopen(replies, "w", encoding="ascii") as told:
        _send(told, _guarded(lambda: _names(execute(source, "program"), refer)))
        for line in asked:
            _send(told, _guarded(partial(work, json.loads(line))))


def _names(module: ModuleType, refer: Callable[[object], int]) -> _Message:
    """The names that the program defined. Modules are only named, so that the tests import genuine ones."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {name: encode(value, refer) for name, value in public.items() if not isinstance(value, ModuleType)}
    modules = [name for name, value in public.items() if isinstance(value, ModuleType) and value.__name__ == name]
    return {"value": own, "modules": modules}


def _guarded(work: Callable[[], _Message]) -> _Message:
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - the boundary of the program: sent to the tests
        return {"error": [type(error).__name__, str(error)]}


def _send(pipe: TextIO, message: _Message) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


class _Channel:
    """The tests' end of the pipes."""

    def __init__(self, replies: TextIO, requests: TextIO) -> None:
        self._replies, self._requests = replies, requests

    def names(self) -> dict[str, object]:
        """The public names that the program defined; built-in functions stay what they are."""
        reply = self._receive()
        names: dict[str, object] = {}
        for name in reply["modules"]:
            if name in sys.stdlib_module_names:
                names[name] = __import__(name)
        for name, wire in reply["value"].items():
            if not name.startswith("_") and not hasattr(builtins, name):
                names[name] = decode(wire, self._remote)
        return names

    def ask(self, operation: str, *arguments: object, **named: object) -> object:
        """Have the program's process do something."""
        request = {
            "operation": operation,
            "arguments": [encode(argument, _number_of) for argument in arguments],
            "named": {name: encode(value, _number_of) for name, value in named.items()},
        }
        _send(self._requests, request)
        reply = self._receive()
        if operation == "call":
            _copy_back(arguments, decode(reply["arguments"], self._remote))
        return decode(reply["value"], self._remote)

    def _remote(self, number: int) -> object:
        return Remote(self, number)

    def _receive(self) -> _Message:
        line = self._replies.readline()
        if not line:
            raise EOFError("the program's process has ended")
        reply = json.loads(line)
        if "error" in reply:
            name, text = reply["error"]
            kind = getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
                raise kind(text)
            raise RuntimeError(f"{name}: {text}")
        return dict(reply)


def _copy_back(originals: Sequence[object], states: object) -> None:
    """Give the arguments of a call the state that they have after it."""
    assert isinstance(states, list)
    for original, state in zip(originals, states, strict=True):
        if isinstance(original, list | bytearray) and type(state) is type(original):
            original[:] = state
        elif isinstance(original, dict | set) and isinstance(state, dict | set) and type(state) is type(original):
            original.clear()
            original.update(state)


class Remote:
    """One of the program's own objects, such as a function or class, as the tests see it.

    It equals other objects of the program if the program says so, but no value of a built-in type: so an object that
    claims to equal everything is never asked about the value that a test expects.
    """

    __slots__ = ("_channel", "_number")
    _channel: _Channel
    _number: int

    def __init__(self, channel: _Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **named: object) -> object:
        """Call what this stands for."""
        return self._channel.ask("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> object:
        return self._channel.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._channel.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self._channel.ask("eq", self, other) is True
        encode(other, _number_of)  # Raises if a test expects a value that a program cannot send.
        return False

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self._channel.ask("isinstance", instance, self) is True


def _forward(operation: str, *, is_among_remotes: bool = False) -> Callable[..., object]:
    def method(self: Remote, *arguments: object) -> object:
        if is_among_remotes and not isinstance(arguments[0], Remote):
            return NotImplemented
        return self._channel.ask(operation, self, *arguments)

    return method


for _name in ("getitem", "setitem", "len", "iter", "next", "repr", "str", "bool"):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _forward(_name, is_among_remotes=True))


def _number_of(value: object) -> int:
    if isinstance(value, Remote):
        return value._number  # noqa: SLF001 - the two belong together
    raise UnfitTestError(f"passes or expects a {type(value).__name__}, but only built-in values reach the program")


def judge(pieces: Sequence[tuple[str, str]], replies: int, requests: int, report: int) -> None:
    """Run tests (see `TestRequest`), and report on each of them as it ends.

    The report, a file descriptor that only this process and the supervisor have, gets one line of JSON for each test:
    true or false, or the reason why the tests cannot be run, as text.
    """
    with (
        os.fdopen(replies, encoding="ascii") as told,
        os.fdopen(requests, "w", encoding="ascii") as asked,
        os.fdopen(report, "w", encoding="ascii") as verdicts,
    ):
        try:
            names = _Channel(told, asked).names() | {"__name__": "tests"}
        except Exception:  # noqa: BLE001 - the program cannot even be loaded, or sends nonsense
            return
        for source, kind in pieces:
            verdict = _verdict(source, names, kind)
            if kind == "test" or isinstance(verdict, str):
                verdicts.write(json.dumps(verdict) + "\n")
                verdicts.flush()
            if isinstance(verdict, str):
                return


def _verdict(source: str, names: dict[str, object], kind: str) -> bool | str:
    try:
        exec(compile(source, "tests.py", "exec", dont_inherit=True), names)  # noqa: S102 - confined, for this
    except UnfitTestError as error:
        return f"a test {error}"
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, it has not passed
        if kind == "import":
            return f"cannot import what it needs ({error}); only the standard library is there"
        return False
    return True
