"""The sandboxes that work on this machine."""

from __future__ import annotations

import pytest

from leaderless.rewards.sandbox.sandboxes import BubblewrapSandbox, Sandbox


def boxes() -> list[object]:
    """Each sandbox as a parameter of a test, skipped with the reason where it does not work."""
    return [_parameter(box) for box in (Sandbox(), BubblewrapSandbox())]


def _parameter(box: Sandbox | BubblewrapSandbox) -> object:
    problem = box.refusal(allow_weaker=False)
    marks = [pytest.mark.skip(reason=f"sandbox={box.name} {problem}")] if problem else []
    return pytest.param(box, id=box.name, marks=marks)
