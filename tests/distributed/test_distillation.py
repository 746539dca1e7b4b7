"""Divergences and a teacher's words do not depend on how ranks divide models, tokens and samples."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import random_samples, tiny_model, untied_model

from leaderless.algorithms.divergences import Divergence
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import Transport
from leaderless.planner import Layout
from leaderless.stages.distillation import words_as_columns
from leaderless.training.engine import DistillingEngine
from leaderless.training.fsdp import make_engine

SHARES = {1: [11], 2: [11, 0]}
"""Samples of each shard: one of two has none."""


def distill(
    paths: tuple[str, str], sizes: dict[str, int], micro_batch_tokens: int, how: Divergence, is_whole: bool
) -> Numbers:
    """Words and divergences of own samples, the norm of a gradient and the weights that come of it."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = replace(setup_of(transport, layout, paths[0]), micro_batch_tokens=micro_batch_tokens)
    student = cast("DistillingEngine", make_engine(replace(setup, model=ModelConfig(path=paths[0]))))
    frozen = replace(setup, role="reference", model=ModelConfig(path=paths[1]), optimizer=None)
    teacher = cast("DistillingEngine", make_engine(frozen))
    shard = layout.shard_of(transport.rank)
    first = sum(SHARES[layout.dp][:shard])
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(first, first + SHARES[layout.dp][shard]))
    found = teacher.likeliest_words(batch, 5, how.temperature)
    numbers = Numbers()
    for row, values in zip(batch.ids.tolist(), found.rows(), strict=True):
        numbers[f"words.{row}"], numbers[f"scores.{row}"] = values[:, 0], values[:, 1]
    if not is_whole:
        batch = batch.with_columns(words_as_columns(found))
    weights, divergences = torch.linspace(0.01, 0.05, 111), torch.zeros(111)
    for micro_batch in student.micro_batches(batch):
        if is_whole:
            with teacher.teaching(micro_batch) as read:
                outputs = student.forward(micro_batch, "value", how, read)
                (weights[micro_batch.response_index] * outputs.divergences).sum().backward()
        else:
            outputs = student.forward(micro_batch, "value", how)
            (weights[micro_batch.response_index] * outputs.divergences).sum().backward()
        divergences[micro_batch.response_index] = outputs.divergences.detach()
        assert not outputs.log_probs.requires_grad
    lengths = found.lengths.tolist()
    for row, values in zip(batch.ids.tolist(), divergences[: sum(lengths)].split(lengths), strict=True):
        numbers[f"divergences.{row}"] = values
    numbers["norm"] = torch.tensor(student.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in student.full_weights()}


@pytest.mark.parametrize(
    ("sizes", "micro_batch_tokens"),
    [
        ({"dp": 2}, 31),
        ({"dp": 1, "tp": 2}, 4096),
        ({"dp": 1, "cp": 2}, 31),
        ({"dp": 2, "tp": 2}, 31),
        ({"dp": 1, "tp": 2, "cp": 2}, 31),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_whole", [True, False], ids=["all words", "given words"])
@pytest.mark.parametrize(
    "how",
    [Divergence("reverse_kl", temperature=0.8), Divergence("jensen_shannon", 0.3, 1.3, "renormalize")],
    ids=lambda how: how.kind,
)
def test_ranks_that_divide_a_student_and_its_teacher_learn_like_one(
    ranks: RankPool, sizes: dict[str, int], micro_batch_tokens: int, how: Divergence, is_whole: bool
) -> None:
    paths = untied_model(tiny_model("qwen3")), tiny_model("qwen3", head_dim=16, num_layers=1)

    def run(sizes: dict[str, int], bound: int) -> list[Numbers]:
        num_ranks = sizes["dp"] * sizes.get("tp", 1) * sizes.get("cp", 1)
        return ranks.run(num_ranks, distill, paths, sizes, bound, how, is_whole)

    (expected,) = run({"dp": 1}, 64)
    assert float(expected["norm"]) > 1e-3, "there is something to learn"
    assert largest_difference(run(sizes, micro_batch_tokens), expected) < 1e-5
