"""What a plan says of an accelerator's memory, next to what passes of this size allocate on torch's device `meta`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.live_bytes import META, LiveBytes, watched, without_memory
from tests.pictures import Family as VisionFamily
from tests.pictures import prompt_with, reader_of, vision_model
from tests.unit.recipes import make_recipe, plan_of, write_model
from torch import Tensor, nn

from leaderless.base.devices import trim_host_memory
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.models import decoder, scoring, uploads
from leaderless.models.attention import packed
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.shared_prompts import ExpandedAttention, Family, VarlenAttention, blocks_of
from leaderless.models.causal_lm import CausalLM, empty_causal_lm
from leaderless.models.gradient_checkpointing import recompute_layers
from leaderless.planner.memory import engine as memory_of_engines
from leaderless.planner.memory.engine import EngineMemory
from leaderless.planner.memory.limits import UNBOUND, CacheBound
from leaderless.planner.memory.model import models_of
from leaderless.planner.memory.model_size import read_model_size
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache, paged_engine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.rollout.native.paged_plan import PagedPlan
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
"""Qwen2.5-1.5B."""
CHOOSING = {
    "model_type": "deepseek_v32",
    "vocab_size": 16_160,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16_384,
}
"""DeepSeek-V3.2, smaller, and without experts."""
SIBLINGS = 8
SMALL = {**QWEN, "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def model_on_meta(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    model = empty_causal_lm(config, "policy", has_adapters=config.lora is not None)
    without_memory(model, dtype)
    return model


def groups(num_prompts: int, prompt: int, response: int) -> Batch:
    """Prompts with responses of equal length, which begin with other tokens."""
    rows = num_prompts * SIBLINGS
    lengths, tokens = torch.full((rows,), response), (1 + torch.arange(rows)).repeat_interleave(response)
    prompts = Jagged.from_lists([[number] * prompt for number in range(num_prompts)], torch.int64, "prompt_tokens")
    columns = {"tokens": Jagged(tokens, lengths, "tokens"), "response_mask": Jagged(tokens > 0, lengths, "tokens")}
    table = Batch(torch.arange(num_prompts), {"prompt_tokens": prompts})
    return Batch(torch.arange(rows), columns, table, torch.arange(rows) // SIBLINGS)


def settings(folder: str, prompts: int, prompt: int, response: int, tokens: int, **model: object) -> dict[str, object]:
    """Sections of a recipe."""
    return {
        "models": {"policy": {"path": folder, "compute_dtype": "bfloat16", **model}},
        "data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": prompt},
        "rollout": {"max_response_tokens": response, "max_sequences": prompts * SIBLINGS, "engine": "native"},
        "batch": {"prompts_per_step": prompts, "responses_per_prompt": SIBLINGS, "micro_batch_tokens": tokens},
    }


class Kernel(torch.autograd.Function):
    """Attention that keeps what fused kernels keep."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


