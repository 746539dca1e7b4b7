"""Custom functions and classes, named as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from leaderless.config.errors import RecipeError, nearest

Base = TypeVar("Base")


def is_function_name(name: str) -> bool:
    """Whether a name has the form `package.module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(name: str, key: str, num_arguments: int) -> Callable[..., object]:
    """Import a user's function, and check that it takes the number of positional arguments that it will get.

    Raises:
        RecipeError: It cannot be imported or called so; the error is at the setting `key`, which names the function.
    """
    function = _find(name, key, "function")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RecipeError.at(key, f"'{name}' must be a function written in Python") from error
    try:
        signature.bind(*range(num_arguments))
    except TypeError as error:
        call = f"{num_arguments} positional argument" + ("" if num_arguments == 1 else "s")
        short = name.rpartition(":")[2]
        raise RecipeError.at(key, f"{short}{signature} must be callable with {call}: {error}") from error
    return function


def load_class(name: str, key: str, base: type[Base]) -> type[Base]:
    """Import a user's class, and check that it can be used in place of a base class.

    Raises:
        RecipeError: It cannot be imported, derives from another class, or leaves out a method; the error is at the
            setting `key`, which names the class.
    """
    found = _find(name, key, "class")
    if not isinstance(found, type) or not issubclass(found, base):
        raise RecipeError.at(key, f"'{name}' must be a class derived from {base.__module__}.{base.__qualname__}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise RecipeError.at(key, f"class '{name}' must have the method {', '.join(missing)}")
    return found


def _find(name: str, key: str, kind: str) -> Callable[..., object]:
    """The function or class of a name."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecipeError.at(key, f"module '{module_name}' cannot be imported: {reason}") from error
    found: object = getattr(module, attribute, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise RecipeError.at(key, f"module '{module_name}' has no {kind} '{attribute}'{nearest(attribute, known)}")
    return found
