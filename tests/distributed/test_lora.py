"""Adapters of low rank: what they compute and learn, on any number of ranks, next to `peft`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_experts import experts_model
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_tensor_parallel import save_or_load
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model
from tests.unit.recipes import plan_of, write_model
from transformers import AutoModelForCausalLM

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, Whole
from leaderless.distributed.transport import Transport
from leaderless.distributed.weights.blocks import LocalWeight, Pool, everything
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import receive_weights
from leaderless.distributed.weights.tensor_parallel import tensor_rows
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.lora.linear import is_adapter, without_adapters
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.planner.memory.layers import check_adapted_stages
from leaderless.rollout.weight_sources import held_by
from leaderless.training.engine import ShardingSetup
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.training.micro_batches import MicroBatch
from leaderless.worker.checkpoint.export import export_model

SEED = 5
DROPPING: dict[str, object] = {"lora": LoraConfig(rank=3, alpha=6, dropout=0.2)}
SHARES = {1: [11], 2: [6, 5], 4: [3, 0, 4, 4]}
"""Samples of each shard."""


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> torch.Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.01
    return (gain[: len(outputs.log_probs)] * outputs.log_probs).sum()


def train(
    path: str,
    sizes: dict[str, int],
    changes: Mapping[str, object],
    num_updates: int = 2,
    keeps: Whole = "nothing",
) -> Numbers:
    """Scores before and after some updates, norms of gradients, and weights."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = setup_of(transport, layout, path)
    config = ModelConfig(path=path, **{"lora": LoraConfig(rank=3, alpha=6)} | changes)  # type: ignore[arg-type]
    sharding = ShardingSetup(keeps=keeps)
    engine = make_engine(replace(setup, model=config, seed=SEED, sharding=sharding))
    shard = layout.shard_of(transport.rank)
    assert isinstance(engine, FsdpEngine)
    assert engine.seed == SEED
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
    assert engine.model.shared_words is None, "nobody trains them, so stages need not exchange them"
    weights = {f"weights.{name}": value.clone() for name, value in engine.full_weights()}
    assert all(map(is_adapter, weights))
    held = held_by(engine, is_merged=True)
    placement = tensor_rows if engine.line is None else engine.line.stages.placement()
    pools = Pool(layout, placement), Pool(layout, everything)
    route = WeightRoute(
        "weights of role 'policy'", held.shapes, *pools, torch.float32, transport.rank, is_gathered=True
    )
    merged = receive_weights(route, transport.world, transport.world, held)
    return numbers | weights | {f"merged.{name}": value.clone() for name, value in merged}


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param({"dp": 2}, {}, marks=pytest.mark.thorough),
        ({"dp": 4}, {"gradient_checkpointing": True}),
        ({"dp": 1, "cp": 2}, {}),
        pytest.param({"dp": 1, "tp": 2}, {}, marks=pytest.mark.thorough),  # also in stages, and with dropout
        pytest.param({"dp": 2, "tp": 2}, {"gradient_checkpointing": True}, marks=pytest.mark.thorough),
        pytest.param({"dp": 2, "pp": 2}, {}, marks=pytest.mark.thorough),  # also with tp, and with cp
        ({"dp": 1, "pp": 2, "tp": 2}, {"gradient_checkpointing": True}),
        pytest.param({"dp": 4}, DROPPING, marks=pytest.mark.thorough),  # also with tp
        ({"dp": 2, "tp": 2}, DROPPING | {"gradient_checkpointing": True}),
        ({"dp": 1, "cp": 2, "pp": 2}, DROPPING | {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_ranks_learn_what_one_does(
    ranks: RankPool,
    alone: Callable[[bool], Numbers],
    sizes: dict[str, int],
    changes: dict[str, object],
) -> None:
    found = ranks.run(math.prod(sizes.values()), train, tiny_model("qwen3"), sizes, changes)
    assert largest_difference(found, alone(changes.items() >= DROPPING.items())) < 1e-5


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[bool], Numbers]:
    """What one rank learns, with dropout or without."""

    @cache
    def learn(drops: bool) -> Numbers:
        (numbers,) = ranks.run(1, train, tiny_model("qwen3"), {"dp": 1}, DROPPING if drops else {})
        return numbers

    return learn


def test_a_checkpoint_of_stages_is_read_by_one_rank_and_by_peft(ranks: RankPool, tmp_path: Path) -> None:
    path, lora = tiny_model("qwen3"), LoraConfig(rank=3, alpha=6)
    (folder := tmp_path / "checkpoints").mkdir()
    [(expected, norm), *_] = ranks.run(2, save_or_load, str(folder), path, {"dp": 1, "pp": 2}, lora)
    assert all(map(is_adapter, expected))
    for sizes in ({"dp": 1}, {"dp": 1, "pp": 2}):
        for weights, found in ranks.run(math.prod(sizes.values()), save_or_load, str(folder), path, sizes, lora):
            assert found == pytest.approx(norm, rel=1e-5)
            assert largest_difference([Numbers(weights)], Numbers(expected)) < 1e-5
    (checkpoint,) = list_checkpoints(folder)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged = export_model(checkpoint, "policy", tmp_path / "merged", merge=True)
    models = (
        base,
        PeftModel.from_pretrained(base, export_model(checkpoint, "policy", tmp_path / "adapters")),
        AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32),
    )
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        adapted, joined = (one.eval()(input_ids=tokens).logits for one in models[1:])
        with models[1].disable_adapter():
            plain = models[1](input_ids=tokens).logits
    torch.testing.assert_close(adapted, joined, atol=1e-5, rtol=0)
    assert (adapted - plain).abs().max() > 1e-3


