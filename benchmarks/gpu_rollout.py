"""Parts of `benchmarks/gpu.py`: generation, its steps, and the attention of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gpu_device import speeds
from gpu_machine import DECODED_TOKENS, DECODING_STEPS, SIBLINGS, Machine, Result, num_weights
from gpu_plan import planned_memory
from leaderless.config.rollout import SamplingConfig
from leaderless.planner.memory.limits import PAGE_TOKENS
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_plan import Arrangement
from leaderless.rollout.native.paged_staging import Staging
from leaderless.rollout.native.pages import PagePool

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg
    from transformers import PreTrainedModel

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls by which the host waits for the device."""
MOST_KERNELS = 8
"""Kernels of a step that are named."""


def generation(machine: Machine) -> Result:
    """Tokens per second of the native engine and of `transformers`, with the bound of products and cache together."""
    preset = machine.preset
    requests, tokens = machine.requests(), preset.prompts * SIBLINGS * preset.response_tokens
    params = SamplingParams(SamplingConfig(), preset.response_tokens)
    with machine.model_folder() as folder:
        model = machine.sampler(folder)
        planned = planned_memory(machine, folder)
        bound = seconds_at_best(machine, num_weights(model), speeds(machine))
        first, then, peaks = dict[str, float](), dict[str, float](), dict[str, int]()
        result: Result = {
            "tokens": tokens,
            "bound_tokens_per_s": tokens / bound,
            "tokens_per_s": then,
            "first_s": first,
            "planned_bytes": planned.allocated("policy generates", without=planned.held),
            "planned": planned.memory.to_json(),
        }
        engine = machine.native(model, "pages", planned.pool_tokens)
        work = partial(generate, engine, requests, params)
        with machine.watching(peaks, "native"):
            first["native"] = machine.once(work)  # compilers work
            then["native"] = tokens / machine.once(work)
        engine.close()
        result["peak_bytes"] = peaks["native"]
        machine.say(result)
        del engine, model, work  # and their memory
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=machine.dtype, attn_implementation="sdpa")
        other = other.to(machine.device).eval()
        then["transformers.generate"] = tokens / machine.once(lambda: whole_batch(machine, other, requests))
    return result


def seconds_at_best(machine: Machine, weights: int, reached: Mapping[str, object]) -> float:
    """Least seconds of all decoding steps: products or reading weights, whichever takes longer, and reading the cache.

    A prompt's keys and values are read once for all of its responses.
    """
    preset, width = machine.preset, machine.dtype.itemsize
    flops, bandwidth = (float(str(reached[name])) for name in ("flops", "bytes_per_s"))
    rows = preset.prompts * SIBLINGS
    products = max(2 * weights * rows / flops, weights * width / bandwidth)
    per_token = 2 * preset.layers * preset.key_heads * (preset.hidden // preset.heads) * width
    cached = preset.prompts * preset.prompt_tokens + rows * preset.response_tokens / 2
    return preset.response_tokens * (products + cached * per_token / bandwidth)


def whole_batch(machine: Machine, model: PreTrainedModel, requests: list[Request]) -> None:
    """`generate` of `transformers` with all responses in one batch."""
    inputs = torch.tensor([r.prompt for r in requests for _ in r.sample_ids], device=machine.device)
    tokens = machine.preset.response_tokens
    model.generate(  # type: ignore[attr-defined]
        inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0
    )


def decoding(machine: Machine) -> Result:
    """Twenty steps of decoding under the profiler, with pages and with slots."""
    from torch._dynamo.utils import counters

    steps, results = DECODING_STEPS, {}
    is_cuda = machine.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * is_cuda
    with machine.model_folder() as folder:
        for name in ("pages", "slots"):
            engine = machine.native(machine.sampler(folder), name)
            for request in machine.requests():
                engine.submit(request, SamplingParams(SamplingConfig(), DECODED_TOKENS))
            for _ in range(steps):
                engine.step()
            machine.synchronize()
            begin = time.perf_counter()
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(steps):
                    engine.step()
                machine.synchronize()
            wall = time.perf_counter() - begin
            engine.close()
            events = profile.key_averages()
            kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
            results[name] = {
                "ms_per_step": 1e3 * wall / steps,
                "kernels_per_step": sum(e.count for e in kernels) / steps,
                "device_busy": sum(e.self_device_time_total for e in kernels) / 1e6 / wall,
                "clones_per_step": sum(e.count for e in events if e.key == "aten::clone") / steps,
                "copies_to_host_per_step": sum(e.count for e in events if "DtoH" in e.key) / steps,
                "copies_to_device_per_step": sum(e.count for e in events if "HtoD" in e.key) / steps,
                "waits_per_step": sum(e.count for e in events if e.key in WAITS) / steps,
                "longest": longest_kernels(kernels, steps),
            }
            machine.say({"steps": results})
    return {"steps": results, "graph_breaks": sum(counters["graph_break"].values()), **dict(counters["stats"])}


def longest_kernels(kernels: Sequence[FunctionEventAvg], steps: int) -> dict[str, float]:
    """Microseconds a step of the kernels that take the longest, by the beginnings of their names."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.self_device_time_total)
    return {kernel.key[:40]: round(kernel.self_device_time_total / steps, 1) for kernel in ordered[:MOST_KERNELS]}


def attention(machine: Machine) -> Result:
    """Bytes of keys and values that attention over pages reads per second, in one layer of a full decoding step."""
    preset = machine.preset
    rows, width = preset.prompts * SIBLINGS, preset.hidden // preset.heads
    own = preset.response_tokens // 2
    needed = rows * -(-(own + 1) // PAGE_TOKENS) + preset.prompts * -(-preset.prompt_tokens // PAGE_TOKENS)
    pages = PagePool(needed)
    prompts = [one for _ in range(preset.prompts) for one in [pages.add(preset.prompt_tokens)] * SIBLINGS]
    arrangement = Arrangement.of([pages.add(own, 1) for _ in range(rows)], prompts)
    staging, lengths = Staging(rows, PAGE_TOKENS, own + preset.prompt_tokens, machine.device), np.full(rows, own)
    host = staging.host(arrangement, pages, lengths + 1)
    host.places.zero_()
    host.places.numpy()[:rows] = pages.slots_at(arrangement.own_slots, lengths)
    plan = staging.send(arrangement, lengths + 1, pages)

    def random(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, width, device=machine.device, dtype=machine.dtype)

    query, key, value = (random(len(plan.places), n) for n in (preset.heads, preset.key_heads, preset.key_heads))
    cached = [random((needed + 1) * PAGE_TOKENS, preset.key_heads) for _ in range(2)]
    attend = attend_with_torch
    if machine.device.type == "cuda":
        from leaderless.rollout.native.paged_kernels import attend_with_kernels

        attend = attend_with_kernels

    def work() -> None:
        for _ in range(20):
            attend(query, key, value, (cached[0], cached[1]), plan, width**-0.5)

    seconds = machine.seconds(machine.recorded(work))
    num_bytes = 2 * preset.key_heads * width * machine.dtype.itemsize
    num_bytes *= preset.prompts * preset.prompt_tokens + rows * (own + 1)
    return {"seconds": seconds / 20, "bytes": num_bytes, "bytes_per_s": 20 * num_bytes / seconds}
