"""Each optimizer computes what its paper says, written naively; nothing depends on how ranks divide weights."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from leaderless.config.models import OptimizerConfig
from leaderless.distributed.weights.blocks import WeightBlock, whole_block
from leaderless.planner.memory.optimizer_states import BLOCK, is_in_blocks
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.muon import COEFFICIENTS, NUM_ITERATIONS, is_hidden_matrix, orthogonal
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.rounding import pieces, random_words, rounded
from leaderless.training.optimizers.whole_matrices import owners_of

MATRIX, EXPERTS, VECTOR, WORDS = (
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.experts.down_proj",
    "model.layers.0.norm.weight",
    "model.embed_tokens.weight",
)
SHAPES = {MATRIX: (6, 4), EXPERTS: (3, 4, 5), VECTOR: (4,), WORDS: (7, 4)}
RATE, NUM_STEPS = 1e-2, 6
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra adamw-8bit, is missing")

Rows = list[list[float]]


def numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, TrainedWeight]:
    return {
        name: TrainedWeight(name, nn.Parameter(numbers(shape, seed)))
        for seed, (name, shape) in enumerate(shapes.items())
    }


def walk(optimizer: Optimizer, weights: dict[str, TrainedWeight], num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    """Weights after some steps with random gradients, some of them small."""
    for step in range(optimizer.num_updates, optimizer.num_updates + num_steps):
        for seed, weight in enumerate(weights.values()):
            weight.parameter.grad = numbers(weight.shape, 100 * step + seed) * 10.0 ** -(step % 3)
        optimizer.step(RATE * (step + 1))
        optimizer.zero_grad()
    return {name: weight.parameter.detach().clone() for name, weight in weights.items()}


def gradient_of(name: str, step: int, index: int) -> float:
    seed = list(SHAPES).index(name)
    return float((numbers(SHAPES[name], 100 * step + seed) * 10.0 ** -(step % 3)).flatten()[index])


def naive_adamw(name: str, index: int, config: OptimizerConfig) -> float:
    """A weight after all steps, in Python's floats, as the paper has it."""
    weight = float(numbers(SHAPES[name], list(SHAPES).index(name)).flatten()[index])
    mean = square = 0.0
    decay = config.weight_decay if len(SHAPES[name]) > 1 else 0.0
    for step in range(NUM_STEPS):
        gradient, rate = gradient_of(name, step, index), RATE * (step + 1)
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        unbiased, spread = mean / (1 - config.beta1 ** (step + 1)), square / (1 - config.beta2 ** (step + 1))
        weight -= rate * decay * weight + rate * unbiased / (math.sqrt(spread) + config.epsilon)
    return weight


def naive_sgd(name: str, index: int, config: OptimizerConfig) -> float:
    weight, momentum = float(numbers(SHAPES[name], list(SHAPES).index(name)).flatten()[index]), 0.0
    decay = config.weight_decay if len(SHAPES[name]) > 1 else 0.0
    for step in range(NUM_STEPS):
        momentum = config.momentum_decay * momentum + gradient_of(name, step, index)
        weight -= RATE * (step + 1) * (decay * weight + momentum)
    return weight


@pytest.mark.parametrize("is_fused", [True, False])
def test_adamw_is_the_algorithm_of_its_paper(is_fused: bool) -> None:
    check_numbers(OptimizerConfig(weight_decay=0.1, beta1=0.8, beta2=0.95), naive_adamw, is_fused=is_fused)


@pytest.mark.parametrize("momentum", [0.0, None, 0.5])
def test_sgd_adds_up_momentum_and_decays_apart_from_it(momentum: float | None) -> None:
    check_numbers(OptimizerConfig(type="sgd", weight_decay=0.1, momentum=momentum), naive_sgd)


def check_numbers(
    config: OptimizerConfig, naive: Callable[[str, int, OptimizerConfig], float], *, is_fused: bool = True
) -> None:
    weights = trained()
    found = walk(make_optimizer(weights.values(), config, is_fused=is_fused), weights)
    for name, values in found.items():
        for index, value in enumerate(values.flatten().tolist()):
            assert value == pytest.approx(naive(name, index, config), rel=1e-6, abs=1e-6), (name, index)


def product(left: Rows, right: Rows) -> Rows:
    return [
        [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)]
        for row in left
    ]


