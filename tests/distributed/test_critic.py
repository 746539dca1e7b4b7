"""Values, the gradient of their loss and updated weights are right, and the same however the work is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import LENGTHS, SHARES, Numbers, largest_difference, whole
from tests.tiny import add_gradients, random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from leaderless.algorithms import Denominators, clipped_value_loss, token_weights
from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.value_model import load_value_model
from leaderless.training.fsdp import FsdpValueEngine
from leaderless.training.micro_batches import MicroBatch, response_lengths

CLIP = 0.2
INVALID = 4
"""A sample whose reward failed."""


def write_critic(folder: Path, kind: type = AutoModelForTokenClassification, num_labels: int = 1) -> str:
    """The tiny model with a head that is not zero."""
    model = kind.from_pretrained(tiny_model("qwen3"), num_labels=num_labels)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for name, weight in model.score.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if name == "weight" else 1.0))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_critic(tmp_path_factory.mktemp("critic"))


def columns(batch: Batch) -> tuple[Tensor, Tensor]:
    """[total] old values and returns, which depend only on sample and position."""
    lengths = response_lengths(batch.jagged("response_mask"))
    seeds = [torch.Generator().manual_seed(int(row)) for row in batch.ids]
    rows = [torch.randn(2, int(n), generator=g) for n, g in zip(lengths, seeds, strict=True)]
    both = torch.cat([torch.zeros(2, 0), *rows], dim=1)
    return both[0], both[0] + 0.5 * both[1]


def train_critic(model: str, micro_batch_tokens: int, settings: dict[str, object], num_updates: int) -> Numbers:
    """Values, gradients and updated weights, whole, by name."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    config = ModelConfig(path=model, **settings)  # type: ignore[arg-type]
    engine = FsdpValueEngine(
        load_value_model(config, "critic"),
        config,
        transport.world,
        torch.device("cpu"),
        micro_batch_tokens,
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, warmup_updates=2, max_grad_norm=0.5),
        num_updates=num_updates,
    )
    numbers: Numbers = {}
    shares = SHARES[transport.world.size]
    first = sum(shares[: transport.rank])
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(first, first + shares[transport.rank]))
    for row, values in zip(batch.ids.tolist(), engine.values(batch).rows(), strict=True):
        numbers[f"values.{row}"] = values
    old, returns = columns(batch)
    lengths, valid = response_lengths(batch.jagged("response_mask")), batch.ids != INVALID
    counts = transport.world.sum(Denominators.count(lengths, valid), "counts")
    weights = token_weights("token_mean", lengths, valid, Denominators(*counts.tolist()))

    def loss(values: Tensor, micro_batch: MicroBatch) -> Tensor:
        index = micro_batch.response_index
        return (weights[index] * clipped_value_loss(values, old[index], returns[index], clip=CLIP).loss).sum()

    for _ in range(num_updates):
        add_gradients(engine, batch, loss)
        for name, parameter in engine.named_weights():
            assert parameter.grad is not None, name
            numbers[f"gradients.{name}"] = whole(parameter.grad)
        numbers["grad_norm"] = torch.tensor(engine.optimizer_step().grad_norm)
    numbers |= {f"weights.{name}": value.clone() for name, value in engine.full_weights()}
    return numbers


