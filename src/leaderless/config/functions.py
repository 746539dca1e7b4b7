"""Custom functions, named as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

from leaderless.config.errors import RecipeError, nearest


def is_function_name(name: str) -> bool:
    """Whether a name has the form `package.module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(name: str, key: str, num_arguments: int) -> Callable[..., object]:
    """Import a user's function, and check that it takes the number of positional arguments that it will get.

    Raises:
        RecipeError: It cannot be imported or called so; the error is at the setting `key`, which names the function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecipeError.at(key, f"module '{module_name}' cannot be imported: {reason}") from error
    function: object = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, functions)
        raise RecipeError.at(key, f"module '{module_name}' has no function '{function_name}'{hint}")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RecipeError.at(key, f"'{name}' must be a function written in Python") from error
    try:
        signature.bind(*range(num_arguments))
    except TypeError as error:
        call = f"{num_arguments} positional argument" + ("" if num_arguments == 1 else "s")
        raise RecipeError.at(key, f"{function_name}{signature} must be callable with {call}: {error}") from error
    return function