def test_stages_without_adapters_are_refused(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(6)]
    key = "models.policy.lora.targets"
    check_adapted_stages(key, 2, 6, names)
    check_adapted_stages(key, 3, 6, [names[0], names[3], names[5]])
    with pytest.raises(
        RecipeError, match=r"lora.targets: pp=3: layers 2 to 3 have no adapters, but some layer of each"
    ):
        check_adapted_stages(key, 3, 6, [names[0], names[5]])
    with pytest.raises(RecipeError, match=r"lora.targets: pp=2: layer 5 has no adapters, .* the last layer need one"):
        check_adapted_stages(key, 2, 6, names[:5])
    model = write_model(tmp_path, num_hidden_layers=2)
    first = {"path": model, "lora": {"targets": ["layers.0.self_attn.q_proj"]}}
    assert plan_of("grpo", 2, models={"policy": first})
    with pytest.raises(RecipeError, match=r"policy.lora.targets: pp=2: layer 1 has no adapters"):
        plan_of("grpo", 2, models={"policy": first}, layout={"policy": {"pp": 2}})


def test_dropout_changes_what_is_learned(alone: Callable[[bool], Numbers]) -> None:
    assert largest_difference([alone(True)], alone(False)) > 0.01


def test_ranks_that_divide_experts_learn_adapters_like_one(ranks: RankPool, tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen3_moe")
    (expected,) = ranks.run(1, train, path, {"dp": 1}, {})
    assert {name.split(".")[-2] for name in expected if name.startswith("weights.")} == {f"{x}_proj" for x in "qkvo"}
    for num_ranks, sizes in ((2, {"dp": 2, "ep": 2}), (4, {"dp": 2, "pp": 2, "ep": 2})):
        assert largest_difference(ranks.run(num_ranks, train, path, sizes, {}), expected) < 1e-5


def test_ranks_along_tp_learn_an_adapter_of_a_layer_that_they_do_not_divide(ranks: RankPool, tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen2_moe")  # its shared expert has a gate with one output
    (expected,) = ranks.run(1, train, path, {"dp": 1}, {})
    assert expected["weights.model.layers.0.mlp.shared_expert_gate.lora_B"].any()
    assert largest_difference(ranks.run(2, train, path, {"dp": 1, "tp": 2, "ep": 2}, {}), expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        pytest.param("qwen3_moe", {"dp": 2}, {}, marks=pytest.mark.thorough),
        # Also in stages.
        pytest.param("qwen3_moe", {"dp": 2, "ep": 2}, {"gradient_checkpointing": True}, marks=pytest.mark.thorough),
        pytest.param(
            "mixtral", {"dp": 4, "ep": 2}, {}, marks=pytest.mark.thorough
        ),  # two ranks have one of two experts
        ("qwen3_moe", {"dp": 4, "ep": 2}, {}),  # two ranks have a half of three experts each, and of their matrices
        pytest.param("qwen3_moe", {"dp": 1, "tp": 2, "ep": 2}, {}, marks=pytest.mark.thorough),  # also with cp
        ("qwen2_moe", {"dp": 1, "tp": 4, "ep": 2}, {}),
        ("qwen3_moe", {"dp": 2, "pp": 2, "ep": 2}, {"gradient_checkpointing": True}),
        ("qwen3_moe", {"dp": 1, "cp": 2, "tp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_ranks_learn_the_adapters_of_experts_like_one(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    lora, path = LoraConfig(rank=3, alpha=6, expert_rank=EXPERT_RANKS.get(family, 2)), experts_model(tmp_path, family)
    if family not in EXPERTS_ALONE:
        (EXPERTS_ALONE[family],) = ranks.run(1, train, path, {"dp": 1}, {"lora": lora})
    expected = EXPERTS_ALONE[family]
    names = [name for name in expected if name.startswith("weights.") and ".experts." in name]
    assert len(names) == 2 * 2 * 2
    assert all(expected[name].any() for name in names)
    num_ranks = math.prod(size for axis, size in sizes.items() if axis != "ep")
    assert largest_difference(ranks.run(num_ranks, train, path, sizes, changes | {"lora": lora}), expected) < 1e-5


EXPERTS_ALONE: dict[str, Numbers] = {}
"""What one rank learns, by family."""
EXPERT_RANKS = {"mixtral": 1}


def test_adapters_of_experts_continue_with_another_ep_and_are_read_by_peft(ranks: RankPool, tmp_path: Path) -> None:
    path, lora = experts_model(tmp_path, "qwen3_moe"), LoraConfig(rank=3, alpha=6, expert_rank=2)
    (folder := tmp_path / "checkpoints").mkdir()
    [(expected, norm), *_] = ranks.run(2, save_or_load, str(folder), path, {"dp": 2, "ep": 2}, lora)
    for sizes in ({"dp": 1}, {"dp": 4, "ep": 2}, {"dp": 1, "tp": 2, "pp": 2, "ep": 2}):
        num_ranks = math.prod(size for axis, size in sizes.items() if axis != "ep")
        for weights, found in ranks.run(num_ranks, save_or_load, str(folder), path, sizes, lora):
            assert found == pytest.approx(norm, rel=1e-5)
            assert largest_difference([Numbers(weights)], Numbers(expected)) < 1e-5
    other = LoraConfig(rank=3, alpha=6)
    with pytest.raises(RankError, match=r"lora.expert_rank: gives experts other adapters than .*: set 2, or give the"):
        ranks.run(1, save_or_load, str(folder), path, {"dp": 1}, other)
    (checkpoint,) = list_checkpoints(folder)
    merged = export_model(checkpoint, "policy", tmp_path / "merged", merge=True)
    base, joined = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (path, merged))
    twin = PeftModel.from_pretrained(base, export_model(checkpoint, "policy", tmp_path / "adapters"))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, joined(tokens).logits, atol=1e-5, rtol=0)
        with twin.disable_adapter():
            assert (twin(tokens).logits - joined(tokens).logits).abs().max() > 1e-3


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
    engines = [donor, make_engine(replace(second, sharding=ShardingSetup(donor=donor))), make_engine(second)]
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
        ({"dp": 1, "pp": 2}, {}),
    ],
    ids=str,
)
def test_roles_have_the_weights_below_their_adapters_once(
    ranks: RankPool, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    for (shared, own), is_once in ranks.run(math.prod(sizes.values()), train_two, tiny_model("qwen3"), sizes, changes):
        assert is_once
        assert shared.keys() == own.keys()
        for name, value in own.items():
            assert torch.equal(shared[name], value), name
