"""Stations by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.embodied.robots.arm import Station

BUILT_IN: Mapping[str, str] = {
    "dummy": "leaderless.embodied.robots.simulated_arm:dummy",
    "franka": "leaderless.embodied.robots.franka:franka",
}
"""Functions that make stations and come with the package."""


def make_station(name: str, options: Mapping[str, Json]) -> Station:
    """The station that a name and options give.

    Args:
        name: Built-in name, or a function `package.module:function` that returns a `Station`.
        options: Keyword arguments of the function.

    Raises:
        RecipeError: There is no such station, or it does not take the options.
    """
    known = BUILT_IN.get(name, name)
    if not is_function_name(known):
        hint = nearest(name, BUILT_IN)
        raise RecipeError.at("", f"unknown robot '{name}'{hint}; a custom one is 'package.module:function'")
    make = load_callable(known, "", "function")
    try:
        inspect.signature(make).bind(**options)
        station = make(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError.at("--option", f"robot '{name}': {error}") from error
    if not isinstance(station, Station):
        raise RecipeError.at("", f"robot '{name}' returned {type(station).__name__}: return a `Station`")
    return station
