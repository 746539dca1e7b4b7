"""The memory that a plan counts on a GPU, where tensors of torch's device `meta` cannot show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.recipes import write_model
from tests.unit.worker.test_device_memory import GROUPS, PROMPT, QWEN, RESPONSE, SIBLINGS, engine_memory, submit
from torch import nn

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.shared_prompts import Family, VarlenAttention
from leaderless.models.causal_lm import CausalLM, empty_causal_lm
from leaderless.planner.memory.model import PassMemory
from leaderless.planner.memory.rank import WORKSPACE_BYTES
from leaderless.rollout.native.paged_check import paged_attention
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
DEVICE = torch.device("cuda")


def model_on_gpu(folder: str) -> CausalLM:
    """A model with weights of 0, so that any token may be drawn."""
    model = empty_causal_lm(ModelConfig(path=folder), "policy")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            there = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
            setattr(module, name, nn.Parameter(there, requires_grad=False))
    model.model.tie_weights()
    return model.to(DEVICE)


def test_attention_to_copied_prompts_takes_what_the_plan_says(tmp_path: Path) -> None:
    """One layer of Qwen2.5-1.5B, 14 prompts of 1,024 tokens with eight responses of 16."""
    planned = engine_memory(write_model(tmp_path / "model", **{**QWEN, "num_hidden_layers": 1})).model
    families = [Family(1024, (16,) * SIBLINGS)] * 14
    tokens = sum(family.num_tokens for family in families)
    work = PassMemory(tokens, 1, 14 * SIBLINGS * 1024, 14 * (1 + SIBLINGS))
    attention = VarlenAttention(families, DEVICE)
    query, key, value = (
        torch.randn(tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for heads in (12, 2, 2)
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention.attend(0, query, key, value, AttentionForm(128**-0.5)).sum().backward()
    found = torch.cuda.max_memory_allocated() - before
    # Without the feed-forward part there is nothing that it could have released.
    released = tokens * 4 * planned.part.intermediate_size * planned.width
    most = released + planned.attention_bytes(work, is_begin=False) + planned.copied_bytes(work)
    result = tokens * planned.part.query_size * planned.width  # and its gradient
    print(f"measured {found / 2**20:.0f} MiB, planned {(most + 2 * result) / 2**20:.0f} MiB")
    assert 0.5 * most < found < 1.15 * (most + 2 * result)


def test_recorded_passes_take_what_the_plan_says(tmp_path: Path) -> None:
    """Two layers of Qwen2.5-1.5B, 512 sequences, until all of them have ended: graphs of several numbers of rows."""
    folder = write_model(tmp_path / "model", **{**QWEN, "num_hidden_layers": 2})
    planned, model = engine_memory(folder), model_on_gpu(folder)
    attend = paged_attention(model, torch.bfloat16, DEVICE, ProcessGroup((0,), 0))
    assert attend is not None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    options = PagedOptions(attend, planned.pool_tokens(), PROMPT + RESPONSE, keeps_memory=True)
    engine = PagedEngine(model, None, frozenset(), GROUPS * SIBLINGS, DEVICE, options)  # type: ignore[arg-type]
    submit(engine, SamplingConfig(temperature=0.7))
    num_left = GROUPS * SIBLINGS
    while num_left:
        num_left -= sum(delta.finish_reason is not None for delta in engine.step())
    most = sum(planned.fullest().values()) + WORKSPACE_BYTES
    found = torch.cuda.max_memory_reserved() - before
    print(f"{len(engine._passes._graphs)} graphs, measured {found / 2**20:.0f} MiB, planned {most / 2**20:.0f} MiB")
    assert engine._passes._graphs
    assert 0.6 * most < found < 1.15 * most
    engine.close()
