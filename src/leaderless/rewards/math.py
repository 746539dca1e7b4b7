"""The `math` reward: the final answer equals the expected one mathematically. Imports no torch."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache

from math_verify import parse, verify

from leaderless.rewards.answers import expected_text
from leaderless.rewards.canonical import Extracted, canonical
from leaderless.rewards.protocol import RewardInput, RewardResult

_MARKED = re.compile(r"\\boxed|\$|(?<!\\)\\[(\[]|answer", re.IGNORECASE)
"""What shows the library where the mathematics is in a text."""
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+|(?=\.\d))(\.\d*)?([eE][+-]?\d{1,3})?")
"""A number alone, as programs write it; the exponent is kept short, for all digits are written out."""
_FINAL_LINE = re.compile(r"^####([^\n]+)\Z", re.MULTILINE)
"""A last line as GSM8K ends its solutions."""

# The library warns in every process that its alarm is off; the pool's time limit stands in its place.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathReward:
    r"""1 where the response's final answer equals the expected one mathematically, else 0.

    The final answer of a response is its last line where that is `#### ...`, else what the `math-verify` library finds:
    what follows "final answer is", the last `\boxed{...}`, what follows "answer", the last formula or number.
    """

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        r"""Grade a response; 0 where it has no final answer.

        Args:
            sample: The response, and the expected answer: a number, or text that is the answer (`42`, `\frac{1}{2}`),
                marks it (`$x$`, `\boxed{x}`) or ends in it after `####`.

        Raises:
            ValueError: The expected answer is missing or cannot be parsed.
        """
        expected = _parse_expected(expected_text(sample.answer))
        found = _parse_response(sample.response.strip())
        if not found:
            return RewardResult(0.0)
        is_equal = verify(list(expected), list(found), timeout_seconds=None)
        return RewardResult(float(is_equal), canonical(found))


@lru_cache(maxsize=4096)
def _parse_expected(text: str) -> tuple[Extracted, ...]:
    """The expected answer, remembered because all responses to a prompt share it."""
    final = text.rpartition("####")[2].strip()
    found = _parse_answer(final)
    if not found:
        raise ValueError(f"the expected answer {_shorten(text)!r} cannot be parsed as mathematics")
    return found


def _parse_response(text: str) -> tuple[Extracted, ...]:
    line = _FINAL_LINE.search(text)
    return (_parse_answer(line[1].strip()) if line else ()) or _parse_text(text)


def _parse_answer(text: str) -> tuple[Extracted, ...]:
    """Parse a text that is nothing but an answer, or in which the answer is marked."""
    if not text:
        return ()
    if _NUMBER.fullmatch(text):
        text = format(Decimal(text.replace(",", "")), "f")
    elif _MARKED.search(text) and (found := _parse_text(text)):
        return found
    # Without a mark the library would take `x^2+1` for prose, and `2\pi` for 2.
    return _parse_text(f"\\boxed{{{text}}}")


def _parse_text(text: str) -> tuple[Extracted, ...]:
    return tuple(parse(text, parsing_timeout=None))


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
