"""Which engine `rollout.engine: auto` stands for on this machine. Imports no torch, so that planning is fast."""

from __future__ import annotations

from importlib.util import find_spec

from leaderless.base.devices import find_accelerator
from leaderless.config.rollout import RolloutConfig


def choose_engine(rollout: RolloutConfig) -> str:
    """Choose vLLM if there is a CUDA device, and vLLM here or in an environment that the recipe names; else native."""
    has_vllm = rollout.external.python is not None or find_spec("vllm") is not None
    return "vllm" if has_vllm and find_accelerator() == "cuda" else "native"
