"""What ranks keep whole changes how often they exchange weights and gradients, and no number."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS
from tests.tiny import random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.config.models import ModelConfig, Whole
from leaderless.distributed.transport import Transport
from leaderless.planner import Layout
from leaderless.training.engine import ShardingSetup, make_train_engine
from leaderless.training.fsdp import FsdpEngine

NUM_UNITS = 3
"""Units that are gathered at once: two layers, and the rest."""


class Messages(TorchDispatchMode):
    """Counts exchanges of weights and of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().lower()
        self.counts["gathered"] += "allgather" in name
        self.counts["summed"] += "reduce_scatter" in name
        return func(*args, **kwargs or {})


def train(
    path: str, keeps: Whole, sizes: dict[str, int], settings: dict[str, object], *, compiles: bool = False
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients, weights after two updates, log-probabilities by them, and the messages of the last update."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = setup_of(transport, layout, path)
    config = ModelConfig(path=path, **settings)
    engine = make_train_engine(
        "fsdp",
        replace(setup, model=config, micro_batch_tokens=31, sharding=ShardingSetup(keeps=keeps, compiles=compiles)),
    )
    assert isinstance(engine, FsdpEngine)
    place = layout.coordinates(transport.rank)["dp"]
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(place, len(LENGTHS), layout.dp))
    gain = torch.randn(64 * len(LENGTHS), generator=torch.Generator().manual_seed(place)) / 50

    numbers, messages = dict[str, Tensor](), Messages()
    for update in range(2):
        engine.log_probs(batch)
        with messages:
            messages.counts.clear()
            passes = engine.passes(batch)
            for one in passes:
                with passes.memory():
                    (engine.forward(one, "none").log_probs * gain[one.response_index]).sum().backward()
            messages.counts["passes"] = passes.number
        for name, weight in engine.named_weights():
            grad = weight.grad
            if grad is not None:
                numbers[f"{update}.{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        engine.optimizer_step()
    numbers |= {name: value.clone() for name, value in engine.full_weights()}
    numbers["log_probs"] = engine.log_probs(batch).values
    assert all(isinstance(one, DTensor) for one in engine.model.parameters()), "everything is divided again"
    return numbers, messages.counts


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"lora": {"rank": 2}, "gradient_checkpointing": True}),
        ({"dp": 1, "pp": 2}, {"compute_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_what_is_kept_whole_changes_no_number(
    ranks: RankPool, sizes: dict[str, int], settings: dict[str, object]
) -> None:
    expected = ranks.run(2, train, tiny_model(), "nothing", sizes, settings)
    for keeps in ("weights", "all"):
        for (numbers, counts), (others, other_counts) in zip(
            ranks.run(2, train, tiny_model(), keeps, sizes, settings), expected, strict=True
        ):
            assert numbers.keys() == others.keys()
            for name, value in others.items():
                if keeps == "weights":
                    assert torch.equal(numbers[name], value), name
                else:
                    torch.testing.assert_close(numbers[name], value, rtol=1e-4, atol=1e-6, msg=name)
            passes = counts["passes"]
            assert passes == other_counts["passes"] > 1
            if sizes["dp"] == 2:  # else a stage is on one rank, with nobody to send to
                num_trained = NUM_UNITS - ("lora" in settings)
                assert other_counts == {"passes": passes, "gathered": 5 * passes, "summed": num_trained * passes}
                summed = num_trained * (1 if keeps == "all" else passes)
                assert counts == {"passes": passes, "gathered": NUM_UNITS * passes, "summed": summed}
