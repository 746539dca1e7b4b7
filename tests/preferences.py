"""Pairs, single responses and tiny models that tests of preferences share, with the product's own loss and gradient."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tests.tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from leaderless.algorithms.preference_loss import PreferenceLoss
from leaderless.config.data import DatasetConfig
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.data.dataset import Prompt, make_batch
from leaderless.data.prompts.preferences import make_encoder
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.value_model import load_value_model
from leaderless.stages.preferences import (
    loss_of_rows,
    pair_losses,
    samples_for,
    score_sides,
    side_by_side,
    totals_of,
    with_ends,
)
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine

PAIRS: list[dict[str, str]] = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a * b + 1} or {a}" if a % 2 else str(a + b + 1)}
    for a, b in ((1, 2), (14, 7), (3, 30), (8, 8), (21, 5), (6, 60))
]
"""Pairs with sides of different lengths."""
MARGINS: list[dict[str, object]] = [{**row, "margin": 0.25 * place} for place, row in enumerate(PAIRS)]
"""The same with the margin by which the chosen response is to be better."""
SINGLES: list[dict[str, object]] = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS[:4]
    for side in ("chosen", "rejected")
][:-1]
"""Single responses, more of them desirable than not."""
PAIR_DATA = {"path": "pairs.jsonl", "chosen": "chosen", "rejected": "rejected", "template": "plain"}
SINGLE_DATA = {"path": "singles.jsonl", "response": "completion", "desirable": "label", "template": "plain"}


@functools.cache
def moved_model() -> str:
    """The folder of a model like `tiny_model`, its reference, after some training."""
    folder = tempfile.TemporaryDirectory(prefix="moved-model-")
    _KEPT.append(folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder.name)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder.name)
    return folder.name


@functools.cache
def scoring_model() -> str:
    """The folder of a reward model, with a head that is not 0."""
    folder = tempfile.TemporaryDirectory(prefix="scoring-model-")
    _KEPT.append(folder)
    tokenizer = AutoTokenizer.from_pretrained(moved_model())
    tokenizer.pad_token = "$"  # `transformers` scores the last token that is no padding
    model = AutoModelForSequenceClassification.from_pretrained(moved_model(), num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(7))
    model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def engine_of(path: str, micro_batch_tokens: int = 4096) -> FsdpEngine:
    """A model in float32 on this rank, trained or not."""
    config = ModelConfig(path=path)
    alone, device = ProcessGroup((0,), 0), torch.device("cpu")
    model, optimizer = load_causal_lm(config, "policy"), OptimizerConfig()
    return FsdpEngine(model, config, alone, device, micro_batch_tokens, optimizer=optimizer, num_updates=1)


def batch_of(loss: PreferenceLoss) -> Batch:
    """The pairs or single responses that a loss learns from, with scores of the reference."""
    is_paired = loss.data == "pairs"
    rows = PAIRS if is_paired else SINGLES
    config = DatasetConfig.model_validate(PAIR_DATA if is_paired else SINGLE_DATA)
    encoder = make_encoder(AutoTokenizer.from_pretrained(tiny_model()), config, "data.train")
    encoded = [encoder.encode(row, f"row {place}") for place, row in enumerate(rows)]  # type: ignore[arg-type]
    prompts = [Prompt(row, one) for row, one in zip(rows, encoded, strict=True)]  # type: ignore[arg-type]
    if not is_paired:
        others = [prompts[-1], *prompts[:-1]]
        prompts = [
            replace(prompt, encoded=replace(prompt.encoded, other=other.encoded.response))
            for prompt, other in zip(prompts, others, strict=True)
        ]
    batch = make_batch(list(range(len(rows))), prompts, has_responses=False, has_preferences=True)
    return batch.with_columns(reference_scores=score_sides(engine_of(tiny_model()), batch))


def loss_and_gradient(loss: PreferenceLoss, micro_batch_tokens: int = 4096) -> tuple[float, Mapping[str, Tensor]]:
    """The loss of all rows, and the gradient of each weight, as training computes them on one rank."""
    engine, rows = engine_of(moved_model(), micro_batch_tokens), batch_of(loss)
    totals, value = totals_of(engine, loss, rows, torch.Tensor.clone), 0.0
    for micro_batch in engine.micro_batches(samples_for(loss, rows)):
        found = loss_of_rows(engine, loss, rows, totals, micro_batch)
        found.value.backward()  # type: ignore[no-untyped-call]
        value += float(found.value.detach())
    return value, {name: weight.grad for name, weight in engine.named_weights() if weight.grad is not None}


def reward_loss_and_gradient(centering: float, *, has_margins: bool) -> tuple[float, Mapping[str, Tensor]]:
    """The loss of a reward model on all pairs, and the gradient of each weight, as training computes them."""
    config, margin = ModelConfig(path=scoring_model()), {"margin": "margin"} if has_margins else {}
    model = load_value_model(config, "reward_model")
    model.become_reward_model("models.reward_model")
    alone, device = ProcessGroup((0,), 0), torch.device("cpu")
    engine = FsdpValueEngine(model, config, alone, device, 4096, optimizer=OptimizerConfig(), num_updates=1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    encoder = make_encoder(tokenizer, DatasetConfig.model_validate(PAIR_DATA | margin), "data.train")
    encoded = [encoder.encode(row, f"row {place}") for place, row in enumerate(MARGINS)]  # type: ignore[arg-type]
    prompts = [Prompt(row, one) for row, one in zip(MARGINS, encoded, strict=True)]  # type: ignore[arg-type]
    rows = make_batch(list(range(len(MARGINS))), prompts, has_responses=False, has_preferences=True)
    value = 0.0
    for micro_batch in engine.micro_batches(with_ends(side_by_side(rows))):
        loss = pair_losses(engine.forward(micro_batch), rows, micro_batch, centering)[0].sum() / len(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        value += float(loss.detach())
    return value, {name: weight.grad for name, weight in engine.named_weights() if weight.grad is not None}


def write_rows(folder: Path, name: str, rows: list[dict[str, str]] | list[dict[str, object]]) -> Path:
    """A file of rows."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