def test_values_and_gradients_are_those_of_one_sample_after_the_other(ranks: RankPool, critic: str) -> None:
    """Compared with a token classifier of `transformers` in float64, which gets one sample at a time."""
    (result,) = ranks.once(1, train_critic, critic, 64, {}, 1)
    model = AutoModelForTokenClassification.from_pretrained(critic, dtype=torch.float64, attn_implementation="eager")
    model.eval()
    samples = random_samples(LENGTHS, siblings=3)
    old, returns = (column.double().split([after for _, after in LENGTHS]) for column in columns(samples))
    num_tokens = sum(after for row, (_, after) in enumerate(LENGTHS) if row != INVALID)
    rows = zip(samples.jagged("prompt_tokens").rows(), samples.jagged("tokens").rows(), strict=True)
    for row, (prompt, response) in enumerate(rows):
        # The value before the first sampled token is that of the whole prompt.
        states = [torch.cat([prompt, response[:place]]) for place in range(len(response))]
        values = torch.stack([model(state[None]).logits[0, -1, 0] for state in states] or [torch.zeros(()).double()])
        values = values[: len(states)]
        torch.testing.assert_close(result[f"values.{row}"].double(), values.detach(), atol=1e-5, rtol=1e-5)
        if row == INVALID or not states:
            continue
        moved = old[row] + (values - old[row]).clamp(-CLIP, CLIP)
        errors = torch.maximum((values - returns[row]) ** 2, (moved - returns[row]) ** 2)
        (0.5 * errors.sum() / num_tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result[f"gradients.{name}"].double(), parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("world_size", "micro_batch_tokens"),
    [(2, 31), (4, 64), *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((1, 31), (2, 4096)))],
)
def test_values_gradients_and_weights_depend_on_neither_ranks_nor_micro_batches(
    ranks: RankPool, critic: str, world_size: int, micro_batch_tokens: int
) -> None:
    (expected,) = ranks.once(1, train_critic, critic, 4096, {}, 2)
    results = ranks.run(world_size, train_critic, critic, micro_batch_tokens, {}, 2)
    difference = largest_difference(results, expected)
    print(f"{world_size} ranks, micro-batches of {micro_batch_tokens} tokens: {difference:.1e}")
    assert difference < 1e-5


def test_recomputing_activations_changes_no_number_of_a_critic(ranks: RankPool, critic: str) -> None:
    (expected,) = ranks.once(1, train_critic, critic, 64, {}, 1)
    results = ranks.run(2, train_critic, critic, 64, {"gradient_checkpointing": True}, 1)
    assert largest_difference(results, expected) < 1e-5


def test_in_bfloat16_the_head_computes_in_float32(ranks: RankPool, critic: str) -> None:
    (expected,) = ranks.once(1, train_critic, critic, 64, {}, 1)
    results = ranks.run(2, train_critic, critic, 64, {"compute_dtype": "bfloat16"}, 1)
    merged = {key: value for result in results for key, value in result.items()}
    assert all(value.dtype == torch.float32 for value in merged.values())
    values = torch.cat([merged[f"values.{row}"] for row in range(len(LENGTHS))])
    exact = torch.cat([expected[f"values.{row}"] for row in range(len(LENGTHS))])
    assert 1e-5 < float((values - exact).norm() / exact.norm()) < 0.05
    assert not torch.equal(values, values.bfloat16().float()), "values are finer than bfloat16"


def head_of(path: str) -> Numbers:
    """The complete head of a value model as it is loaded."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    torch.manual_seed(transport.rank)
    config = ModelConfig(path=path)
    model = load_value_model(config, "critic")
    engine = FsdpValueEngine(model, config, transport.world, torch.device("cpu"), 64, optimizer=OptimizerConfig())
    assert isinstance(next(engine.model.parameters()), DTensor) == (transport.world.size > 1)
    return {name: value for name, value in engine.full_weights() if name.startswith("score.")}


def test_a_language_model_gets_a_head_of_zeros_on_every_rank(ranks: RankPool) -> None:
    for head in ranks.run(2, head_of, tiny_model("qwen3")):
        assert {name: tuple(value.shape) for name, value in head.items()} == {
            "score.weight": (1, 32),
            "score.bias": (1,),
        }
        assert all(not value.any() for value in head.values())


def test_the_head_of_a_sequence_classifier_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    path = write_critic(tmp_path, AutoModelForSequenceClassification)
    expected = AutoModelForSequenceClassification.from_pretrained(path).score.weight
    (head,) = ranks.run(1, head_of, path)
    torch.testing.assert_close(head["score.weight"], expected.detach())
    assert not head["score.bias"].any(), "sequence classifiers have none"


def test_a_head_with_several_outputs_is_refused(tmp_path: Path) -> None:
    path = write_critic(tmp_path, num_labels=3)
    with pytest.raises(RecipeError, match=r"models\.critic: '.*' has weights of another size than it says: its score"):
        load_value_model(ModelConfig(path=path), "critic")
