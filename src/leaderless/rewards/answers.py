"""The expected answer of a row, for rewards that compare with it. Imports no torch."""

from __future__ import annotations

import math

from leaderless.config import Json


def expected_text(answer: Json) -> str:
    """The expected answer as text, without white space at its ends.

    Args:
        answer: The dataset's answer column: text or a finite number.

    Raises:
        ValueError: There is none, or it is neither: such a row cannot be graded.
    """
    if answer is None:
        raise ValueError("the row has no expected answer; `answer` of the dataset must name the column that holds it")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the expected answer is a {type(answer).__name__}, but must be text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"the expected answer is {answer}, but must be finite")
    text = str(answer).strip()
    if not text:
        raise ValueError("the expected answer is empty; leave out rows without one")
    return text
