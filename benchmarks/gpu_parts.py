"""The parts of `benchmarks/gpu.py`, each in a separate process: `python benchmarks/gpu_parts.py PART DEVICE PRESET`.

A part prints its results as a line of JSON after a mark. On a CPU, with the preset `tiny`, parts compute in float32 and
measure nothing of interest, which is how the script is tested without a GPU.
"""

from __future__ import annotations

import inspect
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import ProcessGroup, Transport
from leaderless.device import DeviceSetup, setup_device
from leaderless.models.causal_lm import CausalLM, empty_causal_lm, load_causal_lm
from leaderless.models.compiled_layers import compile_layers
from leaderless.models.scoring import score_tokens
from leaderless.planner import Layout
from leaderless.planner.cache_pool import PAGE_TOKENS, pool_tokens
from leaderless.planner.memory import estimate_memory, plan_pool
from leaderless.planner.memory_parts import LARGE_MAX_LOGITS, MAX_LOGITS, Memory, Room
from leaderless.rollout import vllm
from leaderless.rollout.apart.messages import Settings
from leaderless.rollout.child_server import ChildServer
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.external import ExternalEngine
from leaderless.rollout.native import NativeEngine
from leaderless.rollout.paged_attention import attend_with_torch
from leaderless.rollout.paged_check import paged_attention
from leaderless.rollout.paged_engine import PagedEngine, PagedOptions
from leaderless.rollout.paged_plan import Arrangement
from leaderless.rollout.paged_staging import Staging
from leaderless.rollout.pages import Pages
from leaderless.rollout.recording import record
from leaderless.rollout.serving import Colocated, held_by
from leaderless.training.fsdp import FsdpEngine
from leaderless.weights.blocks import Pool, everything, shard_rows
from leaderless.weights.copies import begin_copy
from leaderless.worker.join import join_nobody, meet
from leaderless.worker.place import Place
from leaderless.workflow import load_recipe, resolve_workflow

sys.path.insert(0, str(Path(__file__).parent))  # where tests import it, too
from made import Size

MARK = "MEASURED "
"""Prefix of the result of a part, to tell it from other output."""
SIBLINGS = 8
DECODING_STEPS = 20
"""Steps of decoding that are counted, after as many that warm up."""
DECODED_TOKENS = 10 * DECODING_STEPS
"""Most tokens of a response whose steps are counted: none ends meanwhile."""
KEEPER = """
import torch
from apart import server
from apart.messages import checksum

class Keeper:
    def __init__(self, settings):
        self.weights = {}

    def start(self):
        pass

    def load_bucket(self, weights, data, expected, adapter):
        own = data.clone()
        assert checksum(own) == expected
        for weight in weights:
            self.weights.setdefault(weight.name, weight.view(own).clone()).copy_(weight.view(own))

    def finish_load(self, policy_version, adapter):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def wake(self):
        pass

    def sleep(self, keep_weights):
        pass

server.VllmWorker = Keeper
server.main()
"""
"""Program of an engine in another process that copies weights into its own memory, and does nothing with them."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls by which the host waits for the device."""

Result = dict[str, object]


@dataclass(frozen=True)
class Preset(Size):
    """Sizes of the model and of the work.

    Attributes:
        prompts: Prompts of generation, with `SIBLINGS` responses each.
        prompt_tokens: Tokens of each prompt.
        response_tokens: Tokens of each response.
        pass_tokens: Tokens of a training pass.
        square: Rows of the square matrices of which the product is timed.
        copied: Bytes whose copying is timed.
        least_gib: Least memory of a GPU for this preset.
    """

    prompts: int
    prompt_tokens: int
    response_tokens: int
    pass_tokens: int
    square: int = 8192
    copied: int = 1 << 32
    least_gib: int = 0


PRESETS = {
    "1.5B": Preset(1536, 28, 12, 2, 8960, 151936, 64, 128, 512, 16384, least_gib=70),
    "0.5B": Preset(896, 24, 14, 2, 4864, 151936, 32, 128, 256, 8192, copied=1 << 30, least_gib=22),
    "tiny": Preset(64, 2, 4, 2, 128, 512, 2, 5, 6, 64, square=64, copied=1 << 16),
}


