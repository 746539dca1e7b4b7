"""What the models of a rank are told of its recipe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.unit.recipes import make_recipe, plan_of

from leaderless.config.training import Whole
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import Transport
from leaderless.training.engine import EngineSetup
from leaderless.worker import roles
from leaderless.worker.roles import Roles
from leaderless.worker.turns import Turns


class MadeError(Exception):
    """A model would be made with this setup."""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "weights"),
        ({"training": {"keep_whole": "all"}}, "all"),
        ({"training": {"keep_whole": "nothing"}}, "nothing"),
        ({"roles": {"policy": {"training": {"keep_whole": "all"}}}}, "all"),
    ],
)
def test_ranks_keep_whole_what_the_recipe_says_or_has_room(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, object], expected: Whole
) -> None:
    def make(_: str, setup: EngineSetup) -> None:
        raise MadeError(setup.keeps, setup.seed)

    monkeypatch.setattr(roles, "make_train_engine", make)
    monkeypatch.setattr(roles, "check_policy", lambda *_: None)
    nothing = SimpleNamespace(rank=0, process_group=lambda _: None, axis_groups=lambda _: {})
    transport, turns = cast("Transport", nothing), cast("Turns", SimpleNamespace(device=torch.device("cpu")))
    recipe, plan = make_recipe(seed=7, **sections), plan_of("grpo", seed=7, **sections)
    with pytest.raises(MadeError) as made:
        Roles(recipe, plan, transport, turns, cast("Tokenizer", None), Path(), print, "weights")
    assert made.value.args == (expected, 7)
