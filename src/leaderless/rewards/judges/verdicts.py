"""Reads verdicts in the answers of a judge, which may be any text. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import regex

from leaderless.base.named_functions import load_function
from leaderless.config.judges import JudgeOptions, ParseConfig

Choice = Literal["first", "second", "tie"]
Finder = Callable[[str], object]
"""Function that finds a verdict in a text, and raises `VerdictError` if there is none."""
MAX_OBJECTS = 200
"""Largest number of places at which a JSON object is looked for, from the end of a text."""
SEARCH_S = 1.0
"""Longest time, in seconds, for which a pattern is searched in a text. A pattern can need time that is exponential in
the length of the text, and verdicts are read by threads of the worker."""
MAX_SHOWN = 120
"""Characters of a text that an error shows."""
_CHOICES: Mapping[str, Choice] = {"A": "first", "B": "second", "1": "first", "2": "second", "TIE": "tie"}


class VerdictError(ValueError):
    """The answer of a judge cannot be read as a verdict."""


def score_reader(options: JudgeOptions, key: str) -> Callable[[str], float]:
    """The function that reads a score, as a number from 0 to 1."""
    find = _finder(options.parsing, f"{key}.parse.function")
    is_text = bool(options.parsing.pattern)
    return lambda text: _number(find(text), options.scale, "the score", is_text=is_text)


def rubric_reader(options: JudgeOptions) -> Callable[[str], dict[str, float]]:
    """The function that reads the scores of a rubric, as numbers from 0 to 1 by criterion."""

    def read(text: str) -> dict[str, float]:
        found = next((one for one in _objects(text) if one.keys() & options.rubric.keys()), {})
        for name in options.rubric:
            if name not in found:
                raise VerdictError(f"there is no JSON object with a number for '{name}'")
        return {
            name: _number(found[name], options.scale, f"the score for '{name}'", is_text=False)
            for name in options.rubric
        }

    return read


def choice_reader(options: JudgeOptions, key: str) -> Callable[[str], Choice]:
    """The function that reads which of two responses is better. See `score_reader`."""
    find = _finder(options.parsing, f"{key}.parse.function")

    def read(text: str) -> Choice:
        verdict = find(text)
        choice = _CHOICES.get(str(verdict).strip().upper())
        if choice is None:
            raise VerdictError(f"the verdict is {_shown(verdict)}, but must be A, B or tie")
        return choice

    return read


def _finder(parsing: ParseConfig, key: str) -> Finder:
    if parsing.pattern:
        return lambda text: _matched(parsing.pattern, text)
    if parsing.json_field:
        return lambda text: _field(parsing.json_field, text)
    function = load_function(parsing.function, key, num_arguments=1)

    def find(text: str) -> object:
        try:
            return function(text)
        except Exception as error:
            raise VerdictError(f"{parsing.function} raised {type(error).__name__}: {error}") from error

    return find


def _matched(pattern: str, text: str) -> str:
    """The first group of the last match in which it took part."""
    try:
        # Other threads continue meanwhile.
        matches = [*regex.finditer(pattern, text, timeout=SEARCH_S, concurrent=True)]
    except TimeoutError:
        raise VerdictError(
            f"the search for '{pattern}' took more than {SEARCH_S:g} s: write it without repetitions of repetitions"
        ) from None
    found = next((match[1] for match in reversed(matches) if match[1] is not None), None)
    if found is None:
        raise VerdictError(f"nothing matches '{pattern}'")
    return str(found)


def _field(name: str, text: str) -> object:
    found = next((one for one in _objects(text) if name in one), None)
    if found is None:
        raise VerdictError(f"there is no JSON object with the field '{name}'")
    return found[name]


def _objects(text: str) -> Iterator[Mapping[str, object]]:
    """The JSON objects in a text, the last one first, and each before those inside of it."""
    decoder, ends = json.JSONDecoder(), []
    found: list[tuple[int, int, Mapping[str, object]]] = []
    for place in [one.start() for one in re.finditer(r"\{", text)][-MAX_OBJECTS:]:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append((place, end, value))
            ends.append(end)
    # An object that is a part of another ends before it does.
    yield from (value for _, _, value in sorted(found, key=lambda one: (-one[1], one[0])))


def _number(value: object, scale: tuple[float, float], what: str, *, is_text: bool) -> float:
    """A number on a scale, as one from 0 to 1."""
    if is_text:
        try:
            value = float(str(value))
        except ValueError:
            raise VerdictError(f"{what} is {_shown(value)}, but must be a number") from None
    if isinstance(value, str):
        raise VerdictError(
            f"{what} is the text {_shown(value)}, but must be a number: have the prompt ask for a number without "
            "quotes, or find it with parse: {pattern: ...}"
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerdictError(f"{what} is {_shown(value)}, but must be a number")
    low, high = scale
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:
        raise VerdictError(f"{what} is {_shown(value)}, but must be from {low:g} to {high:g}, as `scale` says")
    return (number - low) / (high - low)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
