"""What the parts of `benchmarks/gpu.py` measure with: a device, a model with random weights, a trainer, and engines.

On a CPU, with the preset `tiny`, parts compute in float32 and measure nothing of interest, which is how they are tested
without a GPU.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.planner.memory.limits import MAX_LOGITS, pool_tokens
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS
from leaderless.rollout.engine import Request
from leaderless.rollout.native.cuda_graph import record
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_check import paged_attention
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sharding import WeightSharding

sys.path.insert(0, str(Path(__file__).parent))  # where tests import it, too
from made import Size

MARK = "MEASURED "
"""Prefix of the result of a part, to tell it from other output."""
SIBLINGS = 8
DECODING_STEPS = 20
"""Steps of decoding that are counted, after as many that warm up."""
DECODED_TOKENS = 10 * DECODING_STEPS
"""Most tokens of a response whose steps are counted: none ends meanwhile."""
MODELS = "GPU_BENCHMARK_MODELS"
"""Environment variable that names a folder in which parts share models."""

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
        max_logits: Most logits that the trainer's head has at a time.
    """

    prompts: int
    prompt_tokens: int
    response_tokens: int
    pass_tokens: int
    square: int = 8192
    copied: int = 1 << 32
    max_logits: int = LARGE_MAX_LOGITS


PRESETS = {
    "7B": Preset(3584, 28, 28, 4, 18944, 152064, 8, 128, 64, 4096),
    "1.5B": Preset(1536, 28, 12, 2, 8960, 151936, 64, 128, 512, 16384),
    "0.5B": Preset(896, 24, 14, 2, 4864, 151936, 32, 128, 256, 8192, copied=1 << 30),
    "0.1B": Preset(512, 12, 8, 2, 2048, 151936, 16, 128, 128, 4096, copied=1 << 28, max_logits=MAX_LOGITS),
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
    def is_trial(self) -> bool:
        """Whether parts are only tried, with models of no interest."""
        return self.preset.hidden <= PRESETS["tiny"].hidden

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
        """A Qwen2 with random weights, which other parts find again where they share models."""
        with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as own:
            shared = os.environ.get(MODELS)
            preset = self.preset
            name = f"{preset.hidden}-{preset.layers}-{key_bias:g}"
            place = Path(shared, name) if shared else Path(own, name)
            if not place.exists():
                made = tempfile.mkdtemp(dir=place.parent)
                self._write_model(made, key_bias)
                try:
                    Path(made).rename(place)
                except OSError:  # another part was faster
                    shutil.rmtree(made)
            yield str(place)

    def _write_model(self, folder: str, key_bias: float) -> None:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.preset.config(), dtype=torch.bfloat16)
        for layer in model.model.layers:
            with torch.no_grad():
                layer.self_attn.k_proj.bias.copy_(key_bias * torch.randn(layer.self_attn.k_proj.bias.shape).sign())
        model.save_pretrained(folder)

    def config(self, folder: str) -> ModelConfig:
        return ModelConfig(path=folder, compute_dtype=self.config_dtype)  # type: ignore[arg-type]

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
            division=WeightSharding(keeps="weights"),
        )
        engine.model.max_logits = self.preset.max_logits  # both as in a run with this much room
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
        """An engine with pages or with slots; the pool of pages may be that of a plan."""
        sequences, preset = self.preset.prompts * SIBLINGS, self.preset
        if way == "slots":
            return NativeEngine(model, None, frozenset(), sequences, self.device)  # type: ignore[arg-type]
        attend = paged_attention(model, self.dtype, self.device, ProcessGroup((0,), 0)) or attend_with_torch
        own = preset.response_tokens if planned_tokens else max(preset.response_tokens, DECODED_TOKENS)
        tokens = planned_tokens or pool_tokens(sequences, own, preset.prompts, preset.prompt_tokens, None)
        options = PagedOptions(attend, tokens, preset.prompt_tokens + own, keeps_memory=True)
        return PagedEngine(model, None, frozenset(), sequences, self.device, options)  # type: ignore[arg-type]


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