def naive_orthogonal(matrix: Rows) -> Rows:
    """Newton-Schulz as X <- a X + b (X X') X + c (X X')^2 X, from a matrix of norm 1, in Python's floats."""
    if len(matrix) > len(matrix[0]):
        return transposed(naive_orthogonal(transposed(matrix)))
    norm = max(math.sqrt(math.fsum(value**2 for row in matrix for value in row)), 1e-7)
    found = [[value / norm for value in row] for row in matrix]
    for _ in range(NUM_ITERATIONS):
        squared = product(found, transposed(found))
        third, fifth = product(squared, found), product(product(squared, squared), found)
        found = [
            [COEFFICIENTS[0] * x + COEFFICIENTS[1] * y + COEFFICIENTS[2] * z for x, y, z in zip(*rows, strict=True)]
            for rows in zip(found, third, fifth, strict=True)
        ]
    return found


def transposed(matrix: Rows) -> Rows:
    return [list(column) for column in zip(*matrix, strict=True)]


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_matrices_are_made_orthogonal_by_the_iteration_of_newton_and_schulz(shape: tuple[int, int]) -> None:
    matrix = numbers(shape, 1).double()
    found = orthogonal(matrix, torch.float64)
    torch.testing.assert_close(found, torch.tensor(naive_orthogonal(matrix.tolist())).double(), rtol=1e-6, atol=1e-6)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.25
    batch = orthogonal(torch.stack([matrix, 3 * matrix]), torch.float64)
    torch.testing.assert_close(batch, torch.stack([found, found]))
    assert not orthogonal(torch.zeros(shape), torch.float32).any(), "of a gradient of 0 comes no update"


@pytest.mark.parametrize("name", [MATRIX, EXPERTS])
def test_muon_is_its_formula_and_leaves_other_weights_to_adamw(name: str) -> None:
    config = OptimizerConfig(type="muon", weight_decay=0.1, momentum=0.9)
    weights = trained()
    found = walk(make_optimizer(weights.values(), config), weights)
    for other in (VECTOR, WORDS):
        for index, value in enumerate(found[other].flatten().tolist()):
            assert value == pytest.approx(naive_adamw(other, index, config), rel=1e-6, abs=1e-6)
    seed, shape = list(SHAPES).index(name), SHAPES[name]
    start = numbers(shape, seed).double().reshape(-1, *shape[-2:])
    for number, matrix in enumerate(start):
        weight, momentum = matrix, torch.zeros(shape[-2:], dtype=torch.float64)
        for step in range(NUM_STEPS):
            gradient = (numbers(shape, 100 * step + seed) * 10.0 ** -(step % 3)).double()
            gradient, rate = gradient.reshape(-1, *shape[-2:])[number], RATE * (step + 1)
            momentum = 0.9 * momentum + 0.1 * gradient
            update = torch.tensor(naive_orthogonal((0.1 * gradient + 0.9 * momentum).tolist()), dtype=torch.float64)
            weight = (1 - rate * 0.1) * weight - rate * 0.2 * math.sqrt(max(shape[-2:])) * update
        own = found[name].reshape(-1, *shape[-2:])[number].double()
        torch.testing.assert_close(own, weight, rtol=1e-5, atol=2e-6)


