"""Environments of bodies that a recipe names, and what it is told of those that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.small_worlds import Line

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.registry import open_body


class Shut(Line):
    """An environment that somebody else uses."""

    def __init__(self, num: int) -> None:
        raise RuntimeError(f"there is no room for {num}: somebody else moves it")


def test_an_environment_has_room_for_as_many_as_are_asked_for() -> None:
    environment = open_body(BodyConfig(type="tests.small_worlds:Line"), 3)
    assert environment.reset([2], [{}], [0]).state.shape == (1, 2)
    open_body(BodyConfig(type="table", options={"num_blocks": 2}), 1).close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "tables"}, r"body\.type: unknown environment 'tables' \(did you mean 'table'\?\)"),
        ({"type": "table", "options": {"blocks": 2}}, r"body\.options: Table.*does not take them"),
        ({"type": "table", "options": {"num_blocks": 9}}, "cannot be made: num_blocks=9"),
        ({"type": f"{__name__}:Shut"}, "cannot be made: there is no room for 1: somebody else moves it"),
        ({"type": "table", "max_steps": 3}, r"body\.max_steps: is 3, but episodes of 'table' have up to 32 steps"),
    ],
)
def test_what_cannot_be_made_is_named(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        open_body(BodyConfig.model_validate(settings), 1)
