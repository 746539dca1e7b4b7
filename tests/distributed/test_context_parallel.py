"""Ranks that divide the tokens of a pass compute what one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_critic import write_critic
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference, whole
from tests.tiny import add_gradients, at_temperature, random_samples, tiny_model, tree_samples
from tests.tiny_families import tiny_config, write_family
from tests.unit.recipes import make_recipe, plan_of, write_model
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.models.attention.ring import RingAttention, RingParallel
from leaderless.models.attention.shared_prompts import Family, blocks_of
from leaderless.models.causal_lm import TokenOutputs
from leaderless.planner import Layout, Plan
from leaderless.planner.memory.fit import Fit, fit_plan
from leaderless.training import micro_batches
from leaderless.training.fsdp import FsdpValueEngine, make_engine
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.prefix_trees import tree_order

FAMILIES: dict[str, dict[str, object]] = {
    "windows and sinks": {},
    "sinks": {"layer_types": ["full_attention"] * 2},
}
SHARES = {1: [11], 2: [11, 0]}
"""Samples of each shard: one of two has none."""


def train(path: str, sizes: dict[str, int], micro_batch_tokens: int, changes: dict[str, object]) -> Numbers:
    """Scores of own samples, the norm of a gradient and the weights that come of it."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    is_critic, has_gradients = (bool(changes.pop(name, False)) for name in ("is_critic", "has_gradients"))
    least = cast("int | None", changes.pop("least", None))
    config = ModelConfig(path=path, **changes)  # type: ignore[arg-type]
    setup = setup_of(transport, layout, path)
    setup = replace(setup, model=config, is_critic=is_critic, micro_batch_tokens=micro_batch_tokens)
    engine, shard = make_engine(setup), layout.shard_of(transport.rank)
    first = sum(SHARES[layout.dp][:shard])
    samples = random_samples(LENGTHS, siblings=3) if least is None else tree_samples(4, prompts=3, rows=5)
    count = int(samples.jagged("response_mask").values.sum())
    samples = at_temperature(samples, torch.linspace(0.5, 1.5, count))
    batch = samples.select(torch.arange(first, first + SHARES[layout.dp][shard]))
    gain = torch.linspace(-0.05, 0.05, count)
    numbers = Numbers()

    def loss(outputs: TokenOutputs | Tensor, micro_batch: MicroBatch) -> Tensor:
        if isinstance(outputs, Tensor):
            return (gain[micro_batch.response_index] * outputs).sum()
        return (gain[micro_batch.response_index] * (outputs.log_probs + 0.3 * outputs.entropies)).sum()

    with pytest.MonkeyPatch.context() as patch:
        if least is not None:
            patch.setattr(micro_batches, "tree_order", lambda texts: tree_order(texts, least))
        if isinstance(engine, FsdpValueEngine):
            scores = engine.values(batch)
        else:
            scores = engine.log_probs(batch)
            engine.forward = lambda one, forward=engine.forward: forward(one, "gradient")  # type: ignore[method-assign]
        for row, values in zip(batch.ids.tolist(), scores.rows(), strict=True):
            numbers[f"scores.{row}"] = values
        add_gradients(engine, batch, loss)
    for name, parameter in engine.named_weights() if has_gradients else ():
        assert parameter.grad is not None, name
        numbers[f"gradients.{name}"] = whole(parameter.grad)
    numbers["norm"] = torch.tensor(engine.optimizer_step().grad_norm)
    assert not engine.is_replica
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


@pytest.mark.parametrize(
    ("sizes", "micro_batch_tokens", "changes"),
    [
        ({"dp": 1, "cp": 2}, 4096, {}),
        ({"dp": 1, "cp": 2}, 9, {"gradient_checkpointing": True}),
        ({"dp": 1, "cp": 4}, 31, {}),  # more ranks than heads of keys
        ({"dp": 2, "cp": 2}, 31, {}),
        ({"dp": 1, "cp": 3}, 31, {"gradient_checkpointing": True}),  # no divisor of the heads: around a ring
        pytest.param({"dp": 1, "cp": 3}, 4096, {}, marks=pytest.mark.thorough),
        ({"dp": 1, "cp": 2}, 31, {"is_critic": True}),
        ({"dp": 1, "cp": 2}, 31, {"family": "windows and sinks"}),
        ({"dp": 1, "cp": 3}, 31, {"family": "sinks"}),
    ],
    ids=str,
)
def test_ranks_that_divide_tokens_score_and_learn_like_one(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int], micro_batch_tokens: int, changes: dict[str, object]
) -> None:
    path = write_critic(tmp_path) if "is_critic" in changes else tiny_model("qwen3")
    if (family := changes.pop("family", None)) is not None:
        write_family(tiny_config("gpt_oss", **FAMILIES[str(family)]), tmp_path)
        path = str(tmp_path)
    (expected,) = ranks.once(1, train, path, {"dp": 1}, 64, {**changes})
    found = ranks.run(sizes["dp"] * sizes["cp"], train, path, sizes, micro_batch_tokens, {**changes})
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    "sizes", [{"dp": 2}, {"dp": 1, "cp": 2}, {"dp": 1, "cp": 3}, {"dp": 1, "tp": 2, "cp": 2}], ids=str
)
@pytest.mark.parametrize("micro_batch_tokens", [4096, 31])
def test_ranks_learn_from_trees_as_one_does_from_rows(
    ranks: RankPool, sizes: dict[str, int], micro_batch_tokens: int
) -> None:
    """With `cp=2` heads are divided, and with `cp=3` keys go around a ring."""
    path, num_ranks = tiny_model("qwen3"), 1
    (expected,) = ranks.once(1, train, path, {"dp": 1}, 4096, {"least": 10**6})
    for size in sizes.values():
        num_ranks *= size
    found = ranks.run(num_ranks, train, path, sizes, micro_batch_tokens, {"least": 2})
    assert largest_difference(found, expected) < 1e-5


