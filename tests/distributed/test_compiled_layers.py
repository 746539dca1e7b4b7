"""Compiled layers of models whose weights ranks divide."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_keep_whole import train
from tests.tiny import tiny_model
from torch import Tensor

from leaderless.models import compiled_layers

SIZES = {"dp": 2}
SETTINGS = {"gradient_checkpointing": True}


def train_compiled(path: str) -> tuple[dict[str, Tensor], Counter[str]]:
    with patch.object(compiled_layers, "BACKEND", "aot_eager"):
        return train(path, "weights", SIZES, SETTINGS, compiles=True)


def train_with_a_broken_compiler(path: str) -> None:
    backend = "no_such_backend" if torch.distributed.get_rank() else "aot_eager"
    with patch.object(compiled_layers, "BACKEND", backend):
        train(path, "nothing", SIZES, SETTINGS, compiles=True)


@pytest.mark.thorough
def test_compiled_layers_train_the_same_on_ranks_that_divide_weights(ranks: RankPool) -> None:
    expected = ranks.run(2, train, tiny_model(), "weights", SIZES, SETTINGS)
    found = ranks.run(2, train_compiled, tiny_model())
    for (numbers, counts), (others, other_counts) in zip(found, expected, strict=True):
        assert numbers.keys() == others.keys()
        for name, value in others.items():
            torch.testing.assert_close(numbers[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert counts == other_counts, "weights and gradients are exchanged as often"


def test_all_ranks_stop_if_one_cannot_compile(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 0 of 2 \(then on rank 1\)|rank 1 of 2 \(then on rank 0\)"
    ) as failure:
        ranks.run(2, train_with_a_broken_compiler, tiny_model())
    assert "training.compile: role 'policy' cannot have it, since" in str(failure.value)
