"""Megatron itself: the same interfaces as the stand-in's, and the same numbers as the other back end's."""

from __future__ import annotations

import json
import os
import site
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.contracts.test_train_engine import BACKENDS
from tests.distributed.ranks import RankPool
from tests.distributed.test_megatron import environment, local, minus_log_probs, rows_of
from tests.distributed.test_mesh import setup_of
from tests.fakes.in_process import ENVIRONMENT
from tests.tiny import add_gradients, tiny_model

from leaderless.distributed.transport import Transport
from leaderless.planner import Layout
from leaderless.training.engine import ApartSetup, make_train_engine

PYTHON = os.environ.get("LEADERLESS_MEGATRON_PYTHON", "")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LEADERLESS_MEGATRON_PYTHON names no interpreter with Megatron-Bridge"
)

SIGNATURES = """
import inspect, json
from megatron.bridge import AutoBridge
from megatron.core import distributed, optimizer, parallel_state, pipeline_parallel, tensor_parallel, utils
known = [
    AutoBridge.from_hf_pretrained, AutoBridge.to_megatron_provider, AutoBridge.export_hf_weights,
    AutoBridge.load_hf_weights, distributed.finalize_model_grads, optimizer.get_megatron_optimizer,
    pipeline_parallel.get_forward_backward_func, tensor_parallel.gather_from_tensor_model_parallel_region,
    parallel_state.get_pipeline_model_parallel_last_rank, parallel_state.get_pipeline_model_parallel_group,
    utils.get_model_config,
]
print("\\n" + json.dumps({one.__qualname__: list(inspect.signature(one).parameters) for one in known}))
"""


def signatures(python: str) -> dict[str, list[str]]:
    done = subprocess.run([python, "-I", "-c", SIGNATURES], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_stand_in_has_the_interfaces_of_megatron(tmp_path: Path) -> None:
    assert signatures(PYTHON) == signatures(environment(tmp_path / "fake", ENVIRONMENT, *site.getsitepackages()))


def train_really(logs: str, path: str) -> None:
    """Megatron in bfloat16 on the GPU, and the other back end in float32 on the CPU."""
    transport = Transport(torch.device("cpu"), timeout_s=600)
    setup = setup_of(transport, Layout(transport.world.ranks, 1), path)
    apart = ApartSetup(PYTHON, 1200.0, 600.0, Path(logs))
    narrow = setup.model.model_copy(update={"compute_dtype": "bfloat16"})
    engine = make_train_engine("megatron", replace(setup, apart=apart, model=narrow))
    same = make_train_engine(BACKENDS[0], setup)
    rows = rows_of(same, setup.layout, transport.rank)
    for name, value in same.state().items():
        torch.testing.assert_close(local(engine.state()[name]), local(value), msg=name)
    difference = (engine.log_probs(rows).values - same.log_probs(rows).values).abs()
    assert float(difference.mean()) < 0.05
    norms = []
    for one in (engine, same):
        add_gradients(one, rows, minus_log_probs)
        norms.append(one.optimizer_step().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    saved = {name: local(value).clone() for name, value in engine.state().items()}
    for name, value in engine.state().items():
        local(value).copy_(saved[name])
    engine.state_loaded(1)
    assert all(torch.equal(local(value), saved[name]) for name, value in engine.state().items())
    assert float((engine.log_probs(rows).values - same.log_probs(rows).values).abs().mean()) < 0.05


@pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")
def test_megatron_trains_as_the_other_back_end(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, train_really, str(tmp_path / "logs"), tiny_model("qwen3"))