def refusal(path: str) -> str:
    with pytest.raises(RecipeError) as caught:
        train(path, {"dp": 1, "cp": 3}, 31, {})
    return str(caught.value)


def test_windows_do_not_go_around_a_ring(ranks: RankPool, tmp_path: Path) -> None:
    write_family(tiny_config("gpt_oss"), tmp_path)
    assert all("cp=3, which does not divide the 4 heads" in found for found in ranks.run(3, refusal, str(tmp_path)))


def test_ranks_of_a_ring_have_equal_work_and_see_all_keys_once() -> None:
    size, length = 4, 40
    tree = Family(33, (20, 70, 30, 7), (-1, 0, 0, -1))
    for families in (
        [Family(8 * length, ())],
        [Family(33, (120, 7)), Family(50, (20, 40, 50))],
        [tree, Family(160, ())],
    ):
        rings = [RingParallel(ProcessGroup(tuple(range(size)), rank)) for rank in range(size)]
        plans = [RingAttention(families, ring, torch.device("cpu")) for ring in rings]
        work = [0] * size
        for rank, plan in enumerate(plans):
            for bucket in plan.diagonal.all:
                lengths = torch.full([bucket.count], bucket.longest)
                missing = torch.bincount(bucket.padding // bucket.longest, minlength=bucket.count)
                work[rank] += int(((lengths - missing) * (lengths - missing + 1) // 2).sum())
            for crossings in plan.crossings:
                work[rank] += sum((q.stop - q.start) * (k.stop - k.start) for k, q, _ in crossings)
        total = 0
        for block in blocks_of(families):
            own = len(block.own)
            total += own * block.position + own * (own + 1) // 2
        assert sum(work) == total
        assert len(families) > 1 or max(work) == min(work)


def test_peers_divide_weights_and_take_longer_samples_together(tmp_path: Path) -> None:
    def plan(world_size: int, cp: int, bound: int) -> Plan:
        model = {"policy": write_model(tmp_path / "model", vocab_size=100_000)}
        settings = {"micro_batch_tokens": bound}
        return plan_of("grpo", world_size, models=model, layout={"policy": {"cp": cp}}, batch=settings)

    with pytest.raises(RecipeError, match="one sample may have"):
        plan(2, 1, 600)
    divided, copied = plan(2, 2, 600), plan(2, 1, 4096)
    assert divided.memory is not None
    assert copied.memory is not None
    assert divided.memory.cpu.resident["policy weights"] == copied.memory.cpu.resident["policy weights"]
    assert divided.memory.cpu.totals["policy trains"] < copied.memory.cpu.totals["policy trains"]


def test_memory_and_bounds_count_the_part_of_a_rank(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "models": {
            "policy": write_model(
                tmp_path / "model", hidden_size=1024, intermediate_size=4096, max_position_embeddings=1 << 17
            )
        },
        "rollout": {"max_response_tokens": 60_000, "max_sequences": 8},
    }

    def fit(cp: int, bound: object) -> tuple[Fit, Plan]:
        own = {**settings, "layout": {"policy": {"cp": cp}}, "batch": {"micro_batch_tokens": bound}}
        plan = plan_of("grpo", 4, **own)
        return fit_plan(make_recipe(**own), plan, 12 << 30, is_cpu=False), plan

    for bound in (16_000, "auto"):
        found, plan = fit(4, bound)
        assert not found.is_hopeless
        assert plan.batch.micro_batch_tokens < 17_000
    assert fit(1, "auto")[0].is_hopeless
    uneven = {
        "layout": {"policy": {"ranks": "0-1", "cp": 2}, "reference": {"ranks": "2"}},
        "algorithm": {"kl": {"coefficient": 0.1}},
        "batch": {"micro_batch_tokens": 40_000},
    }
    with pytest.raises(RecipeError, match=r"a rank may have 60512 tokens of one sample: raise it, or give all nodes"):
        plan_of("grpo", 3, **settings, **uneven)
