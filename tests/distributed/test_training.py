"""Gradients, log-probabilities and weights do not depend on how the work is divided."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.tiny import add_gradients, at_temperature, random_samples, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from leaderless.algorithms import Denominators, token_weights
from leaderless.algorithms.losses.ppo import clipped_policy_loss
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch, response_lengths
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.optimizer import TrainedWeight
from leaderless.training.sharded import forget_order

LENGTHS = [(3, 9), (7, 1), (5, 14), (1, 30), (12, 2), (4, 4), (9, 21), (2, 5), (6, 0), (3, 17), (8, 8)]
"""Prompt and response tokens of each sample: uneven, and one without a response."""
SHARES = {1: [11], 2: [8, 3], 4: [1, 6, 0, 4]}
"""Samples of each rank: uneven, and one rank has none."""

Numbers = dict[str, Tensor]


def train_one_update(model: str, micro_batch_tokens: int, settings: dict[str, object], num_updates: int) -> Numbers:
    """Complete log-probabilities, gradients and updated weights, by name."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    config = ModelConfig(path=model, **settings)  # type: ignore[arg-type]
    engine = FsdpEngine(
        load_causal_lm(config, "policy"),
        config,
        transport.world,
        torch.device("cpu"),
        micro_batch_tokens,
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, warmup_updates=2),
        num_updates=num_updates,
    )
    numbers: Numbers = {}
    samples = at_temperature(random_samples(LENGTHS, siblings=3), 0.7)
    shares = SHARES[transport.world.size]
    first = sum(shares[: transport.rank])
    rows = torch.arange(first, first + shares[transport.rank])
    batch = samples.select(rows)
    scores = engine.log_probs(batch)
    for row, values in zip(rows.tolist(), scores.rows(), strict=True):
        numbers[f"log_probs.{row}"] = values
    for _ in range(num_updates):
        _accumulate(engine, batch, transport)
        for name, parameter in engine.named_weights():
            assert parameter.grad is not None, name
            numbers[f"gradients.{name}"] = whole(parameter.grad)
        numbers["grad_norm"] = torch.tensor(engine.optimizer_step().grad_norm)
    numbers |= {f"weights.{name}": value.clone() for name, value in engine.full_weights()}
    return numbers


def _accumulate(engine: FsdpEngine, batch: Batch, transport: Transport) -> None:
    """The gradient of a clipped objective whose old policy and advantages depend only on the sample."""
    lengths = response_lengths(batch.jagged("response_mask"))
    valid = batch.ids != 4
    counts = transport.world.sum(Denominators.count(lengths, valid), "counts")
    weights = token_weights("sequence_mean_token_mean", lengths, valid, Denominators(*counts.tolist()))
    gain = torch.repeat_interleave((batch.ids % 5 - 2).float(), lengths)

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        old = outputs.log_probs.detach() + 0.3 * gain[micro_batch.response_index]
        ratios, gains = outputs.log_probs - old, gain[micro_batch.response_index]
        tokens = clipped_policy_loss(ratios, gains, clip_low=0.2, clip_high=0.5)
        return (weights[micro_batch.response_index] * tokens.loss).sum()

    add_gradients(engine, batch, loss)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def largest_difference(results: list[Numbers], expected: Numbers) -> float:
    """Relative L2 distance of the tensor that differs most, over all ranks."""
    merged: Numbers = {}
    for result in results:
        merged |= result
    assert merged.keys() == expected.keys()
    return max(
        float((merged[name] - value).norm() / value.norm().clamp(min=1e-6))
        for name, value in expected.items()
        if value.numel()
    )


DIVIDED = [
    (1, 31, "qwen2"),
    (1, 64, "qwen3"),
    (2, 64, "qwen2"),
    (2, 4096, "qwen3"),
    (4, 31, "qwen3"),
    (4, 4096, "qwen2"),
]
"""Each number of ranks with both families, and each size of micro-batches twice; all others are thorough."""


