"""Formats of low precision in which engines of other packages may compute, by the arguments that name them.

Imports no torch. Drafts of tokens are described here, too: they are the other thing that arguments may change about how
an engine arrives at its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import JsonValue

CUDA_FP8 = (8, 9)
"""First compute capability of NVIDIA's GPUs that multiplies in FP8."""
CUDA_INT8 = (7, 5)
"""First compute capability with the integer units that vLLM's kernels for INT8 use."""

Part = Literal["weights", "keys and values"]


@dataclass(frozen=True)
class LowPrecision:
    """A format, and what it takes.

    Attributes:
        argument: Argument that names it.
        part: Numbers that are kept in it. Layers with such weights mostly quantize their inputs, too, token by token.
        value: Value of the argument.
        kind: Kind of its numbers.
        probe_tolerance: Largest mean difference of log-probabilities of the probe that it explains.
        capability: First compute capability of NVIDIA's GPUs that it is allowed on.
        is_on_cpu: Whether the engine computes in it on a CPU.
        is_for_experts: Whether it is for the weights of experts alone.
    """

    argument: str
    part: Part
    value: str
    kind: Literal["FP8", "INT8", "FP4"]
    probe_tolerance: float
    capability: tuple[int, int] = CUDA_FP8
    is_on_cpu: bool = False
    is_for_experts: bool = False

    @property
    def bytes_of_number(self) -> float:
        """Memory of a number; of 4 bits, with the scale of one byte that 16 of them share at most."""
        return 0.5 + 1 / 16 if self.kind == "FP4" else 1.0

    def __str__(self) -> str:
        """The format as it is shown to a user."""
        return f"{self.part} in {self.kind} ({self.argument}: {self.value})"


INT8_WEIGHTS = "int8_per_channel"
"""Value of vLLM's `quantization` that this package adds to those of vLLM."""

_WEIGHTS: Final = ("quantization", "weights")
_CACHE: Final = ("kv_cache_dtype", "keys and values")
FORMATS: Mapping[str, tuple[LowPrecision, ...]] = {
    "vllm": (
        LowPrecision(*_WEIGHTS, INT8_WEIGHTS, "INT8", 1.0, capability=CUDA_INT8, is_on_cpu=True),
        LowPrecision(*_WEIGHTS, "fp8_per_channel", "FP8", 1.0, is_on_cpu=True),
        LowPrecision(*_WEIGHTS, "fp8_per_block", "FP8", 1.0),
        LowPrecision(*_WEIGHTS, "fp8_per_tensor", "FP8", 1.0),
        LowPrecision(*_WEIGHTS, "mxfp8", "FP8", 1.0),
        LowPrecision(*_WEIGHTS, "mxfp4", "FP4", 2.0),
        LowPrecision(*_WEIGHTS, "nvfp4_per_token", "FP4", 2.0, is_for_experts=True),
        LowPrecision(*_WEIGHTS, "int8_per_channel_weight_only", "INT8", 1.0, capability=CUDA_INT8, is_for_experts=True),
        LowPrecision(*_CACHE, "fp8", "FP8", 1.0, is_on_cpu=True),
        LowPrecision(*_CACHE, "fp8_e4m3", "FP8", 1.0, is_on_cpu=True),
        LowPrecision(*_CACHE, "fp8_e5m2", "FP8", 1.0, is_on_cpu=True),
        LowPrecision(*_CACHE, "fp8_per_token_head", "FP8", 1.0),
        LowPrecision(*_CACHE, "int8_per_token_head", "INT8", 1.0, capability=CUDA_INT8),
        LowPrecision(*_CACHE, "nvfp4", "FP4", 2.0),
    ),
    "sglang": (
        LowPrecision(*_CACHE, "fp8_e4m3", "FP8", 1.0),
        LowPrecision(*_CACHE, "fp8_e5m2", "FP8", 1.0),
    ),
}
"""Formats that each engine can be given, with weights that are quantized as they arrive."""
PLAIN = ("auto", "bfloat16", "bf16", "float16")
"""Values that name no format of low precision."""
DRAFTS = "speculative_config"
"""vLLM's argument for drafts of tokens."""


def formats_of(engine: str, arguments: Mapping[str, JsonValue]) -> list[LowPrecision]:
    """Formats of low precision that the arguments of an engine name; `auto` is taken for vLLM."""
    known = FORMATS.get("vllm" if engine == "auto" else engine, ())
    return [one for one in known if arguments.get(one.argument) == one.value]


def num_drafts(engine: str, arguments: Mapping[str, JsonValue]) -> int:
    """Tokens that an engine drafts at a time by its arguments; 0 if it drafts none."""
    given = arguments.get(DRAFTS) if engine in {"vllm", "auto"} else None
    count = given.get("num_speculative_tokens") if isinstance(given, Mapping) else None
    return count if isinstance(count, int) else 0