@dataclass(frozen=True)
class Machine:
    """Device, type and sizes of a measurement."""

    device: torch.device
    preset: Preset

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def config_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3) -> float:
        """Median time of some work, after one warm-up run."""
        return statistics.median([self.once(work) for _ in range(repeats + 1)][1:])

    def once(self, work: Callable[[], object]) -> float:
        """Time of some work that was done before in another way, so that nothing is compiled in it."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        """Work that a GPU does without the host, which would take longer to start it than the GPU to do it."""
        if self.device.type == "cpu":
            return work
        work()  # compilers work
        return record(work, []).replay

    def say(self, result: Result) -> None:
        """Print what is known of the result of a part: it counts if the part is stopped before its end."""
        print(MARK + json.dumps(result | {"preset": asdict(self.preset)}), flush=True)

    @contextmanager
    def model_folder(self, key_bias: float = 0.0) -> Iterator[str]:
        """A Qwen2 with random weights."""
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self.preset.config(), dtype=torch.bfloat16)
            for layer in model.model.layers:
                with torch.no_grad():
                    layer.self_attn.k_proj.bias.copy_(key_bias * torch.randn(layer.self_attn.k_proj.bias.shape).sign())
            model.save_pretrained(folder)
            del model, layer  # or they would count in peaks
            yield folder

    def config(self, folder: str, *, compute_dtype: str | None = None) -> ModelConfig:
        return ModelConfig(path=folder, compute_dtype=compute_dtype or self.config_dtype)  # type: ignore[arg-type]

    def sampler(self, folder: str) -> CausalLM:
        """A model in the type in which it generates."""
        return load_causal_lm(self.config(folder), "policy").to(self.device, self.dtype).eval()

    @contextmanager
    def trainer(self, folder: str) -> Iterator[FsdpEngine]:
        """The trainer of a run with one worker."""
        if self.dtype != torch.float32:  # sharding, which mixed precision uses, needs a process group
            dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield self.trainer_of(folder, ProcessGroup((0,), 0))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def trainer_of(self, folder: str, world: ProcessGroup) -> FsdpEngine:
        """The trainer of some ranks."""
        config = self.config(folder)
        engine = FsdpEngine(
            load_causal_lm(config, "policy"),
            config,
            world,
            self.device,
            self.preset.pass_tokens,
            optimizer=OptimizerConfig(),
            num_updates=100,
        )
        engine.model.max_logits = LARGE_MAX_LOGITS  # as in a run with room for them
        return engine

    @contextmanager
    def watching(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Note the most memory that torch has allocated within the block; 0 on a CPU."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        peaks[name] = torch.cuda.max_memory_allocated() if is_cuda else 0

    def requests(self, num_prompts: int | None = None) -> list[Request]:
        generator = random.Random(0)
        preset = self.preset
        return [
            Request(
                [generator.randrange(1, preset.vocabulary) for _ in range(preset.prompt_tokens)],
                [i << 16 | j for j in range(SIBLINGS)],
            )
            for i in range(num_prompts or preset.prompts)
        ]

    def native(self, model: CausalLM, way: str, planned_tokens: int = 0) -> NativeEngine:
        """An engine with pages, with slots, or with slots and without graphs; its pool may be that of a plan."""
        sequences, preset = self.preset.prompts * SIBLINGS, self.preset
        if way == "pages":
            attend = paged_attention(model, self.dtype, self.device, ProcessGroup((0,), 0)) or attend_with_torch
            own = preset.response_tokens if planned_tokens else max(preset.response_tokens, DECODED_TOKENS)
            tokens = planned_tokens or pool_tokens(sequences, own, preset.prompts, preset.prompt_tokens, None)
            options = PagedOptions(attend, tokens, preset.prompt_tokens + own, keeps_memory=True)
            return PagedEngine(model, None, frozenset(), sequences, self.device, options)  # type: ignore[arg-type]
        engine = NativeEngine(model, None, frozenset(), sequences, self.device)  # type: ignore[arg-type]
        if way == "no graphs":
            engine._graphs = None  # noqa: SLF001
        return engine

    def keeper(self, folder: str, rank: int) -> ExternalEngine:
        """An engine in another process that does all that vLLM's server does with weights, except for vLLM's part."""
        vllm.START = vllm.START.replace("from apart.server import main\nmain()\n", KEEPER)
        settings = Settings("", None, False, self.config_dtype, 1, 1, 0.5, None, enable_graphs=False)
        server = ChildServer("the keeper of weights", Path(folder) / f"keeper-{rank}.log", 60, 60, lambda: None)
        driver = vllm.VllmServer(sys.executable, settings, self.device, server)
        return ExternalEngine("keeper", driver, None, frozenset(), 1.0, self.device, None)  # type: ignore[arg-type]


def num_weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def samples(preset: Preset, vocabulary: int) -> Batch:
    """Groups of a prompt and `SIBLINGS` responses that fill one pass."""
    length = max(1, (preset.pass_tokens // 4 - preset.prompt_tokens) // SIBLINGS)
    num_prompts = max(1, preset.pass_tokens // (preset.prompt_tokens + SIBLINGS * length))
    rows = num_prompts * SIBLINGS
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((rows,), length)
    tokens = torch.randint(0, vocabulary, (rows * length,), generator=generator)
    prompts = torch.randint(0, vocabulary, (num_prompts, preset.prompt_tokens), generator=generator).tolist()
    return Batch(
        torch.arange(rows),
        {
            "tokens": Jagged(tokens, lengths, "tokens"),
            "response_mask": Jagged(torch.ones(rows * length, dtype=torch.bool), lengths, "tokens"),
        },
        Batch(torch.arange(num_prompts), {"prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens")}),
        torch.arange(rows) // SIBLINGS,
    )


def environment(machine: Machine) -> Result:
    """Versions, the device, and what compiling needs."""
    packages = {}
    for name in ("torch", "transformers", "triton", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    found: Result = {
        "python": platform.python_version(),
        "packages": packages,
        "varlen_attn": str(inspect.signature(varlen_attn)),
        "compiler": shutil.which("cc") or shutil.which("gcc") or "none",
    }
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def speeds(machine: Machine) -> Result:
    """The speed of the device for a large product and for copying, from which bounds are computed."""
    square = torch.randn(machine.preset.square, machine.preset.square, device=machine.device, dtype=machine.dtype)
    data = torch.empty(machine.preset.copied, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(data)
    return {
        "flops": 2 * machine.preset.square**3 / machine.seconds(lambda: square @ square, 10),
        "bytes_per_s": 2 * machine.preset.copied / machine.seconds(lambda: target.copy_(data), 10),
    }


def generation(machine: Machine) -> Result:
    """Tokens per second of the native engine and of `transformers`, with the bound of products and cache together."""
    preset = machine.preset
    requests, tokens = machine.requests(), preset.prompts * SIBLINGS * preset.response_tokens
    params = SamplingParams(SamplingConfig(), preset.response_tokens)
    with machine.model_folder() as folder:
        model = machine.sampler(folder)
        reached = speeds(machine)
        names = {"native": "pages", "native with slots": "slots", "native without graphs": "no graphs"}
        planned = planned_memory(machine, folder)
        engines = {name: machine.native(model, way, planned.pool_tokens) for name, way in names.items()}
        ways: dict[str, Callable[[], object]] = {
            name: partial(generate, engine, requests, params) for name, engine in engines.items()
        }
        ways["transformers.generate"] = partial(whole_batch, machine, folder, requests)
        first, then, peaks = dict[str, float](), dict[str, float](), dict[str, int]()
        bound = seconds_at_best(machine, num_weights(model), reached)
        result: Result = {
            "tokens": tokens,
            "bound_tokens_per_s": tokens / bound,
            "tokens_per_s": then,
            "first_s": first,
            "planned_bytes": planned.allocated("policy generates", without=planned.held),
            "planned": planned.memory.to_json(),
        }
        for name, way in ways.items():
            spent = []
            with machine.watching(peaks, name):
                for _ in range(2):  # compilers work in the first one
                    begin = time.perf_counter()
                    way()
                    machine.synchronize()
                    spent.append(time.perf_counter() - begin)
            first[name], then[name] = spent[0], tokens / spent[1]
            result["peak_bytes"] = peaks["native"]
            machine.say(result)
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


_WHOLE: dict[str, object] = {}


def whole_batch(machine: Machine, folder: str, requests: list[Request]) -> None:
    """`generate` of `transformers` with all responses in one batch."""
    if folder not in _WHOLE:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=machine.dtype, attn_implementation="sdpa")
        _WHOLE[folder] = model.to(machine.device).eval()
    inputs = torch.tensor([r.prompt for r in requests for _ in r.sample_ids], device=machine.device)
    tokens = machine.preset.response_tokens
    _WHOLE[folder].generate(  # type: ignore[attr-defined]
        inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0
    )


def decoding(machine: Machine) -> Result:
    """Twenty steps of decoding under the profiler, with pages, with slots, and without graphs."""
    from torch._dynamo.utils import counters

    steps, results = DECODING_STEPS, {}
    is_cuda = machine.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * is_cuda
    with machine.model_folder() as folder:
        for name in ("pages", "slots", "no graphs"):
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
            }
            machine.say({"steps": results})
    return {"steps": results, "graph_breaks": sum(counters["graph_break"].values()), **dict(counters["stats"])}


def attention(machine: Machine) -> Result:
    """Bytes of keys and values that attention over pages reads per second, in one layer of a full decoding step."""
    preset = machine.preset
    rows, width = preset.prompts * SIBLINGS, preset.hidden // preset.heads
    own = preset.response_tokens // 2
    needed = rows * -(-(own + 1) // PAGE_TOKENS) + preset.prompts * -(-preset.prompt_tokens // PAGE_TOKENS)
    pages = Pages(needed)
    prompts = [one for _ in range(preset.prompts) for one in [pages.add(preset.prompt_tokens)] * SIBLINGS]
    arrangement = Arrangement([pages.add(own, 1) for _ in range(rows)], prompts)
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
        from leaderless.rollout.paged_kernels import attend_with_kernels

        attend = attend_with_kernels

    def work() -> None:
        for _ in range(20):
            attend(query, key, value, (cached[0], cached[1]), plan, width**-0.5)

    seconds = machine.seconds(machine.recorded(work))
    num_bytes = 2 * preset.key_heads * width * machine.dtype.itemsize
    num_bytes *= preset.prompts * preset.prompt_tokens + rows * (own + 1)
    return {"seconds": seconds / 20, "bytes": num_bytes, "bytes_per_s": 20 * num_bytes / seconds}


def agreement(machine: Machine) -> Result:
    """Mean difference between log-probs of the rollout and of the trainer, with small and with large keys."""
    results = {}
    for key_bias in (0.0, 50.0):
        with machine.model_folder(key_bias) as folder, machine.trainer(folder) as trainer:
            requests = machine.requests(min(4, machine.preset.prompts))
            own = empty_causal_lm(ModelConfig(path=str(folder)), "policy")
            engine = NativeEngine(own, None, frozenset(), 64, machine.device)  # type: ignore[arg-type]
            pool = Pool(Layout((0,), 1), everything)
            with Colocated(engine, trainer, pool, machine.dtype).phase():
                params = SamplingParams(SamplingConfig(), min(64, machine.preset.response_tokens))
                groups = generate(engine, requests, params)
            batch = sampled(requests, [completion.tokens for group in groups for completion in group])
            found = torch.tensor([score for group in groups for completion in group for score in completion.log_probs])
            difference = (trainer.log_probs(batch).values - found).abs()
            results[f"{key_bias:g}"] = {"mean": float(difference.mean()), "largest": float(difference.max())}
    return {"key_bias": results}


def sampled(requests: list[Request], responses: list[list[int]]) -> Batch:
    tokens = Jagged.from_lists(responses, torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    prompts = Jagged.from_lists([list(request.prompt) for request in requests], torch.int64, "prompt_tokens")
    return Batch(
        torch.arange(len(responses)),
        {"tokens": tokens, "response_mask": mask},
        Batch(torch.arange(len(requests)), {"prompt_tokens": prompts}),
        torch.arange(len(responses)) // SIBLINGS,
    )


def training(machine: Machine) -> Result:
    """Forward pass, backward pass and optimizer step of one pass with groups of eight, and its peak memory."""
    preset = machine.preset
    batch = samples(preset, preset.vocabulary)

    with machine.model_folder() as folder, machine.trainer(folder) as trainer:
        micro_batches = trainer.micro_batches(batch)
        num_tokens = sum(len(m.tokens) for m in micro_batches)
        num_scored = sum(len(m.targets) for m in micro_batches)
        peaks: dict[str, int] = {}

        def add_gradients() -> None:
            for micro_batch in micro_batches:
                trainer.forward(micro_batch, "value").log_probs.mean().backward()

        def update() -> None:
            add_gradients()
            trainer.optimizer_step()

        with machine.watching(peaks, "update"):
            step = machine.seconds(update)
            backward = machine.seconds(add_gradients)
        trainer.discard_gradient()
        scoring = machine.seconds(lambda: trainer.log_probs(batch))
        planned = planned_memory(machine, folder)
        small, head = (head_seconds(machine, num_scored, most) for most in (MAX_LOGITS, LARGE_MAX_LOGITS))
        result: Result = {
            "tokens": num_tokens,
            "step_s": step,
            "forward_backward_s": backward,
            "compiled_forward_backward_s": None,
            "log_probs_s": scoring,
            "head_s": head,
            "head_in_small_chunks_s": small,
            "model_flops": training_flops(preset, num_weights(trainer.model), num_tokens, num_scored),
            "peak_bytes": peaks["update"],
            "planned_bytes": planned.allocated("policy trains"),
            "planned": planned.memory.to_json(),
        }
        machine.say(result)
        if machine.device.type == "cuda":
            compile_layers(trainer.model)
            result["compiled_forward_backward_s"] = machine.seconds(add_gradients)
            trainer.discard_gradient()
    return result


def training_flops(preset: Preset, weights: int, num_tokens: int, num_scored: int) -> float:
    """Operations that a forward and a backward pass must do: layers at every token, the head at scored tokens."""
    head = preset.vocabulary * preset.hidden
    attended = preset.prompt_tokens + max(1, (preset.pass_tokens // 4 - preset.prompt_tokens) // SIBLINGS) / 2
    attention = 4 * preset.layers * preset.hidden * attended * num_tokens
    return 3 * (2 * (weights - head) * num_tokens + 2 * head * num_scored + attention)


def head_seconds(machine: Machine, rows: int, max_logits: int) -> float:
    """Scoring of tokens by the head alone, forward and backward, in chunks of a size."""
    preset = machine.preset
    head = torch.nn.Linear(preset.hidden, preset.vocabulary, bias=False, device=machine.device, dtype=machine.dtype)
    hidden = torch.randn(rows, preset.hidden, device=machine.device, dtype=machine.dtype, requires_grad=True)
    targets = torch.randint(0, preset.vocabulary, (rows,), device=machine.device)

    def score() -> None:
        scores, _ = score_tokens(hidden, head, targets, 1.0, "value", max_logits=max_logits)
        scores.sum().backward()

    return machine.seconds(score)


class Planned(NamedTuple):
    """The estimate of `plan`, and the tokens of the engine's pool."""

    memory: Memory
    pool_tokens: int

    @property
    def held(self) -> tuple[str, ...]:
        """Parts that a trainer has, and an engine without one has not."""
        return tuple(name for name in self.memory.resident if name.startswith("policy "))

    def allocated(self, phase: str, *, without: Sequence[str] = ()) -> int:
        """What torch allocates of it in a phase: memory of the driver is none of it."""
        left_out = {"driver", "communication", "libraries", "checkpoint copy", "files being written", *without}
        resident = sum(size for name, size in self.memory.resident.items() if name not in left_out)
        return resident + sum(self.memory.phases[phase].values())