@pytest.fixture
def attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and products as on CUDA."""

    def attention_over(families: Sequence[Family], device: torch.device, dtype: torch.dtype) -> Attention:
        return (VarlenAttention if dtype == torch.bfloat16 else ExpandedAttention)(families, device)

    monkeypatch.setattr(decoder, "attention_over", attention_over)
    monkeypatch.setattr(packed, "scaled_dot_product_attention", lambda q, k, v, *_, **__: Kernel.apply(q, k, v))
    monkeypatch.setattr(scoring, "_can_add_float32", lambda _: True)
    monkeypatch.setattr(native, "parameters_with_memory", lambda model: dict(model.model.named_parameters()))


# Training


def taken_by_a_pass(config: ModelConfig, batch: Batch) -> tuple[int, MicroBatch]:
    """Bytes that training on a batch takes at its peak, and the one micro-batch that it is."""
    dtype = getattr(torch, config.compute_dtype)
    model = model_on_meta(config, dtype)
    for parameter in [one for _, one in model.trained_weights()]:
        parameter.requires_grad_(requires_grad=True)
    alone = ProcessGroup((0,), 0)
    # Weights are not sharded, which half precision would do.
    plain = config.model_copy(update={"compute_dtype": "float32"})
    engine = FsdpEngine(model, plain, alone, META, 16_384, optimizer=OptimizerConfig(), num_updates=2)
    if config.gradient_checkpointing and config.lora is None:
        recompute_layers(model.model, "models.policy")
    engine.compute_dtype = dtype
    (micro_batch,) = engine.micro_batches(batch)
    with LiveBytes() as live, torch.autograd.set_multithreading_enabled(False):
        live.know(model)
        found = live.on_top(lambda: engine.forward(micro_batch, "value").log_probs.sum().backward())
    return found, micro_batch


@pytest.mark.usefixtures("attends")
@pytest.mark.filterwarnings("ignore:AdamW starts many kernels")
@pytest.mark.parametrize(
    ("layers", "response", "changes"),
    [
        (3, 1024, {}),
        (3, 64, {}),
        (3, 64, {"compute_dtype": "float32"}),
        (3, 64, {"lora": {"rank": 16}}),
        (3, 64, {"lora": {"rank": 16}, "gradient_checkpointing": True}),
        (3, 1, {"lora": {"rank": 16}, "gradient_checkpointing": True}),
        pytest.param(28, 1024, {}, marks=pytest.mark.thorough),
        pytest.param(28, 64, {}, marks=pytest.mark.thorough),
        pytest.param(28, 64, {"lora": {"rank": 16}, "gradient_checkpointing": True}, marks=pytest.mark.thorough),
    ],
)
def test_a_pass_takes_what_the_plan_says(
    tmp_path: Path, layers: int, response: int, changes: dict[str, object]
) -> None:
    """Prompts of 1,024 tokens with eight responses each, as many as there is room for in 16,384 tokens."""
    prompts = 16_384 // (1024 + SIBLINGS * response)
    folder = write_model(tmp_path / "model", **{**QWEN, "num_hidden_layers": layers})
    config = ModelConfig.model_validate({"path": folder, "compute_dtype": "bfloat16", **changes})
    found, micro_batch = taken_by_a_pass(config, groups(prompts, 1024, response))
    tokens = len(micro_batch.tokens)
    plan = plan_of("grpo", **settings(folder, prompts, 1024, response, tokens, **changes))
    assert plan.memory is not None
    parts = plan.memory.accelerator.phases["policy trains"]
    own = ("activations", "copies for attention", "gradients of attention", "logits", "gradient of the head")
    assert 0.97 * found < sum(parts.get(name, 0) for name in own) < 1.15 * found, parts
    if config.compute_dtype == "bfloat16" and not config.gradient_checkpointing:
        laid_out = sum(block.position for block in blocks_of(micro_batch.families))
        assert parts["copies for attention"] == laid_out * 2 * 2 * 128 * 2 * layers


@pytest.mark.usefixtures("attends")
@pytest.mark.filterwarnings("ignore:AdamW starts many kernels")
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}])
def test_attention_to_chosen_keys_takes_what_the_plan_says(tmp_path: Path, changes: dict[str, object]) -> None:
    """Four times as much as attention to all keys: sequences are laid out apart, with their prompts."""
    prompts, folder = 4, write_model(tmp_path / "model", **CHOOSING)
    config = ModelConfig.model_validate({"path": folder, "compute_dtype": "bfloat16", **changes})
    found, micro_batch = taken_by_a_pass(config, groups(prompts, 1024, 64))
    plan = plan_of("grpo", **settings(folder, prompts, 1024, 64, len(micro_batch.tokens), **changes))
    assert plan.memory is not None
    parts = plan.memory.accelerator.phases["policy trains"]
    own = ("activations", "copies for attention", "attention to chosen keys", "logits", "gradient of the head")
    assert 0.95 * found < sum(parts.get(name, 0) for name in own) < 1.15 * found, parts


# Generation

PROMPT, RESPONSE, GROUPS = 512, 256, 64


def attend(query: Tensor, key: Tensor, value: Tensor, cached: object, plan: PagedPlan, *_: object) -> Tensor:
    """The results of attention over pages, with the memory that kernels write into."""
    plan.room(*query.shape[1:])
    rotated = query.new_empty(query.shape)  # noqa: F841 - it is there until the end
    return query.new_empty(query.shape)


def engine_memory(
    folder: str, cache: CacheBound = UNBOUND, prompt: int = PROMPT, response: int = RESPONSE, **rollout: object
) -> EngineMemory:
    """The plan's view of an engine for `GROUPS` of prompts."""
    sections = settings(folder, GROUPS, prompt, response, 16_384)
    plan = plan_of("grpo", **sections)
    (policy,) = (model for (model,) in models_of(make_recipe(**sections), plan.instances, plan.sizes, "nothing"))
    policy = replace(policy, sampling=policy.sampling.model_copy(update=rollout))
    return EngineMemory(make_recipe(**sections), policy, cache, is_cpu=False)


