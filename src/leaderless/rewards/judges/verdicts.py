"""Questions to a judge, the verdicts in its answers, which may be any text, and their worth. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import regex

from leaderless.base.named_functions import load_function
from leaderless.base.values import Json
from leaderless.config.judges import PLACE, JudgeOptions, ParseConfig
from leaderless.rewards.protocol import RewardInput

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
Message = Mapping[str, str]
"""A message of a chat: its `role` and `content`."""


def messages_for(options: JudgeOptions, sample: RewardInput, more: Mapping[str, str]) -> tuple[Message, ...]:
    """Question to a judge about a response, with further texts for places of the template.

    Raises:
        ValueError: The row lacks something that the template shows.
    """
    system = [{"role": "system", "content": _filled(options.system, sample, more)}] if options.system else []
    return (*system, {"role": "user", "content": _filled(options.template, sample, more)})


def scale_of(options: JudgeOptions) -> dict[str, str]:
    """Texts for the places of a scale, and of a rubric: its criteria, and a JSON object with a number for each."""
    low, high = options.scale
    middle = (low + high) / 2
    form = dict.fromkeys(options.rubric, int(middle) if middle.is_integer() else middle)
    criteria = "\n".join(f"- {name}: {one.text}" for name, one in options.rubric.items())
    texts = {"low": f"{low:g}", "high": f"{high:g}"}
    return texts | {"rubric": criteria, "form": json.dumps(form)} if form else texts


def _filled(template: str, sample: RewardInput, more: Mapping[str, str]) -> str:
    """A template with texts in its places; what a text has in braces stays as it is."""

    def text(found: re.Match[str]) -> str:
        doubled, name = found.groups()
        if doubled is not None:
            return f"{{{doubled}}}"
        return more[name] if name in more else _text_at(name, sample)

    return PLACE.sub(text, template)


def _text_at(name: str, sample: RewardInput) -> str:
    if name == "prompt":
        return text_of(sample.prompt)
    if name == "response":
        return sample.response
    if name == "transcript":
        parts = sample.transcript
        if len(parts) == 1:
            return parts[0].text
        return "\n\n".join(f"[{'policy' if one.is_sampled else 'environment'}]\n{one.text}" for one in parts)
    if name == "answer":
        if sample.answer is None:
            raise ValueError("the judge is shown {answer}, but the row has none: name its column as `answer` of data")
        return text_of(sample.answer)
    if name not in sample.row:
        known = ", ".join(sample.row) or "none"
        raise ValueError(f"the judge is shown {{{name}}}, but the row has no such column (it has {known})")
    return text_of(sample.row[name])


def text_of(value: Json) -> str:
    """A value of a row as a judge reads it: text as it is, messages one below the other, all else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(one) for one in value):
        return "\n\n".join(f"[{one['role']}]\n{_content(one['content'])}" for one in value if isinstance(one, Mapping))
    return json.dumps(value, ensure_ascii=False)


def _is_message(value: Json) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _content(value: Json) -> str:
    """The text of a message; images are left out."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [one.get("text", "") for one in value if isinstance(one, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    return text_of(value)


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
        found = next((one for one in objects_in(text) if one.keys() & options.rubric.keys()), {})
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
    found = next((one for one in objects_in(text) if name in one), None)
    if found is None:
        raise VerdictError(f"there is no JSON object with the field '{name}'")
    return found[name]


def objects_in(text: str) -> Iterator[Mapping[str, object]]:
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


@dataclass(frozen=True)
class Pair:
    """Two different responses of a group, by their places among all."""

    first: int
    second: int


def pairs_of(responses: Sequence[str], group: Sequence[int], opponents: int) -> list[Pair]:
    """The comparisons of a group, by the places of its responses among all.

    Different responses are put into the order of a hash, as a ring, and each is compared with those that follow it, as
    many as there are opponents. So the comparisons depend on the responses alone, neither on their order nor on ranks.
    """

    def digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    place_of = {responses[place]: place for place in reversed(group)}
    ring = [place_of[text] for text in sorted(place_of, key=digest)]
    found: dict[frozenset[int], Pair] = {}
    for distance in range(1, min(opponents, len(ring) - 1) + 1):
        for number, place in enumerate(ring):
            pair = Pair(place, ring[(number + distance) % len(ring)])
            found.setdefault(frozenset({pair.first, pair.second}), pair)
    return list(found.values())


def outcome_of(straight: Choice, swapped: Choice) -> tuple[float, bool]:
    """Value of the first response of a pair, and whether the judge has said the same both times.

    It was asked with the first response in the first place, and with both swapped.
    """
    turned: Mapping[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}
    agrees = straight == turned[swapped]
    worth = {"first": 1.0, "second": 0.0, "tie": 0.5}
    return (worth[straight] if agrees else 0.5), agrees


def win_rates(pairs: Sequence[tuple[Pair, float]]) -> dict[int, float]:
    """The mean of what each response is worth in its comparisons, by its place; none for one without comparisons."""
    won: dict[int, list[float]] = {}
    for pair, worth in pairs:
        won.setdefault(pair.first, []).append(worth)
        won.setdefault(pair.second, []).append(1.0 - worth)
    return {place: sum(values) / len(values) for place, values in won.items()}
