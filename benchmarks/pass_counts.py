"""Counts what a pass of training on one rank does besides the model's own work: `python benchmarks/pass_counts.py`.

The model is a Qwen2 of 28 layers, narrow enough for a CPU, which computes in bfloat16 with weights in float32.
Operations are counted as torch dispatches them, each of which starts at least one kernel on an accelerator; bytes are
those that conversions of weights and sums of gradients read and write. Passes are also timed, in turns: with so narrow
a model their time is the host's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.tiny import random_samples
from transformers import AutoModelForCausalLM

from decode_counts import FREE
from leaderless.config.models import ModelConfig, OptimizerConfig, Whole
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sharding import WeightSharding
from made import Size
from published import table

SIZE = Size(hidden=32, layers=28, heads=4, key_heads=2, feed_forward=64, vocabulary=256)
WAYS: Mapping[str, Whole] = {
    "each layer is converted when it computes (`keep_whole: nothing`)": "nothing",
    "all are converted once an update (`keep_whole: weights`)": "weights",
}
MOVERS = ("torch/distributed/fsdp/", "leaderless/training/half_precision.py")
"""Sources of what converts weights and sums gradients."""
COPIES = {"copy_", "_foreach_copy_"}
IN_PLACE = {*COPIES, "add_"}


class Counting(TorchDispatchMode):
    """Counts operations: all of them, and those of weights and gradients with the bytes that these read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.moving, self.num_bytes = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE or func.namespace == "profiler":
            return result
        self.total += 1
        if any(part in frame.filename for frame in traceback.extract_stack() for part in MOVERS):
            self.moving += 1
            read = args[1] if name in COPIES else (args, kwargs)
            written = args[0] if name in IN_PLACE else result
            self.num_bytes += num_bytes(read) + num_bytes(written)
        return result


def num_bytes(values: object) -> int:
    """Bytes of all tensors in some values."""
    return sum(one.numel() * one.element_size() for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor))


@contextmanager
def trainers() -> Iterator[dict[str, FsdpEngine]]:
    """A trainer for each way, of the same model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SIZE.config()).save_pretrained(folder)
        config = ModelConfig(path=folder, compute_dtype="bfloat16")
        yield {
            name: FsdpEngine(
                load_causal_lm(config, "policy"),
                config,
                ProcessGroup((0,), 0),
                torch.device("cpu"),
                20_000,
                optimizer=OptimizerConfig(),
                num_updates=2,
                division=WeightSharding(keeps=keeps),
            )
            for name, keeps in WAYS.items()
        }
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats, batch = parser.parse_args().repeats, random_samples([(8, 8), (8, 6)], siblings=2)
    rows, seconds = [], dict[str, list[float]]()
    with trainers() as engines:
        passes = {}
        for name, engine in engines.items():
            (micro_batch,) = engine.micro_batches(batch)

            def run(engine: FsdpEngine = engine, micro_batch: Any = micro_batch) -> None:  # noqa: ANN401
                engine.forward(micro_batch, "value").log_probs.mean().backward()

            passes[name] = run
            run()
            engine.optimizer_step()
            weights = sum(parameter.numel() for parameter in engine.model.parameters())
            for place in ("first", "each further"):
                with Counting() as counting:
                    run()
                figures = counting.total, counting.moving, f"{counting.num_bytes / weights:.1f}"
                rows.append((name, place, *map(str, figures)))
        for _ in range(repeats):
            for name, run in passes.items():
                begin = time.process_time()
                run()
                seconds.setdefault(name, []).append(1e3 * (time.process_time() - begin))
    titles = ("weights", "pass of an update", "operations", "of weights and gradients", "bytes a weight")
    print(table(titles, rows))
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values):.0f} ms of the host ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    main()