def submit(engine: NativeEngine, way: SamplingConfig, num_groups: int = GROUPS) -> None:
    for number in range(num_groups):
        ids = [number << 16 | sibling for sibling in range(SIBLINGS)]
        engine.submit(Request([number + 1] * PROMPT, ids), SamplingParams(way, RESPONSE, (), seed=1))


@pytest.mark.usefixtures("attends")
@pytest.mark.parametrize("way", [{"temperature": 0.7}, {"top_p": 0.9}])
def test_an_engine_with_pages_takes_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: dict[str, float]
) -> None:
    monkeypatch.setattr(paged_engine, "mark", lambda _: Mock())  # a device without values does no work to wait for
    folder = write_model(tmp_path / "model", **{**QWEN, "num_hidden_layers": 2})
    planned = engine_memory(folder, **way)
    model = model_on_meta(ModelConfig(path=folder))
    options = PagedOptions(attend, planned.pool_tokens(), PROMPT + RESPONSE, keeps_memory=True)
    read, admitted, computed = list[int](), list[int](), list[int]()
    with LiveBytes() as live, torch.no_grad():
        live.know(model)
        engine = PagedEngine(model, None, frozenset(), GROUPS * SIBLINGS, META, options)  # type: ignore[arg-type]
        before = live.now
        submit(engine, SamplingConfig.model_validate(way))
        with watched(engine, "_extend", live, admitted), watched(engine, "_compute", live, computed):
            with watched(engine, "_read_pass", live, read):
                engine.step()
            engine.step()
        left = live.now - before
    kept, (reading, decoding) = planned.kept(), planned.moments()
    page = 64 * 2 * 2 * 256 * 2  # one belongs to nobody
    assert left == pytest.approx(kept["kv cache"] + page + kept["buffers of passes"], rel=0.001)
    most = 1.1 if "temperature" in way else 1.5  # sorting has memory of its own, which is not seen
    assert 0.95 * max(computed) < kept["recorded passes"] < most * max(computed)
    assert 0.95 * max(read[1:]) < sum(reading.values()) < 1.1 * max(read[1:]), "the first one allocates the pool"
    rows = GROUPS * SIBLINGS * 4 * 151_936
    assert max(admitted) + rows < sum(decoding.values())


def test_an_engine_that_records_experts_has_pages_like_others(tmp_path: Path) -> None:
    engine = engine_memory(write_model(tmp_path / "model", **SMALL))
    algorithm = engine.recipe.algorithm.model_copy(update={"replay_experts": True})
    recording = replace(engine, recipe=engine.recipe.model_copy(update={"algorithm": algorithm}))
    assert recording.kept() == engine.kept()
    assert "recorded passes" in recording.kept()


