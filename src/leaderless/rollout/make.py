"""Makes the engine of a role on this rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import EngineName, RolloutConfig
from leaderless.data.encode import Tokenizer
from leaderless.models.causal_lm import CausalLM
from leaderless.models.tokenizer import end_tokens
from leaderless.planner.model_size import read_model_size
from leaderless.rollout.apart.messages import Settings
from leaderless.rollout.child_server import ChildServer
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.external import PROBE_TOLERANCE, Driver, ExternalEngine, make_probe
from leaderless.rollout.native import NativeEngine
from leaderless.rollout.sglang import SglangServer
from leaderless.rollout.vllm import InProcessVllm, VllmServer

LEAST_TOKENS = 8
"""Shortest context; engines refuse shorter ones."""
CPU_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on the CPU."""


@dataclass(frozen=True)
class Surroundings:
    """The rank on which an engine is made.

    The output of engines goes to `logs`, what the user should know to `report`; `beat` is called as a sign of life.
    """

    rank: int
    world_size: int
    device: torch.device
    logs: Path
    report: Callable[[str], None]
    beat: Callable[[], None]


def make_engine(
    name: EngineName,
    rollout: RolloutConfig,
    config: ModelConfig,
    role: str,
    max_tokens: int,
    model: CausalLM,
    tokenizer: Tokenizer,
    around: Surroundings,
) -> RolloutEngine:
    """Make an engine for at most `max_tokens` of prompt and response; one in another process starts when it is needed.

    Raises:
        RecipeError: The engine is not installed here.
    """
    ends = end_tokens(config, tokenizer)
    if name == "native":
        return NativeEngine(model, tokenizer, ends, rollout.max_sequences, around.device)
    max_tokens = max(max_tokens, LEAST_TOKENS)
    driver = _driver(name, rollout, _settings(rollout, config, max_tokens, around), role, around)
    title, probe = {"vllm": "vLLM", "sglang": "SGLang"}[name], make_probe(len(tokenizer), max_tokens)
    tolerance = PROBE_TOLERANCE[config.compute_dtype]
    return ExternalEngine(title, driver, tokenizer, ends, probe, tolerance, around.device, around.report)


def _settings(rollout: RolloutConfig, config: ModelConfig, max_tokens: int, around: Surroundings) -> Settings:
    external, is_cpu = rollout.external, around.device.type == "cpu"
    return Settings(
        model=config.path,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=config.compute_dtype,
        max_tokens=max_tokens,
        max_sequences=rollout.max_sequences,
        memory_fraction=external.memory_fraction,
        kv_cache_bytes=_host_cache_bytes(rollout, config, max_tokens) if is_cpu else None,
        enable_graphs=external.graphs and not is_cpu,
        is_one_of_many=external.python is None and around.world_size > 1,
    )


def _host_cache_bytes(rollout: RolloutConfig, config: ModelConfig, max_tokens: int) -> int:
    """Compute the memory that the longest sequences need, up to the recipe's share of the host's memory."""
    most = int(rollout.external.memory_fraction * psutil.virtual_memory().total)
    size = read_model_size(config)
    if size is None:
        return most
    # vLLM keeps one block for itself.
    num_blocks = rollout.max_sequences * -(-max_tokens // CPU_BLOCK_TOKENS) + 1
    width = 2 if config.compute_dtype == "bfloat16" else 4
    return min(most, num_blocks * CPU_BLOCK_TOKENS * size.kv_values_per_token * width)


def _driver(name: EngineName, rollout: RolloutConfig, settings: Settings, role: str, around: Surroundings) -> Driver:
    external = rollout.external
    if external.python is None:
        if name == "sglang":
            raise RecipeError.at("rollout.external.python", "must name the interpreter of an environment with SGLang")
        if find_spec("vllm") is None:
            raise RecipeError.at(
                "rollout.engine",
                f"{rollout.engine}: vLLM cannot be imported here: install it, or name the interpreter of an "
                "environment that has it in rollout.external.python",
            )
        return InProcessVllm(settings, around.device)
    python = shutil.which(external.python)
    if python is None:
        raise RecipeError.at("rollout.external.python", f"'{external.python}' is not a program on this machine")
    log = around.logs / f"{name}-{role}-rank-{around.rank}.log"
    title = f"rank {around.rank}: the {name} server of role '{role}'"
    server = ChildServer(title, log, external.start_timeout_s, external.answer_timeout_s, around.beat)
    kind = SglangServer if name == "sglang" else VllmServer
    return kind(python, settings, around.device, server)