def test_muon_in_bfloat16_is_the_one_of_pytorch() -> None:
    config = OptimizerConfig(type="muon", weight_decay=0.1)
    weights = {MATRIX: trained()[MATRIX]}
    theirs = nn.Parameter(weights[MATRIX].parameter.detach().clone())
    other = torch.optim.Muon([theirs], lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(NUM_STEPS):
        theirs.grad = numbers(SHAPES[MATRIX], 100 * step) * 10.0 ** -(step % 3)
        other.param_groups[0]["lr"] = RATE * (step + 1)
        other.step()
    found = walk(make_optimizer(weights.values(), config, dtype=torch.bfloat16), weights)[MATRIX]
    torch.testing.assert_close(found, theirs.detach(), rtol=2e-3, atol=2e-3)


def test_layers_have_matrices_for_muon_and_words_biases_and_what_sees_have_none() -> None:
    assert is_hidden_matrix(MATRIX, (6, 4))
    assert is_hidden_matrix(EXPERTS, (3, 4, 5))
    assert is_hidden_matrix("model.layers.11.mlp.gate.weight", (8, 4)), "what chooses experts"
    for name, shape in (
        (WORDS, (7, 4)),
        ("lm_head.weight", (7, 4)),
        ("score.weight", (1, 4)),
        (VECTOR, (4,)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (3, 8)),
        ("model.layers.0.mamba.conv1d.weight", (8, 1, 4)),
        ("model.visual.blocks.0.attn.qkv.weight", (12, 4)),
        ("model.vision_tower.encoder.layers.0.mlp.fc1.weight", (8, 4)),
    ):
        assert not is_hidden_matrix(name, shape), name


def test_matrices_are_owned_evenly() -> None:
    shapes = {f"{number}": (64, 64 * (1 + number % 3)) for number in range(30)}
    owners = owners_of(shapes, 4)
    loads = [sum(math.prod(shapes[name]) for name, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 64 * 64 * 3
    assert set(owners_of({"0": (2, 2)}, 4).values()) == {0}


def naive_rounded(value: float, noise: int) -> float:
    """The number in bfloat16 below, or above if what it lacks and 16 bits of noise make up a whole one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    kept, rest = divmod(bits, 1 << 16)
    kept += rest + noise % (1 << 16) >= 1 << 16
    (found,) = struct.unpack("<f", struct.pack("<I", kept << 16))
    return float(found)


def test_rounding_is_up_or_down_by_noise_and_right_on_average() -> None:
    values, words = numbers((200,), 0) * 10.0 ** -(numbers((200,), 1).abs() * 5), torch.randint(-(2**62), 2**62, (200,))
    found = rounded(values, words)
    for value, noise, one in zip(values.tolist(), words.tolist(), found.tolist(), strict=True):
        assert one == naive_rounded(value, noise)
    third = torch.full((40_000,), 1 + 2**-7 / 3)
    words = random_words("w", 0, (40_000,), whole_block((40_000,)), (slice(0, 40_000),), third.device)
    assert float(rounded(third, words).double().mean()) == pytest.approx(1 + 2**-7 / 3, abs=2**-7 * 0.01)
    assert len(rounded(third, words).unique()) == 2
    assert torch.equal(rounded(third.bfloat16().float(), words), third.bfloat16()), "numbers in bfloat16 stay"


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5)])
def test_noise_follows_from_the_place_in_the_whole_weight(shape: tuple[int, ...]) -> None:
    def words(block: WeightBlock) -> Tensor:
        found = torch.empty(block.sizes, dtype=torch.int64)
        for piece in pieces(found):
            found[piece] = random_words(MATRIX, 3, shape, block, piece, found.device)
        return found

    whole = words(whole_block(shape))
    assert len(whole.unique()) == whole.numel()
    for dim, size in enumerate(shape):
        for first, last in ((0, 2), (2, size), (size, size)):
            offsets, sizes = [0] * len(shape), [*shape]
            offsets[dim], sizes[dim] = first, last - first
            part = words(WeightBlock(tuple(offsets), tuple(sizes)))
            assert torch.equal(part, whole.narrow(dim, first, last - first))


def test_a_large_weight_is_rounded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict[str, Tensor]:
        weights = trained()
        return walk(make_optimizer(weights.values(), OptimizerConfig(state_dtype="bfloat16")), weights)

    expected = run()
    monkeypatch.setattr("leaderless.training.optimizers.rounding.MAX_WORDS", 9)
    for name, value in run().items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_states_in_bfloat16_follow_those_in_float32(kind: str) -> None:
    """One step is the same: it changes weights before it rounds. Many differ by what rounding adds, and not more."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(type=kind, state_dtype=dtype, weight_decay=0.1)  # type: ignore[arg-type]
        weights = trained()
        optimizer = make_optimizer(weights.values(), config)
        found[dtype] = [walk(optimizer, weights, 1), walk(optimizer, weights, 5)]
        kept = {one.dtype for weight in weights.values() for one in optimizer.states(weight.parameter).values()}
        assert kept == {getattr(torch, dtype)}
    for name, value in found["float32"][0].items():
        torch.testing.assert_close(found["bfloat16"][0][name], value, rtol=1e-6, atol=1e-6)
        others, mine = found["bfloat16"][1][name], found["float32"][1][name]
        assert not torch.equal(others, mine)
        torch.testing.assert_close(others, mine, rtol=0.02, atol=0.02)


def test_a_second_moment_in_bfloat16_still_fades() -> None:
    """Rounded to the nearest, it would stay where it is: a thousandth is less than half of a step of bfloat16."""
    weight = TrainedWeight(MATRIX, nn.Parameter(torch.zeros(64, 64)))
    optimizer = make_optimizer([weight], OptimizerConfig(state_dtype="bfloat16"))
    squares = optimizer.states(weight.parameter)["exp_avg_sq"]
    squares.fill_(1.0)
    for _ in range(200):
        weight.parameter.grad = torch.zeros(64, 64)
        optimizer.step(RATE)
    assert float(squares.float().mean()) == pytest.approx(0.999**200, rel=2e-3)


KINDS = [
    OptimizerConfig(weight_decay=0.1),
    OptimizerConfig(weight_decay=0.1, state_dtype="bfloat16"),
    OptimizerConfig(type="muon", weight_decay=0.1),
    OptimizerConfig(type="muon", weight_decay=0.1, state_dtype="bfloat16"),
    OptimizerConfig(type="sgd", weight_decay=0.1, state_dtype="bfloat16"),
    pytest.param(OptimizerConfig(type="adamw_8bit", weight_decay=0.1), marks=needs_torchao),
]
WIDE = {MATRIX: (16, BLOCK), "model.layers.0.o_proj.weight": (3, 4), VECTOR: (BLOCK,), WORDS: (20, BLOCK)}


@pytest.mark.parametrize("config", KINDS, ids=lambda one: f"{one.type}-{one.state_dtype}")
def test_an_optimizer_continues_from_its_states(config: OptimizerConfig) -> None:
    def made() -> tuple[dict[str, TrainedWeight], Optimizer]:
        weights = trained(WIDE)
        return weights, make_optimizer(weights.values(), config)

    weights, optimizer = made()
    walk(optimizer, weights, 2)
    kept = {name: one.parameter.detach().clone() for name, one in weights.items()}
    live = {name: optimizer.states(one.parameter) for name, one in weights.items()}
    states = {name: {kind: value.clone() for kind, value in some.items()} for name, some in live.items()}
    expected = walk(optimizer, weights)
    for name, some in live.items():
        for kind, value in some.items():
            assert value is not None
            assert value.data_ptr() == optimizer.states(weights[name].parameter)[kind].data_ptr(), "they stay in place"
            assert not torch.equal(value, states[name][kind]), f"{kind} of {name} does not change"
    weights, optimizer = made()
    for name, weight in weights.items():
        weight.parameter.data.copy_(kept[name])
        for kind, value in optimizer.states(weight.parameter).items():
            value.copy_(states[name][kind])
    optimizer.resume(2)
    for name, value in walk(optimizer, weights).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("config", KINDS, ids=lambda one: f"{one.type}-{one.state_dtype}")
def test_weights_that_are_frozen_or_have_no_gradient_stay(config: OptimizerConfig) -> None:
    weights = trained(WIDE)
    weights[WORDS].parameter.requires_grad_(requires_grad=False)
    before = {name: one.parameter.detach().clone() for name, one in weights.items()}
    optimizer = make_optimizer(weights.values(), config)
    assert len(optimizer.weights) == len(WIDE) - 1
    weights[VECTOR].parameter.grad = torch.ones(BLOCK)
    optimizer.step(RATE)
    changed = {name for name, one in weights.items() if not torch.equal(one.parameter, before[name])}
    assert changed == {VECTOR}


@needs_torchao
def test_moments_of_8_bits_are_as_far_from_exact_ones_as_neighbors_allow() -> None:
    """Each number of a block is next to one of 256 values times the largest number, and steps use the exact ones."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    config, weights = OptimizerConfig(type="adamw_8bit", weight_decay=0.1), trained(WIDE)
    exact_weights = trained(WIDE)
    optimizer = make_optimizer(weights.values(), config)
    exact = make_optimizer(exact_weights.values(), config.model_copy(update={"type": "adamw"}))
    first, expected = walk(optimizer, weights, 1), walk(exact, exact_weights, 1)
    for name, value in first.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    for name in (MATRIX, WORDS):
        moments, kept = exact.states(exact_weights[name].parameter), optimizer.states(weights[name].parameter)
        for kind, values in (("exp_avg", get_qmap_signed()), ("exp_avg_sq", get_qmap_unsigned())):
            codes, scales, whole = kept[f"{kind}_codes"], kept[f"{kind}_scales"], moments[kind]
            assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, whole.shape, (len(whole), 1))
            assert torch.allclose(scales, whole.abs().amax(1, keepdim=True), rtol=1e-6)
            for row in range(len(whole)):
                for index in range(0, BLOCK, 17):
                    scale, value = float(scales[row, 0]), float(whole[row, index])
                    nearest = min(abs(one * scale - value) for one in values)
                    mine = abs(values[int(codes[row, index])] * scale - value)
                    assert mine <= nearest + 1e-6 * scale
    later, expected = walk(optimizer, weights), walk(exact, exact_weights)
    errors = {
        name: float((value - expected[name]).norm() / (first[name] - expected[name]).norm())
        for name, value in later.items()
    }
    assert errors[VECTOR] < 1e-6
    assert 1e-4 < max(errors.values()) < 0.05, errors


def test_weights_are_quantized_where_no_block_leaves_a_row() -> None:
    assert is_in_blocks((16, 256), (4, 256))
    assert is_in_blocks((3, 8, 512), (1, 8, 512))
    assert not is_in_blocks((4096,), (4096,)), "vectors"
    assert not is_in_blocks((15, 256), (15, 256)), "less than torchao quantizes"
    assert not is_in_blocks((64, 384), (64, 384))
    assert not is_in_blocks((64, 256), (64, 128)), "ranks along tp have half of each row"
