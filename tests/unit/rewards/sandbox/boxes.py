"""The sandboxes that work on this machine."""

from __future__ import annotations

import pytest

from leaderless.rewards.sandbox.bubblewrap import BubblewrapSandbox
from leaderless.rewards.sandbox.builtin import BuiltinSandbox


def boxes() -> list[object]:
    """Each sandbox as a parameter of a test, skipped with the reason where it does not work."""
    return [_parameter(box) for box in (BuiltinSandbox(), BubblewrapSandbox())]


def _parameter(box: BuiltinSandbox | BubblewrapSandbox) -> object:
    problem = box.refusal(allow_weaker=False)
    marks = [pytest.mark.skip(reason=f"sandbox={box.name} {problem}")] if problem else []
    return pytest.param(box, id=box.name, marks=marks)