@pytest.mark.parametrize(
    ("world_size", "micro_batch_tokens", "family"),
    [
        pytest.param(*case, marks=() if case in DIVIDED else pytest.mark.thorough)
        for case in itertools.product((1, 2, 4), (31, 64, 4096), ("qwen2", "qwen3"))
    ],
)
def test_gradients_log_probs_and_weights_depend_on_neither_ranks_nor_micro_batches(
    ranks: RankPool, family: str, world_size: int, micro_batch_tokens: int
) -> None:
    model = tiny_model(family)  # type: ignore[arg-type]
    (expected,) = ranks.once(1, train_one_update, model, 4096, {}, 2)
    results = ranks.run(world_size, train_one_update, model, micro_batch_tokens, {}, 2)
    difference = largest_difference(results, expected)
    print(f"{family} on {world_size} ranks, micro-batches of {micro_batch_tokens} tokens: {difference:.1e}")
    assert difference < 1e-5


def clip_in_both_ways(model: str, max_norm: float) -> None:
    transport, config = Transport(torch.device("cpu"), timeout_s=60), ModelConfig(path=model)
    engine = FsdpEngine(
        load_causal_lm(config, "policy"), config, transport.world, torch.device("cpu"), 64, optimizer=OptimizerConfig()
    )
    rank, size = transport.world.rank, transport.world.size
    _accumulate(engine, random_samples(LENGTHS).select(torch.arange(rank, len(LENGTHS), size)), transport)
    weights = [parameter for _, parameter in engine.named_weights()]
    gradients = [parameter.grad for parameter in weights]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    norm = engine._clip(max_norm)
    for parameter, copy in zip(weights, copies, strict=True):
        parameter.grad = copy
    assert norm == float(whole(nn.utils.clip_grad_norm_(weights, max_norm)))
    for gradient, copy in zip(gradients, copies, strict=True):
        assert gradient is not None
        assert whole(gradient).equal(whole(copy))


@pytest.mark.parametrize(("world_size", "max_norm"), [(1, 0.01), (2, 0.01), (2, 1e6)])
def test_clipping_gives_the_bits_of_torch(ranks: RankPool, world_size: int, max_norm: float) -> None:
    ranks.run(world_size, clip_in_both_ways, tiny_model(), max_norm)


@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputing_activations_changes_no_number(ranks: RankPool, world_size: int) -> None:
    (expected,) = ranks.once(1, train_one_update, tiny_model(), 64, {}, 1)
    results = ranks.run(world_size, train_one_update, tiny_model(), 64, {"gradient_checkpointing": True}, 1)
    assert largest_difference(results, expected) < 1e-5


def test_bfloat16_computes_alike_on_any_number_of_ranks_and_keeps_float32_weights(ranks: RankPool) -> None:
    (expected,) = ranks.once(1, train_one_update, tiny_model(), 64, {}, 1)
    (single,) = ranks.run(1, train_one_update, tiny_model(), 64, {"compute_dtype": "bfloat16"}, 1)
    results = ranks.run(2, train_one_update, tiny_model(), 64, {"compute_dtype": "bfloat16"}, 1)
    assert all(value.dtype == torch.float32 for value in single.values())
    assert largest_difference([single], expected) > 1e-5, "the compute type is really another"
    # The gradients of siblings largely cancel, so the remainder is less exact.
    for name, limit in (("log_probs.2", 0.02), ("gradients.model.embed_tokens.weight", 0.15)):
        merged = {key: value for result in results for key, value in result.items()}
        assert (single[name] - expected[name]).norm() / expected[name].norm() < limit
        assert (merged[name] - single[name]).norm() / single[name].norm() < 0.02