def planned_memory(machine: Machine, folder: str) -> Planned:
    """The estimate of `plan` for a run that trains this model with passes of this size."""
    from leaderless.planner import Cluster, make_plan

    preset = machine.preset
    recipe = {
        "name": "gpu",
        "workflow": "grpo",
        "models": {"policy": {"path": folder, "compute_dtype": machine.config_dtype}},
        "data": {
            "train": {"path": "rows.jsonl", "prompt": "p", "answer": "a"},
            "max_prompt_tokens": preset.prompt_tokens,
        },
        "batch": {
            "prompts_per_step": preset.prompts,
            "responses_per_prompt": SIBLINGS,
            "micro_batch_tokens": preset.pass_tokens,
        },
        "rollout": {
            "max_response_tokens": preset.response_tokens,
            "max_sequences": preset.prompts * SIBLINGS,
            "engine": "native",
        },
        "reward": {"exact_match": 1.0},
        "steps": 1,
    }
    path = Path(folder) / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    loaded = load_recipe(path, ()).recipe
    plan, room = make_plan(loaded, resolve_workflow(loaded.workflow), Cluster(1)), Room(max_logits=LARGE_MAX_LOGITS)
    memory = estimate_memory(loaded, plan.instances, plan.channels, plan.sizes, preset.pass_tokens, room=room)
    pool = plan_pool(loaded, plan.instances, plan.sizes, plan.instances[0], room.cache)
    assert memory is not None
    assert pool is not None
    return Planned(memory.cpu if machine.device.type == "cpu" else memory.accelerator, pool.tokens)


