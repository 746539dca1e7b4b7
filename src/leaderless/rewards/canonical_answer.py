"""Gives equal answers the same text, so that they can be counted. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import TypeAlias

import sympy

Extracted: TypeAlias = sympy.Basic | sympy.MatrixBase | str
"""An answer found in a text: parsed, or as written if it cannot be parsed."""

_NUM_DIGITS = 6
"""Numbers that agree to this many decimals count as equal, as they do for `math_verify.verify`."""
_MAX_EXACT_DIGITS = 1000
_UNBOUNDED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
"""Formulas whose evaluation may never end."""
_MAX_OPERATIONS = 100
_MAX_EXPONENT = 8


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