@pytest.mark.usefixtures("attends")
def test_an_engine_with_slots_takes_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Responses end at any length, and others begin meanwhile: slots of all sizes are in use."""
    for module in (kv_cache, memory_of_engines):
        monkeypatch.setattr(module, "SMALLEST_SLOT", 4)
    monkeypatch.setattr(uploads, "PAGE_BYTES", 1 << 12)  # as small as the model
    folder = write_model(tmp_path / "model", **{**SMALL, "num_hidden_layers": 1})
    planned = engine_memory(folder, CacheBound(has_pages=False), 16, 16, max_sequences=64)
    model, lengths, done = model_on_meta(ModelConfig(path=folder)), random.Random(0), list[Delta]()
    with LiveBytes() as live, torch.no_grad():
        live.know(model)
        engine = NativeEngine(model, None, frozenset(), 64, META)  # type: ignore[arg-type]
        before, found, num_left = live.now, 0, 12 * SIBLINGS
        for number in range(12):
            params = SamplingParams(SamplingConfig(temperature=0.7), lengths.randrange(1, 16), (), seed=1)
            engine.submit(Request([number + 1] * 16, [number << 16 | one for one in range(SIBLINGS)]), params)
        while num_left:
            found = max(found, live.now - before + live.on_top(lambda: done.extend(engine.step())))
            num_left -= sum(delta.finish_reason is not None for delta in done)
            done.clear()
    most = sum(planned.fullest().values())
    assert 0.7 * most < found < 1.1 * most, "masks and the like are small at real sizes"


# Images


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "paligemma"])
def test_pixels_of_images_are_counted(family: VisionFamily) -> None:
    (_, images), size = (
        prompt_with([(40, 24), (16, 16)], family),
        read_model_size(ModelConfig(path=vision_model(family))),
    )
    assert size is not None
    assert size.vision is not None
    pixels = reader_of(family).pixels(images)
    assert pixels.values.nbytes == len(pixels.places) * size.vision.pixel_bytes(4)
    assert size.vision.pixel_bytes(2) == size.vision.pixel_bytes(4) * 3 // 2, "and once more as the model takes them"


# Experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("experts", [{}, {"num_experts": 8, "moe_intermediate_size": 128, "num_experts_per_tok": 3}])
def test_a_small_pass_on_a_cpu_takes_what_the_plan_says(tmp_path: Path, dtype: str, experts: dict[str, int]) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 384, "vocab_size": 256}
    folder = write_model(tmp_path / "model", model_type="qwen3_moe" if experts else "qwen3", **sizes, **experts)
    config, cpu = ModelConfig(path=folder), torch.device("cpu")
    model = empty_causal_lm(config, "policy")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(0.02 * torch.randn(parameter.shape, dtype=getattr(torch, dtype))))
    model.model.tie_weights()
    engine = FsdpEngine(model, config, ProcessGroup((0,), 0), cpu, 2048, optimizer=OptimizerConfig(), num_updates=2)
    engine.compute_dtype = getattr(torch, dtype)
    (micro_batch,) = engine.micro_batches(groups(3, 128, 64))
    with LiveBytes("cpu") as live, torch.autograd.set_multithreading_enabled(False):
        live.know(model)
        found = live.on_top(lambda: engine.forward(micro_batch, "value").log_probs.sum().backward())
    sections = settings(folder, 3, 128, 64, len(micro_batch.tokens))
    plan = plan_of("grpo", **{**sections, "models": {"policy": {"path": folder, "compute_dtype": dtype}}})
    assert plan.memory is not None
    parts = dict(plan.memory.cpu.phases["policy trains"])
    del parts["gathered weights"]  # the model is in the type that computes
    assert 0.95 * found < sum(parts.values()) < 1.15 * found, parts


def resident_bytes() -> int:
    """Memory of this process that the system cannot take back."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def most_resident(work: Callable[[], object]) -> int:
    """Most of it during some work."""
    found, is_over = [resident_bytes()], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.001):
            found.append(resident_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        work()
    finally:
        is_over.set()
        thread.join()
    return max(found)


@pytest.mark.parametrize(("is_tied", "num_passes", "times"), [(True, 1, 2), (True, 2, 3), (False, 2, 3)])
def test_gradients_of_words_take_what_the_plan_says(
    tmp_path: Path, *, is_tied: bool, num_passes: int, times: int
) -> None:
    """A model that is hardly more than its words; `LiveBytes` would keep autograd from adding gradients in place."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 64, "vocab_size": 50_000}
    folder = write_model(tmp_path / "model", model_type="qwen3", tie_word_embeddings=is_tied, **sizes)
    config, cpu = ModelConfig(path=folder, compute_dtype="float32"), torch.device("cpu")
    model = empty_causal_lm(config, "policy")
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.full(parameter.shape, 0.01)))
    if is_tied:
        model.model.tie_weights()
    engine = FsdpEngine(model, config, ProcessGroup((0,), 0), cpu, 2048, optimizer=OptimizerConfig(), num_updates=2)
    (micro_batch,) = engine.micro_batches(groups(1, 8, 2))
    trim_host_memory()
    before = resident_bytes()
    for _ in range(num_passes):
        found = most_resident(lambda: engine.forward(micro_batch, "value").log_probs.sum().backward()) - before
        trim_host_memory()
    words = 512 * 50_000 * 4
    assert found / words == pytest.approx(times, abs=0.3)
    plan = plan_of("grpo", **settings(folder, num_passes, 8, 2, len(micro_batch.tokens), compute_dtype="float32"))
    assert plan.memory is not None
    phase = plan.memory.cpu.phases["policy trains"]
    assert sum(phase.values()) / words == pytest.approx(times, abs=0.3)