def weights(machine: Machine) -> Result:
    """New weights on their way to engines, as in each step of a run, from all GPUs of the machine to all of them."""
    count = torch.cuda.device_count() if machine.device.type == "cuda" else 1
    with machine.model_folder() as folder:
        if count > 1:
            torch.multiprocessing.spawn(weights_on_rank, (count, machine, folder), count)
        else:
            weights_on_rank(0, count, machine, folder)
        found: Result = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return found


def weights_on_rank(rank: int, count: int, machine: Machine, folder: str) -> None:
    """Sharded weights, gathered for an engine in each process and one next to it, and copied for a channel."""
    is_cuda = machine.device.type == "cuda"
    device = setup_device(rank, count) if is_cuda else DeviceSetup(machine.device, "gloo")
    store, limit = Path(folder) / "store", timedelta(seconds=60)
    if count > 1:
        meet(Place(rank, count, rank, count, store), device, limit)
    else:
        join_nobody(device, limit)
    try:
        here = replace(machine, device=device.device)
        world = Transport(device.device, limit.total_seconds()).world
        trainer = here.trainer_of(folder, world)
        pool, seconds = Pool(Layout(world.ranks, count), shard_rows), {}
        own = here.native(here.sampler(folder), "pages")
        for name, engine in (("native", own), ("apart", here.keeper(folder, rank))):
            seconds[name] = here.seconds(partial(bring, Colocated(engine, trainer, pool, here.dtype), trainer))
            engine.close()
        held = held_by(trainer)
        copied = here.seconds(lambda: begin_copy(held, here.dtype).wait())
        here.synchronize()
        begin = time.perf_counter()
        copy = begin_copy(held, here.dtype)
        host = time.perf_counter() - begin
        copy.wait()
        if rank == 0:
            num_bytes = num_weights(empty_causal_lm(here.config(folder), "policy")) * here.dtype.itemsize
            result = {"bytes": num_bytes, "seconds": seconds, "ranks": count, "copy_s": copied, "copy_host_s": host}
            (Path(folder) / "found.json").write_text(json.dumps(result), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def bring(serving: Colocated, trainer: FsdpEngine) -> None:
    """Give an engine the weights of another update."""
    trainer.policy_version += 1
    with serving.phase() as engine:
        assert engine.policy_version == trainer.policy_version


PARTS: dict[str, Callable[[Machine], Result]] = {
    part.__name__: part for part in (environment, speeds, agreement, training, attention, generation, decoding, weights)
}


def preset_for(device: str) -> str:
    """The largest preset that fits into the device."""
    if device == "cpu":
        return "tiny"
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    for name, preset in PRESETS.items():
        if gib >= preset.least_gib:
            return name
    raise AssertionError


def run(parts: Mapping[str, Callable[[Machine], Result]]) -> None:
    """Measure the part that the command line names."""
    name, device, preset = sys.argv[1:]
    result = parts[name](Machine(torch.device(device), PRESETS[preset]))
    print(MARK + json.dumps(result | {"preset": asdict(PRESETS[preset])}), flush=True)


def main() -> None:
    run(PARTS)


if __name__ == "__main__":
    main()
