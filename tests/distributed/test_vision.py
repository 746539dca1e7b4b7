"""Models that see images: ranks that divide weights and samples compute what one does, also without any image."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.pictures import samples_with, vision_model
from tests.tiny import add_gradients, at_temperature
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.data.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.planner import Layout
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.training.micro_batches import MicroBatch

SHARES = {1: [18], 2: [15, 3], 4: [3, 0, 9, 6]}
"""Samples of each rank, three of a prompt: one rank has none, and one has a prompt without images."""


def train(model: str, samples: Batch, layout: dict[str, int], changes: dict[str, object]) -> Numbers:
    """Scores, the gradient's norm and weights of two updates."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, **layout), model)
    shard = setup.layout.shard_of(transport.rank)
    engine = make_engine(replace(setup, model=ModelConfig(path=model, **changes), micro_batch_tokens=80))  # type: ignore[arg-type]
    assert isinstance(engine, FsdpEngine)
    shares, numbers = SHARES[setup.layout.dp], Numbers()
    first = sum(shares[:shard])
    batch = samples.select(torch.arange(first, first + shares[shard]))
    batch = at_temperature(batch, 0.7)
    for update in range(2):
        for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
            numbers[f"scores.{update}.{row}"] = values
        add_gradients(engine, batch, loss_of)
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.1
    return (gain[: len(outputs.log_probs)] * (outputs.log_probs + 0.3 * outputs.entropies)).sum()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("changes", [{}, {"freeze_vision": True}], ids=str)
def test_ranks_learn_like_one(ranks: RankPool, size: int, changes: dict[str, object]) -> None:
    model, samples = vision_model(), samples_with()
    (expected,) = ranks.run(1, train, model, samples, {"dp": 1}, changes)
    assert largest_difference(ranks.run(size, train, model, samples, {"dp": size}, changes), expected) < 1e-5


@pytest.mark.parametrize("sizes", [{"dp": 1, "cp": 2}, {"dp": 1, "cp": 3}, {"dp": 2, "cp": 2}], ids=str)
def test_ranks_that_divide_the_tokens_of_images_learn_like_one(ranks: RankPool, sizes: dict[str, int]) -> None:
    model, samples = vision_model(), samples_with()
    (expected,) = ranks.run(1, train, model, samples, {"dp": 1}, {})
    assert largest_difference(ranks.run(prod(sizes.values()), train, model, samples, sizes, {}), expected) < 1e-5


def refusal(model: str, axis: str = "tp") -> str:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    with pytest.raises(RecipeError) as caught:
        make_engine(setup_of(transport, Layout(transport.world.ranks, 1, **{axis: 2}), model))
    return str(caught.value)


def test_a_model_that_sees_images_is_not_divided_along_other_axes(ranks: RankPool) -> None:
    (problem, _) = ranks.run(2, refusal, vision_model())
    assert "models.policy: a model that sees images cannot be divided along tp: use dp and cp" in problem
    (problem, _) = ranks.run(2, refusal, vision_model("paligemma"), "cp")
    assert "a model that reads prompts in both directions cannot be divided along cp: use dp" in problem
