"""Custom functions and classes, named as `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from leaderless.base.errors import RecipeError, nearest

Base = TypeVar("Base")
Contract = TypeVar("Contract")
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Declarations(Generic[Contract]):
    """Functions of one kind that recipes and workflows name, each with a contract that a decorator gives to it.

    Attributes:
        noun: Name of the kind, for errors.
        contract: Type of the contracts.
        decorator: Decorator of custom functions, as a user writes it.
        num_arguments: Number of arguments of such a function.
    """

    noun: str
    contract: type[Contract]
    decorator: str
    num_arguments: int = 1

    def declare(self, function: Function, contract: Contract) -> Function:
        """Give a function its contract, and return it."""
        setattr(function, self._attribute, contract)
        return function

    def find(self, name: str, key: str, built_in: Mapping[str, Contract]) -> Contract:
        """The contract of a built-in function, or of a custom one named as `package.module:function`.

        Raises:
            RecipeError: There is no such function, or it has no such contract; the error is at the setting `key`.
        """
        if name in built_in:
            return built_in[name]
        if not is_function_name(name):
            hint = nearest(name, built_in)
            raise RecipeError.at(key, f"unknown {self.noun} '{name}'{hint}; a custom one is 'package.module:function'")
        contract = getattr(load_function(name, key, self.num_arguments), self._attribute, None)
        if not isinstance(contract, self.contract):
            raise RecipeError.at(key, f"'{name}' must be declared with {self.decorator}")
        return contract

    @property
    def _attribute(self) -> str:
        return f"__leaderless_{self.contract.__name__}__"


def name_of(function: Callable[..., object]) -> str:
    """The name of a function or class, as `package.module:function`."""
    return f"{function.__module__}:{function.__qualname__}"


def is_function_name(name: str) -> bool:
    """Whether a name has the form `package.module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_function(name: str, key: str, num_arguments: int) -> Callable[..., object]:
    """Import a user's function, and check that it takes the number of positional arguments that it will get.

    Raises:
        RecipeError: It cannot be imported or called so; the error is at the setting `key`, which names the function.
    """
    function = load_callable(name, key, "function")
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
    found = load_callable(name, key, "class")
    if not isinstance(found, type) or not issubclass(found, base):
        raise RecipeError.at(key, f"'{name}' must be a class derived from {base.__module__}.{base.__qualname__}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise RecipeError.at(key, f"class '{name}' must have the method {', '.join(missing)}")
    return found


def load_own(name: str) -> object:
    """Import what a table of this package names, as `package.module:function`."""
    module, _, attribute = name.partition(":")
    found: object = getattr(import_module(module), attribute)
    return found


def load_callable(name: str, key: str, kind: str) -> Callable[..., object]:
    """Import what a name means, a function or a class.

    Args:
        name: Name of the form `package.module:function`.
        key: Setting that names it, for errors.
        kind: Word for what it must be, for errors.

    Raises:
        RecipeError: It cannot be imported.
    """
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


def check_options(function: Callable[..., object], options: Mapping[str, object], key: str) -> None:
    """Refuse options that a user's class or function does not take.

    Raises:
        RecipeError: It does not take them; the error is at the setting `key`.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise RecipeError.at(key, f"{name}{signature} does not take them: {error}") from error
