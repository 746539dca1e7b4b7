"""The estimated memory of models whose experts ranks divide."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.recipes import plan_of, write_model

from leaderless.planner import Layout, Plan

ROOT = 1000 * 64 + 64
"""Weights in no layer: embeddings, which are also the head, and the last norm."""
EXPERTS = 4 * 4 * 3 * 64 * 24
"""Weights of four experts in each of four layers."""


def plan_with_experts(folder: Path, world_size: int, *, dtype: str = "bfloat16", **sections: object) -> Plan:
    """The plan of a mixture of experts."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    model = write_model(folder, model_type="qwen3_moe", **sizes)
    batch = {"prompts_per_step": 64, "responses_per_prompt": 16, "micro_batch_tokens": 4096}
    models = {"policy": {"path": model, "compute_dtype": dtype}}
    return plan_of("grpo", world_size, models=models, batch=batch, **sections)


def training(plan: Plan) -> dict[str, int]:
    """Parts of the memory while the policy trains, on an accelerator."""
    assert plan.memory is not None
    return plan.memory.accelerator.phases["policy trains"]


@pytest.mark.parametrize(("layout", "num_parts"), [({"tp": 2, "ep": 2}, 2), ({"tp": 2, "ep": 4}, 4), ({"ep": 2}, 2)])
def test_whole_gradients_are_those_of_the_experts_of_a_rank(
    tmp_path: Path, layout: dict[str, int], num_parts: int
) -> None:
    plan = plan_with_experts(tmp_path, 4, layout={"policy": layout}, training={"keep_whole": "all"})
    size, tp = plan.sizes["policy"], layout.get("tp", 1)
    assert size is not None
    others = size.num_parameters - EXPERTS
    assert training(plan)["gradients"] == 4 * (others // tp + EXPERTS // num_parts), "experts are not cut along tp"


def test_ranks_along_tp_gather_experts_of_which_several_have_the_same(tmp_path: Path) -> None:
    def gathered(ep: int) -> int:
        layout = {"policy": {"tp": 4, "ep": ep}}
        return training(plan_with_experts(tmp_path, 4, dtype="float32", layout=layout))["gathered weights"]

    assert gathered(4) == 0, "each rank computes with the weights that it holds"
    plan = plan_with_experts(tmp_path, 4)
    size = plan.sizes["policy"]
    assert size is not None
    layer = (size.num_parameters - ROOT - EXPERTS) // 4 // 4 + EXPERTS // 4 // 2
    assert gathered(2) == 4 * (2 * layer + ROOT // 4)


def test_only_experts_that_several_ranks_have_are_gathered(tmp_path: Path) -> None:
    size = plan_with_experts(tmp_path, 4).sizes["policy"]
    assert size is not None
    counts = [size.num_gathered_experts(Layout((0, 1, 2, 3), 4, ep=ep)) for ep in (1, 2, 4)]
    assert counts == [0, EXPERTS // 2, 0]
    assert size.num_gathered_experts(Layout((0, 1, 2, 3), 2, pp=2, ep=2)) == 0
    assert size.num_gathered_experts(Layout(tuple(range(8)), 4, pp=2, ep=2)) == EXPERTS // 4


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (4, 2)])
def test_megatron_divides_experts_along_ep_alone(tmp_path: Path, tp: int, ep: int) -> None:
    back_end = {"backend": "megatron", "megatron": {"python": "/opt/megatron/bin/python"}}
    plan = plan_with_experts(tmp_path, 4, layout={"policy": {"tp": tp, "ep": ep}}, training=back_end)
    size = plan.sizes["policy"]
    assert size is not None
    assert plan.memory is not None
    others = size.num_parameters - EXPERTS
    assert plan.memory.accelerator.resident["policy weights"] == 4 * (others // tp + EXPERTS // ep)
