"""The `math` reward: the final answer equals the expected one mathematically. Imports no torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import TypeAlias

import sympy
from math_verify import parse, verify

from leaderless.rewards.protocol import RewardInput, RewardResult
from leaderless.rewards.text_rewards import expected_text

Extracted: TypeAlias = sympy.Basic | sympy.MatrixBase | str
"""An answer found in a text: parsed, or as written if it cannot be parsed."""

_NUM_DIGITS = 6
"""Numbers that agree to this many decimals count as equal, as they do for `math_verify.verify`."""
_MAX_EXACT_DIGITS = 1000
_UNBOUNDED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
"""Formulas whose evaluation may never end."""
_MAX_OPERATIONS = 100
_MAX_EXPONENT = 8

_MARKED = re.compile(r"\\boxed|\$|(?<!\\)\\[(\[]|answer", re.IGNORECASE)
"""Marks by which the library finds the mathematics in a text."""
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+|(?=\.\d))(\.\d*)?([eE][+-]?\d{1,3})?")
"""A number alone, as programs write it. Its exponent must be short, because all digits are written out."""
_WITH_UNIT = re.compile(rf"[$€£]?\s*({_NUMBER.pattern}%?)\s*(?=.*[A-Za-z]{{2}})[A-Za-z(][A-Za-z()/.\s°²³-]*")
"""A number that is followed by words and no mathematics: `18 dollars`, `18 km/h`, `18 (eighteen)`."""
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)/(\d+)")
"""A whole number and a fraction: `2 1/2`."""
_ANNOUNCED = re.compile(r"final answer", re.IGNORECASE)
"""Words to which the library gives precedence over a box."""
_BOX = "\\boxed{"
_FINAL_LINE = re.compile(r"^####([^\n]+)\Z", re.MULTILINE)
"""A last line as GSM8K ends its solutions."""

# The library warns in every process that its alarm is off; the pool has a time limit of its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathReward:
    r"""1 if the response's final answer equals the expected one mathematically, else 0.

    The final answer of a response is its last line if that is `#### ...`, else what the `math-verify` library finds
    from the last `\boxed{...}` on, or without a box: what follows "final answer is", what follows "answer", the last
    formula or number. Emphasis, a period and words after a number (`**18 dollars**.`) do not count.
    """

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        r"""Grade a response; 0 if it has no final answer.

        The expected answer is a number, or text that is the answer (`42`, `\frac{1}{2}`), marks it (`$x$`,
        `\boxed{x}`) or ends in it after `####`. If it is missing or cannot be parsed, a ValueError is raised.
        """
        expected = _parse_expected(expected_text(sample.answer))
        found = _parse_response(sample.response.strip())
        if not found:
            return RewardResult(0.0)
        is_equal = verify(list(expected), list(found), timeout_seconds=None)
        return RewardResult(float(is_equal), canonical(found))


@lru_cache(maxsize=4096)
def _parse_expected(text: str) -> tuple[Extracted, ...]:
    """The expected answer, which is kept because all responses to a prompt share it."""
    final = text.rpartition("####")[2].strip()
    found = _parse_answer(final)
    if not found:
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise ValueError(f"the expected answer {shown!r} cannot be parsed as mathematics")
    return found


def _parse_response(text: str) -> tuple[Extracted, ...]:
    line = _FINAL_LINE.search(text)
    if line and (found := _parse_answer(line[1].strip())):
        return found
    # The library would take all boxes that lie close together for one answer of several parts.
    start = text.rfind(_BOX)
    if start < 0:
        return _parse_text(text)
    text = text[start:]
    content = _in_braces(text[len(_BOX) :])
    if content is not None and not _ANNOUNCED.search(text) and (found := _parse_answer(content)):
        return found
    return _parse_text(text)


def _in_braces(text: str) -> str | None:
    """The text up to the brace that closes one opened before it; None if there is no such brace."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return None


def _plain(text: str) -> str:
    """An answer without emphasis, punctuation and units."""
    text = text.lstrip("* ").rstrip("*., ")
    if unit := _WITH_UNIT.fullmatch(text):
        return unit[1]
    if mixed := _MIXED.fullmatch(text):
        return f"{mixed[1]}({mixed[2]}+{mixed[3]}/{mixed[4]})"
    return text


def _parse_answer(text: str) -> tuple[Extracted, ...]:
    """Parse a text that is only an answer, or in which the answer is marked."""
    text = _plain(text)
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


def canonical(found: Sequence[Extracted]) -> str:
    r"""The text that equal answers share, given what the `math-verify` library found.

    Numbers share a decimal notation, so that `0.5`, `\frac{1}{2}` and `50\%` are the same. Only the value of an
    assignment counts. Polynomials are multiplied out if that is quick. Other formulas may be equal and differ as text.
    """
    answer = found[0]
    if not isinstance(answer, str):
        try:
            return _text(answer)
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            pass  # the grade is already known, and must not depend on the form of a formula
    written = found[-1]
    return written.strip() if isinstance(written, str) else str(written)


def _text(answer: sympy.Basic | sympy.MatrixBase) -> str:
    if isinstance(answer, sympy.Equality) and answer.lhs.is_Symbol:
        answer = answer.rhs
    if isinstance(answer, sympy.MatrixBase):
        rows = (", ".join(_text(element) for element in row) for row in answer.tolist())
        return "[" + "; ".join(rows) + "]"
    if isinstance(answer, sympy.Expr):
        return _number_text(answer) if answer.is_number else _formula_text(answer)
    return _collection_text(answer)


def _collection_text(answer: sympy.Basic) -> str:
    if isinstance(answer, sympy.FiniteSet):
        return "{" + ", ".join(sorted(_text(element) for element in answer.args)) + "}"
    if isinstance(answer, sympy.Tuple):
        return "(" + ", ".join(_text(element) for element in answer.args) + ")"
    if isinstance(answer, sympy.Interval):
        left, right = "(" if answer.left_open else "[", ")" if answer.right_open else "]"
        return f"{left}{_text(answer.start)}, {_text(answer.end)}{right}"
    return str(answer)


def _number_text(number: sympy.Expr) -> str:
    if isinstance(number, sympy.Integer):
        return str(int(number))
    if number.has(*_UNBOUNDED):
        return str(number)
    approximate = number.evalf(25).doit()
    if not approximate.is_Float and not approximate.is_Integer:
        return str(number)
    value = Decimal(str(approximate))
    magnitude = value.adjusted()
    if 20 < magnitude < _MAX_EXACT_DIGITS:
        exact = number.doit()
        if isinstance(exact, sympy.Integer):
            return str(int(exact))
    if magnitude > 20:
        return f"{value:.14E}"
    with localcontext(prec=60):
        # Small numbers keep as many significant digits as others have decimals.
        step = Decimal(1).scaleb(min(-_NUM_DIGITS, magnitude - _NUM_DIGITS + 1))
        return format(value.quantize(step), "f").rstrip("0").rstrip(".")


def _formula_text(formula: sympy.Expr) -> str:
    exponents = [abs(power.exp) for power in formula.atoms(sympy.Pow) if power.exp.is_Number]
    if formula.count_ops() <= _MAX_OPERATIONS and all(exponent <= _MAX_EXPONENT for exponent in exponents):
        return str(sympy.expand(formula))
    return str(formula)
