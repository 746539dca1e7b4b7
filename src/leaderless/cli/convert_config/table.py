"""How a setting of another framework becomes one of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from leaderless.config.source import Setting

Values = Mapping[str, Setting]
"""Settings of the other framework by dotted key."""
Made = Mapping[str, Setting]
"""Settings of a recipe by dotted key."""
LOGGERS: Mapping[str, str] = {"tensorboard": "", "wandb": "project", "mlflow": "experiment", "trackio": "project"}
"""Loggers by name, and the option of each that is the name of the project."""


class NotTakenError(ValueError):
    """A value has no counterpart; the text says why, and what to do."""


@dataclass(frozen=True)
class Row:
    """One key of the other framework, and what it becomes."""

    theirs: str  # dotted key of the other framework
    ours: str = ""  # key of the recipe, or several with commas; empty if there is none
    default: Setting = None  # where a configuration does not have the key; None if the recipe's default is as good
    meaning: str = ""  # change of the value, or reason why there is no such setting
    # From the value, and all others, to settings of the recipe.
    convert: Callable[[Setting, Values], Made] | None = None
    is_needless: bool = False  # whether nothing is lost without the key

    def made(self, value: Setting, values: Values) -> Made:
        """The settings of the recipe that a value becomes; a NotTakenError if it has no counterpart."""
        if self.convert is not None:
            return self.convert(value, values)
        return {self.ours: value} if self.ours else {}


def number(value: Setting, key: str) -> float:
    """A number, which YAML may have read as text, such as 1e-6; a NotTakenError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise NotTakenError(f"{key}={value!r} is not a number")
    try:
        return float(value)
    except ValueError as error:
        raise NotTakenError(f"{key}={value!r} is not a number") from error


def whole(value: Setting, key: str) -> int:
    """A whole number; a NotTakenError if it is none."""
    found = number(value, key)
    if found != int(found):
        raise NotTakenError(f"{key}={value!r} is not a whole number")
    return int(found)


def is_on(value: Setting) -> bool:
    """Whether a switch is on, which a command line may write as text."""
    return value is True or str(value).lower() == "true"


def as_number(theirs: str, ours: str, default: Setting = None, meaning: str = "") -> Row:
    """A row for a number that stays as it is."""
    return Row(theirs, ours, default, meaning, lambda value, _: {ours: number(value, theirs)})


def as_whole(theirs: str, ours: str, default: Setting = None, meaning: str = "") -> Row:
    """A row for a whole number that stays as it is."""
    return Row(theirs, ours, default, meaning, lambda value, _: {ours: whole(value, theirs)})


def as_switch(theirs: str, ours: str, default: Setting = None, meaning: str = "") -> Row:
    """A row for a switch that stays as it is."""
    return Row(theirs, ours, default, meaning, lambda value, _: {ours: is_on(value)})


def as_name(theirs: str, ours: str, names: Mapping[str, Made], default: Setting, meaning: str) -> Row:
    """A row for one of several names, each of which becomes some settings."""

    def convert(value: Setting, _: Values) -> Made:
        if str(value) not in names:
            raise NotTakenError(f"{theirs}={value!r} has no counterpart; there is one for {', '.join(names)}")
        return names[str(value)]

    return Row(theirs, ours, default, meaning, convert)


def as_limit(theirs: str, ours: str) -> Row:
    """A row for a number of which -1 and null stand for none."""

    def convert(value: Setting, _: Values) -> Made:
        return {} if value is None or whole(value, theirs) < 0 else {ours: whole(value, theirs)}

    return Row(theirs, ours, convert=convert)


def part(theirs: str, ours: str, default: Setting = None, meaning: str = "") -> Row:
    """A row for a value that another row takes into account."""
    return Row(theirs, ours, default, meaning, lambda *_: {})


def as_optional(theirs: str, ours: str, read: Callable[[Setting, str], float] = number) -> Row:
    """A row for a number of which null stands for none."""

    def convert(value: Setting, _: Values) -> Made:
        if value is None:
            return {}
        found = read(value, theirs)
        return {ours: int(found) if found == int(found) else found}

    return Row(theirs, ours, convert=convert)


def warmup_share(key: str, share: float, num_updates: int | None) -> Made:
    """A warm-up that is a share of all updates; a NotTakenError if the number of updates is not known."""
    if not share:
        return {}
    if num_updates is None:
        raise NotTakenError(f"{key}={share:g} of an unknown number: set optimizer.warmup_updates")
    return {"optimizer.warmup_updates": int(share * num_updates)}


def as_loggers(theirs: str, names: Collection[str], project: str) -> Row:
    """A row for trackers by name, one or a list, without the names whose files are written anyway.

    `project` is the key of the other framework that names the project.
    """

    def convert(value: Setting, values: Values) -> Made:
        found: list[Setting] = []
        for name in dict.fromkeys(texts(value)) if value is not None else ():
            if name in names:
                continue
            if name not in LOGGERS:
                raise NotTakenError(
                    f"{theirs}={value!r}: there is no logger {name!r}, but there are {', '.join(LOGGERS)}; write "
                    "one of your own, see the guide of loggers"
                )
            given, option = values.get(project), LOGGERS[name]
            options: Setting = {option: str(given)} if option and given is not None else {}
            found.append({"type": name, "options": options} if options else name)
        return {"loggers": found}

    return Row(theirs, "loggers", None, f"with `{project}`, as their project", convert)


def needless(reason: str, keys: str, prefix: str = "") -> list[Row]:
    """Rows for keys, with blanks between them, whose effect is there without a setting."""
    return [Row(prefix + key, meaning=reason, is_needless=True) for key in keys.split()]


def absent(reason: str, keys: str, prefix: str = "") -> list[Row]:
    """Rows for keys, with blanks between them, without a counterpart."""
    return [Row(prefix + key, meaning=reason) for key in keys.split()]


def texts(value: Setting) -> Sequence[str]:
    """Texts of a list, or the one that is given."""
    return [str(one) for one in as_list(value)]


def as_list(value: Setting) -> Sequence[Setting]:
    """The entries of a list, or the one that is given."""
    return cast("Sequence[Setting]", value) if isinstance(value, list | tuple) else [value]
