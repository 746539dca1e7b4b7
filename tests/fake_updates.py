"""Updates of all kinds on the device of `tests.fake_accelerator`: what is copied to it, and what the host waits for.

Where ranks divide a model or its passes, the other ones are not there: what they would send has a shape, but no values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast
from unittest.mock import patch

import torch
from tests import fake_accelerator as fake
from tests.pictures import samples_with, vision_model
from tests.tiny import at_temperature, mixture_model, random_samples, tiny_model
from torch import Tensor

from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed import transport
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.ring import RingParallel
from leaderless.models.causal_lm import CausalLM, TokenOutputs, load_causal_lm
from leaderless.models.parallel.context import ContextParallel
from leaderless.models.parallel.tensor import TensorParallel
from leaderless.models.routers import UNKNOWN
from leaderless.models.scoring import _can_add_float32
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.micro_batches import MicroBatch

DTYPE = torch.bfloat16  # of weights
PEERS = ProcessGroup((0, 1), 0)
"""Two ranks of which only the first is there."""
MIXTURE = mixture_model(tiny_model("qwen3"))
PICTURES = {name: vision_model(name) for name in ("qwen2_5_vl", "qwen3_vl", "llava", "paligemma")}
"""Models, made before the device is registered."""
Engine = FsdpEngine | FsdpValueEngine


@dataclass
class Waits:
    """Number of messages that the host waited for as soon as they were sent."""

    count: int = 0


class Done:
    """A message that has arrived."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def absent_ranks(waits: Waits) -> Iterator[None]:
    """Messages to and from ranks that are not there."""

    def poll(self: ProcessGroup, *_: object) -> None:
        waits.count += len(self.backlog) < MESSAGES_AHEAD

    def done(*_: object, **__: object) -> Done:
        return Done()

    names = "all_reduce", "all_to_all_single", "isend", "irecv"
    replaced = [patch.object(transport.dist, name, done) for name in names]
    replaced += [patch.object(transport.dist, "P2POp", done), patch.object(transport, "_all_gather", done)]
    replaced += [patch.object(transport.dist, "batch_isend_irecv", lambda _: [Done()])]
    replaced += [patch.object(ProcessGroup, "_poll", poll)]
    for one in replaced:
        one.start()
    try:
        yield
    finally:
        for one in replaced:
            one.stop()


def scored(outputs: TokenOutputs | Tensor) -> Tensor:
    return outputs.sum() if isinstance(outputs, Tensor) else outputs.log_probs.sum() + outputs.entropies.sum()


def policy(
    path: str, prepare: Callable[[CausalLM], object] = lambda _: None, lora: LoraConfig | None = None
) -> FsdpEngine:
    """A language model, on the device once it has been prepared."""
    config = ModelConfig(path=path, compute_dtype="float32", lora=lora)
    model = load_causal_lm(config, "policy")
    prepare(model)
    moved = cast("CausalLM", fake.moved(model, DTYPE))
    engine = FsdpEngine(moved, config, fake.ALONE, fake.DEVICE, 64, optimizer=OptimizerConfig(), num_updates=2)
    engine.compute_dtype = DTYPE
    return engine


def divided(kind: type[ContextParallel]) -> FsdpEngine:
    engine = policy(tiny_model())
    engine.divide_passes(kind(PEERS))
    return engine


def with_experts(batch: Batch) -> Batch:
    """The batch with recorded choices: two experts in each of two layers."""
    assert batch.prompts is not None
    lengths = batch.prompts.jagged("prompt_tokens").lengths[batch.prompt_index]
    counts = 4 * (lengths + (batch.jagged("tokens").lengths - 1).clamp(min=0))
    return batch.with_columns(experts=Jagged(torch.full((int(counts.sum()),), UNKNOWN).byte(), counts, "experts"))


def kinds() -> Iterator[tuple[str, Callable[[], Engine], Batch]]:
    """Updates by name: an engine and a batch."""
    batch = at_temperature(random_samples(fake.LENGTHS, siblings=3), torch.linspace(0.5, 1.5, 73))
    yield "policy", lambda: policy(tiny_model()), batch
    yield "critic", lambda: fake.critic(DTYPE), batch
    yield "adapters with dropout", lambda: policy(tiny_model(), lora=LoraConfig(rank=4, dropout=0.1)), batch
    yield "recorded experts", lambda: policy(MIXTURE), with_experts(batch)
    for family, path in PICTURES.items():
        yield f"images, {family}", lambda path=path: policy(path), samples_with(family)  # type: ignore[misc]
    yield "cp", lambda: divided(ContextParallel), batch
    yield "cp around a ring", lambda: divided(RingParallel), batch
    yield "tp", lambda: policy(tiny_model(), lambda model: TensorParallel.divide(model, PEERS, "models.policy")), batch


def updates(accelerator: fake.Accelerator) -> dict[str, dict[str, float]]:
    """What a pass of some or all kinds of updates has copied and waited for, and one of the scores of its tokens."""
    waits, found, names = Waits(), dict[str, dict[str, float]](), sys.argv[2:]
    _can_add_float32(fake.KIND)  # tried once

    def counted(work: Callable[[], object], num_passes: int) -> dict[str, float]:
        def numbers() -> dict[str, float]:
            here = accelerator
            return {
                "copies in": here.num_sent,
                "waits": here.num_waits + here.num_reads + waits.count,
                "copies back": here.num_copies,
            }

        before = numbers()
        work()
        return {name: (count - before[name]) / num_passes for name, count in numbers().items()}

    def train(engine: Engine, micro_batches: Sequence[MicroBatch]) -> None:
        for micro_batch in micro_batches:
            scored(engine.forward(micro_batch)).backward()

    with absent_ranks(waits):
        for name, make, batch in kinds():
            if names and name not in names:
                continue
            engine = make()
            parts = engine.micro_batches(batch)
            found[name] = counted(partial(train, engine, parts[:1]), 1)
            if name in {"policy", "critic"}:
                score = engine.values if isinstance(engine, FsdpValueEngine) else engine.log_probs
                found[f"scores, {name}"] = counted(partial(score, batch), len(parts))
    return found
