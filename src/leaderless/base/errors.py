"""Errors of recipes, and hints for misspelled names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"]+")
_USER = re.compile(r"(?<=://)[^?#]*@")
_QUERY = re.compile(r"(?<=\?)[^#]+")


@dataclass(frozen=True)
class Problem:
    """A problem in a recipe.

    Attributes:
        key: Dotted path of the setting, as in `batch.prompts_per_step`; empty for the recipe as a whole.
        message: Rule that is broken, and remedy.
        place: File and line of the setting, or the override that set it; empty while unknown.
    """

    key: str
    message: str
    place: str = ""

    def __str__(self) -> str:
        """One line with place, key and message."""
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


class RecipeError(ValueError):
    """A recipe, workflow or layout that the user must correct; nothing has been started."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(Problem(*map(without_credentials, (one.key, one.message, one.place))) for one in problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, key: str, message: str) -> RecipeError:
        """The error for a single setting."""
        return cls([Problem(key, message)])

    def placed(self, place_of: Callable[[str], str]) -> RecipeError:
        """The same error, in which each problem has a place: its own, or the place of its key."""
        return RecipeError(
            [problem if problem.place else replace(problem, place=place_of(problem.key)) for problem in self.problems]
        )

    def noted(self, note: str) -> RecipeError:
        """The same error, in which each message ends with a note."""
        return RecipeError([replace(problem, message=problem.message + note) for problem in self.problems])


def without_credentials(text: str) -> str:
    """A text in which addresses show neither user and password nor the values of a query."""
    return _ADDRESS.sub(lambda found: _QUERY.sub("***", _USER.sub("***@", found[0])), text)


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint ` (did you mean 'x'?)` for a misspelled name, else the list of known names if it is short."""
    known = sorted(known)
    close = closest(word, known)
    if close is not None:
        return f" (did you mean '{close}'?)"
    if len(known) <= 12:
        return f" (known: {', '.join(known) or 'none'})"
    return ""


def closest(word: str, known: Sequence[str], similarity: float = 0.55) -> str | None:
    """The first known name that is most similar to a misspelled one; two swapped neighbors are one mistake."""
    from rapidfuzz import process
    from rapidfuzz.distance import OSA

    found = process.extractOne(word, known, scorer=OSA.normalized_similarity, score_cutoff=similarity)
    return found[0] if found else None
