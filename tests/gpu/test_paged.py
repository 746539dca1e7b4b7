"""The engine with pages on a GPU: its kernels, its recorded passes, and what it takes of the device."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping

import pytest
import torch
from tests.drawn import check
from tests.paged import Rows, errors
from tests.tiny import mixture_model, tiny_model
from torch import Tensor

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.routers import Routers
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate
from leaderless.rollout.native.cuda_graph import record, run_without_waiting
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_check import DRAW_TOLERANCE, draw_error, paged_attention, token_drawing
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.rollout.native.sampling import write_drawn

DEVICE = torch.device("cuda")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")
ours = pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning:leaderless")

REQUESTS = [Request([7 + i, 3, 12], [10 * i + sibling for sibling in range(1 + i % 4)]) for i in range(12)]
PARAMS = SamplingParams(SamplingConfig(), 60, (), seed=5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_attention_over_pages_is_that_of_a_loop_on_the_cpu(dtype: torch.dtype, limit: float) -> None:
    from leaderless.rollout.native.paged_kernels import attend_with_kernels

    for name, error in errors(attend_with_kernels, DEVICE, dtype).items():
        print(f"{name}, {dtype}: {error:.1e}")
        assert error < limit, name


def test_kernels_draw_the_tokens_of_a_loop_on_the_cpu() -> None:
    from leaderless.rollout.native.sampling_kernels import draw_with_kernels

    num_draws, num_near = check(draw_with_kernels, DEVICE)
    print(f"{num_draws} draws, {num_near} near the end of a token")
    assert draw_error(draw_with_kernels, 151_936, DEVICE) < DRAW_TOLERANCE


def test_attention_finds_pages_behind_four_billion_bytes() -> None:
    """Places of keys and values in a large pool do not fit into 32 bits."""
    from leaderless.rollout.native.paged_kernels import attend_with_kernels

    kv_heads, width, far = 8, 128, (1 << 31) // (8 * 128) + 640  # tokens
    if torch.cuda.mem_get_info()[0] < 4 * 2 * far * kv_heads * width:
        pytest.skip("the device has too little free memory")
    rows = Rows(0, [5, 40, 9], [(37, 2)], 64)
    inputs = rows.tensors(16, kv_heads, width, torch.bfloat16)
    query, key, value, *near = (tensor.to(DEVICE) for tensor in inputs)
    plan = rows.plan(DEVICE)
    expected = attend_with_kernels(query, key, value, (near[0], near[1]), plan, 0.1)
    first = -(-far // 64) * 64
    cached = [torch.empty(first + len(one), kv_heads, width, dtype=torch.bfloat16, device=DEVICE) for one in near]
    for one, there in zip(near, cached, strict=True):
        there[first:] = one
    plan.places += first
    plan.pages += first // 64
    assert torch.equal(attend_with_kernels(query, key, value, (cached[0], cached[1]), plan, 0.1), expected)


def test_a_recording_and_the_check_before_it_work_on_this_gpu() -> None:
    number, total = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"):
        run_without_waiting(number.item)
    assert run_without_waiting(lambda: number + 1).item() == 2
    stream = torch.cuda.current_stream()
    torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)  # torch holds it, and does not use it
    held = torch.cuda.memory_reserved()
    first = record(lambda: total.add_(number), [])
    second = record(lambda: total.mul_(3), [first])
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.memory_reserved() >= held, "a recording releases nothing"
    for graph in (first, second, first):
        graph.replay()
    assert total.item() == 4, "nothing is computed while it is recorded"


def engine_in_pages(
    path: str, pool_tokens: int = 8192, *, dtype: str = "float32", keeps: bool = True, records: bool = False
) -> PagedEngine:
    """An engine with pages of 16 tokens, which may record choices of experts."""
    config = ModelConfig(path=path)
    model = load_causal_lm(config, "policy").to(DEVICE, getattr(torch, dtype)).eval()
    routers = Routers.required(model, "models.policy") if records else None
    attend = paged_attention(model, getattr(torch, dtype), DEVICE, ProcessGroup((0,), 0))
    assert attend is not None
    draw = token_drawing(model, DEVICE, ProcessGroup((0,), 0))
    assert draw is not write_drawn
    options = PagedOptions(attend, pool_tokens, 256, keeps_memory=keeps, page_tokens=16, draw=draw)
    return PagedEngine(model, load_tokenizer(config, "policy"), frozenset(), 20, DEVICE, options, routers)


def weights_of(engine: NativeEngine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.model.named_parameters()}


def load(engine: NativeEngine, weights: Mapping[str, Tensor], version: int = 0) -> None:
    engine.load_weights(WeightStream(iter(weights.items()), version))


@ours
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_pages_recorded_passes_and_late_reading_change_no_token_on_cuda(family: str) -> None:
    path = tiny_model(family)  # type: ignore[arg-type]
    model = load_causal_lm(ModelConfig(path=path), "policy").to(DEVICE).eval()
    slots = NativeEngine(model, load_tokenizer(ModelConfig(path=path), "policy"), frozenset(), 20, DEVICE)
    expected, weights = generate(slots, REQUESTS, PARAMS), weights_of(slots)
    for pool_tokens in (8192, 640):  # the latter is not enough, so that responses give up their pages
        engine, recorded = engine_in_pages(path, pool_tokens), 0
        for version in range(3):
            load(engine, weights, version)
            results = generate(engine, REQUESTS, PARAMS)
            for group, others in zip(results, expected, strict=True):
                for completion, other in zip(group, others, strict=True):
                    assert completion.tokens == other.tokens
                    assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            engine.sleep(keep_weights=False)
            graphs = len(engine._passes._graphs)
            assert graphs > 0
            assert version < 2 or graphs == recorded, "recorded passes stay over new weights and sleep"
            recorded = graphs


@torch.no_grad()
def differences(engine: NativeEngine, groups: list[list[Completion]]) -> Tensor:
    """How far log-probabilities are from those of a pass over whole texts, in float32 on the CPU."""
    model, found = load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval(), []
    for name, weight in model.model.named_parameters():
        weight.copy_(dict(engine.model.model.named_parameters())[name])
    for request, group in zip(REQUESTS, groups, strict=True):
        for one in group:
            text, count = torch.tensor([*request.prompt, *one.tokens]), len(one.tokens)
            attention = PackedAttention([len(text)], torch.device("cpu"))
            places = len(request.prompt) - 1 + torch.arange(count)
            scores = model(text, torch.arange(len(text)), attention, places).log_softmax(-1)
            found.append(scores.gather(1, text[-count:, None])[:, 0] - torch.tensor(one.log_probs))
    return torch.cat(found).abs()


@ours
def test_the_engine_in_bfloat16_is_that_of_the_cpu_within_its_rounding() -> None:
    engine = engine_in_pages(tiny_model(), dtype="bfloat16")
    load(engine, weights_of(engine))
    generate(engine, REQUESTS, PARAMS)
    off = differences(engine, generate(engine, REQUESTS, PARAMS))
    print(f"log-probabilities in bfloat16: {off.mean():.1e} on average, at most {off.max():.1e}")
    assert engine._passes._graphs, "the second time passes are replayed"
    assert off.mean() < 0.02
    assert off.max() < 0.3


@ours
def test_the_host_waits_for_no_step_but_reads_the_last_one() -> None:
    engine = engine_in_pages(tiny_model())
    for request in REQUESTS[:5]:
        engine.submit(request, PARAMS)
    for _ in range(10):
        engine.step()
    for _ in range(10):
        run_without_waiting(engine.step)  # an event is waited for, which is allowed


@ours
@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_releases_what_it_has_taken(keeps: bool) -> None:
    engine = engine_in_pages(tiny_model(), keeps=keeps)
    weights = weights_of(engine)
    engine.sleep(keep_weights=False)
    used = list[int]()
    for version in range(4):
        load(engine, weights, version)
        generate(engine, REQUESTS, PARAMS)
        engine.sleep(keep_weights=False)
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    print(f"bytes while it sleeps: {used}")
    assert used[3] <= used[1] + (1 << 20), "no more from step to step"
    kept = sum(tensor.nbytes for keys_values in engine._pages._layers.values() for tensor in keys_values)
    assert (kept > 0) == keeps
    engine.close()
    assert torch.cuda.memory_allocated() <= used[3] - kept
    assert engine._passes._graphs == {}


def test_experts_that_cannot_be_recorded_are_computed_all_the_same() -> None:
    """In float32 the host has to know how many tokens an expert gets; where it need not, passes are recorded."""
    engine = engine_in_pages(mixture_model(tiny_model("qwen3")))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first, second = (generate(engine, REQUESTS, PARAMS) for _ in range(2))
    print([str(one.message) for one in said if "decoding is slower" in str(one.message)] or "recorded")
    assert [[one.tokens for one in group] for group in first] == [[one.tokens for one in group] for group in second]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert bool(engine._passes._graphs) == engine._passes.is_enabled
    assert torch.randn(4, device=DEVICE).isfinite().all(), "random numbers can be drawn"
