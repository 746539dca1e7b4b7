"""Which engine `rollout.engine: auto` stands for on this machine. Imports no torch, so that plans are made fast."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from leaderless.config.rollout import EngineName, RolloutConfig


def choose_engine(rollout: RolloutConfig) -> EngineName:
    """Take vLLM where there is a CUDA device and vLLM, here or in an environment that the recipe names; else native.

    Args:
        rollout: Its `external` section.
    """
    has_vllm = rollout.external.python is not None or find_spec("vllm") is not None
    return "vllm" if has_vllm and _has_cuda() else "native"


def _has_cuda() -> bool:
    """Whether this machine has a CUDA device that this process may use, with a torch that can."""
    try:
        is_built_without = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in {"", "-1"}
    return not is_built_without and not is_hidden and any(Path("/dev").glob("nvidia[0-9]*"))
