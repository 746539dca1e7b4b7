"""Whole runs that train with the experts that vLLM chose."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.end_to_end.cli import metrics
from tests.engines_in_use.test_vllm_runs import APART, PYTHON, SERVER, train
from tests.tiny import mixture_model, tiny_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")


SETTINGS = {**SERVER, **APART, "batch.updates_per_step": 2}
REPLAYED = {**SETTINGS, "algorithm.replay_experts": True}


def steps(folder: Path, settings: Mapping[str, object]) -> list[Mapping[str, float]]:
    """The metrics of each step without times, after a run or the rest of one."""
    folder.mkdir(exist_ok=True)
    train(folder, settings, 2)
    return metrics(folder / "runs" / "tiny")


@pytest.mark.timeout(900)
def test_the_experts_that_vllm_chose_are_trained_and_a_stopped_run_continues(tmp_path: Path) -> None:
    settings = {**REPLAYED, "models.policy": mixture_model(tiny_model("qwen3", head_dim=32))}
    whole = steps(tmp_path / "whole", settings)
    assert len(whole) == 3
    for numbers in whole:
        assert numbers["mismatch/abs_max"] < 1e-4
        assert 0.5 <= numbers["policy/expert_entropy"] <= 1
        assert 1 <= numbers["policy/expert_peak"] <= 2, "each token has two of four experts"
        assert 0.9 < numbers["policy/expert_balance"] < 2
        assert numbers["policy/grad_norm"] > 0
    steps(tmp_path / "parts", {**settings, "steps": 1})
    assert steps(tmp_path / "parts", settings) == whole, "bit for bit"


def undecided_model(folder: Path) -> str:
    """A model whose routers find all experts equally good in bfloat16, so that rounding decides."""
    origin = mixture_model(tiny_model("qwen3", head_dim=32))
    shutil.copytree(origin, folder)
    model = AutoModelForCausalLM.from_pretrained(origin)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] * (1 + 0.01 * torch.randn(gate.shape, generator=noise)))
            for parameter in layer.mlp.experts.parameters():
                parameter.mul_(5.0)  # so that it matters who is chosen
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.timeout(900)
def test_the_trainer_computes_what_vllm_did_though_its_routers_round_otherwise(tmp_path: Path) -> None:
    # The probe of new weights does not replay choices: in float32 it would refuse such a model.
    policy = {"path": undecided_model(tmp_path / "model"), "compute_dtype": "bfloat16"}
    found = {
        name: steps(tmp_path / name, {**settings, "models.policy": policy, "steps": 1})[0]
        for name, settings in {"replayed": REPLAYED, "chosen again": SETTINGS}.items()
    }
    assert found["chosen again"]["rollout/response_tokens"] == found["replayed"]["rollout/response_tokens"]
    assert found["replayed"]["mismatch/abs_mean"] < 0.01
    assert found["chosen again"]["mismatch/abs_mean"] > 3 * found["replayed"]["mismatch/abs_mean"]
