"""Adapters of low rank: what they compute and learn, on any number of ranks, next to `peft`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model

from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.data.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.lora import is_adapter, without_adapters
from leaderless.planner import Layout
from leaderless.rollout.serving import held_by
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.training.micro_batches import MicroBatch
from leaderless.weights.blocks import LocalWeight, Pool, everything
from leaderless.weights.route import Route
from leaderless.weights.stream import receive_weights
from leaderless.weights.tensor_parallel import tensor_rows

SHARES = {1: [11], 2: [6, 5], 4: [3, 0, 4, 4]}
"""Samples of each shard."""


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> torch.Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.01
    return (gain[: len(outputs.log_probs)] * outputs.log_probs).sum()


def train(path: str, sizes: dict[str, int], changes: Mapping[str, object], num_updates: int = 2) -> Numbers:
    """Scores before and after some updates, norms of gradients, and weights."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = setup_of(transport, layout, path)
    config = ModelConfig(path=path, lora=LoraConfig(rank=3, alpha=6), **changes)  # type: ignore[arg-type]
    engine, shard = make_engine(replace(setup, model=config)), layout.shard_of(transport.rank)
    assert isinstance(engine, FsdpEngine)
    first = sum(SHARES[layout.dp][:shard])
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(first, first + SHARES[layout.dp][shard]))
    numbers = Numbers()
    for update in range(num_updates):
        add_gradients(engine, batch, loss_of)
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
        numbers[f"scores.{row}"] = values
    with without_adapters(engine.model):
        for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
            numbers[f"base.{row}"] = values
    assert not engine.is_replica
    weights = {f"weights.{name}": value.clone() for name, value in engine.full_weights()}
    assert all(map(is_adapter, weights))
    held = held_by(engine, is_merged=True)
    pools = Pool(layout, tensor_rows), Pool(layout, everything)
    route = Route("policy", held.shapes, *pools, torch.float32, transport.rank, is_gathered=True)
    merged = receive_weights(route, transport.world, transport.world, held)
    return numbers | weights | {f"merged.{name}": value.clone() for name, value in merged}


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"dp": 2}, {}),
        ({"dp": 4}, {"gradient_checkpointing": True}),
        ({"dp": 1, "cp": 2}, {}),
        ({"dp": 1, "tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_ranks_learn_what_one_does(ranks: RankPool, sizes: dict[str, int], changes: dict[str, object]) -> None:
    path = tiny_model("qwen3")
    (expected,) = ranks.run(1, train, path, {"dp": 1}, {})
    num_ranks = sizes["dp"] * sizes.get("cp", 1) * sizes.get("tp", 1)
    found = ranks.run(num_ranks, train, path, sizes, changes)
    assert largest_difference(found, expected) < 1e-5


def test_ranks_that_divide_experts_learn_adapters_like_one(ranks: RankPool, tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen3_moe")
    (expected,) = ranks.run(1, train, path, {"dp": 1}, {})
    assert {name.split(".")[-2] for name in expected if name.startswith("weights.")} == {f"{x}_proj" for x in "qkvo"}
    assert largest_difference(ranks.run(2, train, path, {"dp": 2, "ep": 2}, {}), expected) < 1e-5


def addresses(engine: FsdpEngine, num_shards: int) -> dict[str, int]:
    """Where this rank has its part of each weight, all but those of adapters and those that FSDP has to fill up."""
    weights = ((name, weight) for name, weight in engine.model.model.named_parameters() if not is_adapter(name))
    parts = (LocalWeight.of(name, weight) for name, weight in weights if len(weight) % num_shards == 0)
    return {part.name: part.local.data_ptr() for part in parts}


def train_two(path: str, sizes: dict[str, int], changes: Mapping[str, object]) -> tuple[list[Numbers], bool]:
    """What two roles with adapters on one model learn: the second with the first one's weights, and with its own."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup, shard = setup_of(transport, layout, path), layout.shard_of(transport.rank)
    first, second = (
        replace(setup, model=ModelConfig(path=path, lora=lora, **changes))  # type: ignore[arg-type]
        for lora in (LoraConfig(rank=3), LoraConfig(rank=2, targets=["q_proj", "down_proj"]))
    )
    donor = make_engine(first)
    engines = [donor, make_engine(replace(second, donor=donor)), make_engine(second)]
    begin = sum(SHARES[layout.dp][:shard])
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(begin, begin + SHARES[layout.dp][shard]))
    found: list[Numbers] = [Numbers() for _ in engines]
    for update in range(2):
        for numbers, engine in zip(found, engines, strict=True):
            assert isinstance(engine, FsdpEngine)
            add_gradients(engine, batch, loss_of)
            numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    places = []
    for numbers, engine in zip(found, engines, strict=True):
        assert isinstance(engine, FsdpEngine)
        numbers |= {
            f"scores.{row}": x for row, x in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True)
        }
        numbers |= {f"weights.{name}": value.clone() for name, value in engine.full_weights()}
        places.append(addresses(engine, layout.dp))
    return found[1:], places[0] == places[1] != places[2]


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"dp": 1}, {}),
        ({"dp": 1}, {"compute_dtype": "bfloat16"}),
        ({"dp": 2}, {"gradient_checkpointing": True}),
        ({"dp": 1, "tp": 2}, {}),
    ],
    ids=str,
)
def test_roles_have_the_weights_below_their_adapters_once(
    ranks: RankPool, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    for (shared, own), is_once in ranks.run(
        sizes["dp"] * sizes.get("tp", 1), train_two, tiny_model("qwen3"), sizes, changes
    ):
        assert is_once
        assert shared.keys() == own.keys()
        for name, value in own.items():
            assert torch.equal(shared[name], value), name