def scores_at_temperatures() -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of tokens at temperatures by turns, and those of the same tokens where all have the same one."""
    config, device = ModelConfig(path=tiny_model(), compute_dtype="bfloat16"), torch.device("cpu")
    world, batch = Transport(device, timeout_s=60).world, random_samples(LENGTHS, siblings=3)
    engine = FsdpEngine(load_causal_lm(config, "policy"), config, world, device, 64)
    alike = [engine.log_probs(at_temperature(batch, one)).values for one in (0.7, 1.1)]
    by_turns = torch.tensor([0.7, 1.1]).repeat(len(alike[0]))[: len(alike[0])]
    found = engine.log_probs(at_temperature(batch, by_turns)).values
    return [found[::2], found[1::2]], [alike[0][::2], alike[1][1::2]]


def test_temperatures_of_tokens_are_not_rounded_to_bfloat16(ranks: RankPool) -> None:
    """The closest number to 0.7 is 0.699."""
    for found, expected in zip(*ranks.run(1, scores_at_temperatures)[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_log_probs_equal_those_of_an_unpacked_model_of_transformers(ranks: RankPool) -> None:
    (result,) = ranks.once(1, train_one_update, tiny_model("qwen3"), 64, {}, 1)
    model = load_causal_lm(ModelConfig(path=tiny_model("qwen3")), "policy").model
    model.set_attn_implementation("eager")
    samples = random_samples(LENGTHS, siblings=3)
    rows = zip(samples.jagged("prompt_tokens").rows(), samples.jagged("tokens").rows(), strict=True)
    for index, (prompt, response) in enumerate(rows):
        logits = model(torch.cat([prompt, response])[None]).logits[0] / 0.7
        expected = logits.double().log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(result[f"log_probs.{index}"].double(), expected, atol=1e-5, rtol=1e-5)


def refuse_bad_gradient(model: str) -> str:
    """The error for a gradient with NaN, on each rank; weights must not change."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    config = ModelConfig(path=model)
    engine = FsdpEngine(
        load_causal_lm(config, "policy"),
        config,
        transport.world,
        torch.device("cpu"),
        64,
        optimizer=OptimizerConfig(),
        num_updates=1,
    )
    before = {name: value.clone() for name, value in engine.full_weights()}
    batch = random_samples(LENGTHS[:2])
    factor = float("nan") if transport.rank == 0 else 1.0
    add_gradients(engine, batch, lambda out, _: factor * out.log_probs.sum())
    try:
        engine.optimizer_step()
    except RuntimeError as error:
        assert all(torch.equal(value, before[name]) for name, value in engine.full_weights())
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_not_finite_stops_all_ranks_and_leaves_weights_alone(
    ranks: RankPool, world_size: int
) -> None:
    messages = ranks.run(world_size, refuse_bad_gradient, tiny_model())
    assert all("gradient norm of update 0 is nan" in message for message in messages)


def count_weight_decay(model: str) -> tuple[int, int]:
    """Weights with and without decay."""

    module = load_causal_lm(ModelConfig(path=model), "policy")
    config = OptimizerConfig(weight_decay=0.1, learning_rate=1.0)
    optimizer = make_optimizer([TrainedWeight(*one) for one in module.model.named_parameters()], config)
    for weight in optimizer.weights:
        torch.nn.init.ones_(weight.parameter).grad = torch.zeros_like(weight.parameter)
    optimizer.step(1.0)
    changed = [weight for weight in optimizer.weights if not bool((weight.parameter == 1).all())]
    assert all(bool((weight.parameter == 0.9).all()) for weight in changed)
    return len(changed), len(optimizer.weights) - len(changed)


def test_weight_decay_spares_biases_and_norms() -> None:
    matrices, vectors = count_weight_decay(tiny_model())
    assert matrices == 1 + 2 * 7
    assert vectors == 1 + 2 * (3 + 2)


def order_after_scoring(num_batches: int) -> list[int]:
    """Lengths of all that torch keeps of the order in which passes went through the units of a model."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    config = ModelConfig(path=tiny_model(), compute_dtype="bfloat16")
    engine = FsdpEngine(load_causal_lm(config, "ref"), config, transport.world, torch.device("cpu"), 64)
    scores = [engine.log_probs(random_samples(LENGTHS)).values for _ in range(num_batches)]
    assert all(torch.equal(one, scores[0]) for one in scores)
    groups: list[Any] = []
    for state in (unit._get_fsdp_state() for unit in engine.units):
        groups += state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    assert groups
    return [len(kept) for group in groups for kept in (group._post_forward_indices, group.comm_ctx.post_forward_order)]


def test_a_model_that_is_only_scored_keeps_nothing_of_its_passes(ranks: RankPool) -> None:
    assert {*ranks.run(1, order_after_scoring, 2)[0]} == {0}
    forget_order([])
    forget_order(cast("list[FSDPModule]", [object(), SimpleNamespace(_get_fsdp_state=object)]))  # as of another torch
