"""One rank that converts all of its weights to half precision once, in place of layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS
from tests.pictures import samples_with, vision_model
from tests.tiny import mixture_model, random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.config.models import ModelConfig, Whole
from leaderless.distributed.transport import Transport
from leaderless.models import compiled_layers
from leaderless.planner import Layout
from leaderless.training.engine import EngineSetup, ShardingSetup, make_train_engine, make_value_engine
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.worker.checkpoint.shards import Shard, shard_file, write_shards

Engine = FsdpEngine | FsdpValueEngine
PASS_TOKENS = 31


def setup(path: str, keeps: Whole, settings: dict[str, object], *, compiles: bool, **changes: object) -> EngineSetup:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    found = setup_of(transport, Layout(transport.world.ranks, 1), path)
    config = ModelConfig(path=path, **{"compute_dtype": "bfloat16"} | settings)
    own = {
        "model": config,
        "micro_batch_tokens": PASS_TOKENS,
        "sharding": ShardingSetup(keeps=keeps, compiles=compiles),
    }
    return EngineSetup(**vars(found) | own | changes)


def train(path: str, keeps: Whole, settings: dict[str, object], kind: str, folder: str) -> dict[str, Tensor | bytes]:
    """Everything that two updates compute, and the file of a checkpoint."""
    is_critic = kind == "critic"
    make = make_value_engine if is_critic else make_train_engine
    compiles = kind == "compiled"
    if compiles:
        compiled_layers.BACKEND = "aot_eager"
    engine = make("fsdp", setup(path, keeps, settings, is_critic=is_critic, compiles=compiles))
    assert isinstance(engine, Engine)
    assert bool(engine.units) == (keeps == "nothing")
    score: Callable[..., Tensor] = engine.forward
    score_all = engine.values if isinstance(engine, FsdpValueEngine) else engine.log_probs
    batch = samples_with("qwen2_5_vl") if kind == "images" else random_samples(LENGTHS, siblings=3)
    gain = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) / 50

    numbers: dict[str, Tensor | bytes] = {}
    for update in range(2):
        numbers[f"{update}.scores"] = score_all(batch).values
        passes = engine.passes(batch)
        for one in passes:
            with passes.memory():
                outputs = score(one)
                scores = outputs if isinstance(outputs, Tensor) else outputs.log_probs
                (scores * gain[one.response_index]).sum().backward()
        assert passes.number > 1
        for name, weight in engine.named_weights():
            grad = weight.grad
            if grad is not None:
                numbers[f"{update}.{name}"] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        numbers[f"{update}.norm"] = torch.tensor(engine.optimizer_step().grad_norm)
    numbers["scores"] = score_all(batch).values
    types = {(isinstance(one.data, DTensor), one.dtype) for one in engine.model.parameters()}
    assert types == {(keeps == "nothing", torch.float32)}, "nothing is gathered or converted any more"
    file = Path(folder) / f"{keeps}-{shard_file(0)}"
    write_shards(file, {name: Shard.of(value) for name, value in engine.state().items()})
    return numbers | {"checkpoint": file.read_bytes()}


@pytest.mark.parametrize(
    ("path", "settings", "kind"),
    [
        pytest.param(tiny_model, {}, "plain", marks=pytest.mark.thorough),  # the others are plain, and more
        pytest.param(tiny_model, {}, "compiled", marks=pytest.mark.thorough),
        (tiny_model, {}, "critic"),
        (partial(vision_model, "qwen2_5_vl"), {}, "images"),
        (partial(tiny_model, "qwen3"), {"gradient_checkpointing": True}, "recomputed"),
        (tiny_model, {"lora": {"rank": 2, "dropout": 0.1}, "gradient_checkpointing": True}, "adapters"),
        (lambda: mixture_model(tiny_model("qwen3")), {}, "experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_converting_all_weights_at_once_changes_no_bit(
    ranks: RankPool, tmp_path: Path, path: Callable[[], str], settings: dict[str, object], kind: str
) -> None:
    expected, found = (
        ranks.run(1, train, path(), keeps, settings, kind, str(tmp_path))[0] for keeps in ("nothing", "weights")
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        one = found[name]
        assert torch.equal(one, value) if isinstance(value, Tensor) else one == value, name
