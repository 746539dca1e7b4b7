"""Compiled layers on a GPU: the numbers of the layers, from fewer kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS
from tests.gpu.test_cuda import NUM_GPUS, join, largest_difference
from tests.tiny import random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from leaderless.config.models import ModelConfig
from leaderless.models.compiled_layers import compiler_failure
from leaderless.planner import Layout
from leaderless.training.engine import ShardingSetup, make_train_engine
from leaderless.training.fsdp import FsdpEngine

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")


def train(compute_dtype: str, *, recomputes: bool, compiles: bool) -> tuple[dict[str, Tensor], int]:
    """Log-probabilities and gradients of a batch, and the number of kernels that a second pass takes."""
    transport, device = join()
    config = ModelConfig(path=tiny_model(), compute_dtype=compute_dtype, gradient_checkpointing=recomputes)  # type: ignore[arg-type]
    setup = setup_of(transport, Layout(transport.world.ranks, dp=1), tiny_model())
    engine = make_train_engine(
        "fsdp", replace(setup, model=config, device=device, sharding=ShardingSetup(compiles=compiles))
    )
    assert isinstance(engine, FsdpEngine)
    (one, *_) = engine.micro_batches(random_samples(LENGTHS, siblings=3))
    engine.forward(one, "none").log_probs.sum().backward()
    engine.discard_gradient()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        found = engine.forward(one, "none").log_probs
        found.sum().backward()
        torch.cuda.synchronize()
    numbers = {"log_probs": found.detach().cpu()}
    for name, weight in engine.named_weights():
        grad = weight.grad
        assert grad is not None
        numbers[f"gradient.{name}"] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu()
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return numbers, len(kernels)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("compute_dtype", "limit"), [("float32", 1e-4), ("bfloat16", 8e-2)])
def test_compiled_layers_have_fewer_kernels_and_the_same_numbers(
    ranks: RankPool, compute_dtype: str, limit: float, *, recomputes: bool
) -> None:
    (plain,) = ranks.run(1, eager, compute_dtype, recomputes, init_group=False)
    (compiled,) = ranks.run(1, with_compiled_layers, compute_dtype, recomputes, init_group=False)
    for kind in ("log_probs", "gradient"):
        assert largest_difference(compiled[0], plain[0], kind) < limit
    assert compiled[1] < 0.75 * plain[1]


def eager(compute_dtype: str, recomputes: bool) -> tuple[dict[str, Tensor], int]:
    return train(compute_dtype, recomputes=recomputes, compiles=False)


def with_compiled_layers(compute_dtype: str, recomputes: bool) -> tuple[dict[str, Tensor], int]:
    return train(compute_dtype, recomputes=recomputes, compiles=True)


def test_the_compiler_works_on_this_gpu() -> None:
    assert not compiler_failure(torch.device("cuda"), torch.bfloat16)
