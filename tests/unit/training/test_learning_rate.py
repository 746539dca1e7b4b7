"""The learning rate and the weight decay follow their documentation."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.unit.recipes import write_recipe
from torch import Tensor

from leaderless.config import RecipeError, load_recipe
from leaderless.config.models import OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.training.optimizers import adamw
from leaderless.training.optimizers.adamw import may_be_fused
from leaderless.training.optimizers.optimizer import learning_rate_at

NUM_UPDATES = 12


def rates(**settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=2.0, **settings)
    return [learning_rate_at(config, update, NUM_UPDATES) for update in range(NUM_UPDATES)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3, NUM_UPDATES - 2])
def test_the_rate_falls_from_its_peak_to_the_final_fraction_at_the_last_update(schedule: str, warmup: int) -> None:
    after = rates(schedule=schedule, warmup_updates=warmup, final_fraction=0.25)[warmup:]
    assert after[0] == 2.0
    assert after[-1] == pytest.approx(0.5)
    assert sorted(after, reverse=True) == after
    assert len(set(after)) == len(after), "it falls at every update"


def test_rates_worked_by_hand() -> None:
    assert rates(schedule="linear", warmup_updates=1) == pytest.approx([1.0, *(2 - 0.2 * i for i in range(11))])
    assert rates(schedule="cosine", warmup_updates=3)[7] == pytest.approx(1.0), "half way"
    assert rates(schedule="constant", warmup_updates=3) == pytest.approx([0.5, 1.0, 1.5, *[2.0] * 9])


@pytest.mark.parametrize("warmup", [NUM_UPDATES - 1, NUM_UPDATES, 2 * NUM_UPDATES])
def test_a_warm_up_may_take_the_whole_run(warmup: int) -> None:
    rising = rates(schedule="linear", warmup_updates=warmup)
    assert rising == pytest.approx([2.0 * (update + 1) / (warmup + 1) for update in range(NUM_UPDATES)])


def test_the_former_name_of_the_warm_up_is_refused_with_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.warmup_steps.*did you mean 'optimizer\.warmup_updates'"):
        load_recipe(write_recipe(tmp_path), ["optimizer.warmup_steps=3"])


class Ranks(ProcessGroup):
    """A rank of two, of which the other one's device may refuse a fused step."""

    def __init__(self, rank: int, *, others_refuse: bool) -> None:
        super().__init__((0, 1), rank)
        self.others_refuse = others_refuse

    def max(self, values: Tensor, what: str) -> Tensor:
        assert what == "whether AdamW is one kernel"
        return values.clamp(min=int(self.others_refuse))


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_ranks_agree_whether_a_step_is_one_kernel(monkeypatch: pytest.MonkeyPatch, mine: bool, others: bool) -> None:
    monkeypatch.setattr(adamw, "_can_be_fused", lambda _: mine)
    npu = cast("torch.device", SimpleNamespace(type="npu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [may_be_fused(npu, Ranks(rank, others_refuse=not others)) for rank in (0, 1)]
    assert found == [mine and others] * 2
    assert len(caught) == (not (mine and others)), "once"
