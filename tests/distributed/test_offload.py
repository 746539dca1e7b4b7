"""On several ranks no bit depends on what is offloaded, and a run continues with anything else offloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import loss_of
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_optimizers import (
    MUON,
    QUANTIZED,
    ROUNDED,
    SGD,
    Sizes,
    learn,
    model_of,
    needs_torchao,
)
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Jagged
from leaderless.distributed.transport import Transport
from leaderless.planner import Layout
from leaderless.training.engine import ShardingSetup
from leaderless.training.fsdp import FsdpEngine, make_engine

ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)


def same(left: Numbers, right: Numbers) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("qwen2", ADAMW),
        ("qwen2", ROUNDED),
        ("qwen3", MUON),
        ("qwen2", SGD),
        pytest.param("wide", QUANTIZED, marks=needs_torchao),
    ],
    ids=["adamw", "adamw-bfloat16", "muon", "sgd", "adamw-8bit"],
)
def test_two_ranks_learn_the_same_with_states_on_the_disk_and_continue_either_way(
    ranks: RankPool, tmp_path: Path, name: str, optimizer: OptimizerConfig
) -> None:
    model, on_disk = model_of(tmp_path, name), optimizer.model_copy(update={"offload": "disk"})

    def learned(folder: str, sizes: Sizes, config: OptimizerConfig, way: str) -> Numbers:
        num_ranks = sizes["dp"] * sizes.get("tp", 1)
        return ranks.run(num_ranks, learn, str(tmp_path / folder), model, sizes, config, way, deadline_s=600)[0]

    begun = learned("device", {"dp": 2}, optimizer, "begin")
    assert same(begun, learned("disk", {"dp": 2}, on_disk, "begin"))
    continued = learned("device", {"dp": 2}, optimizer, "continue")
    assert not same(begun, continued)
    assert same(continued, learned("device", {"dp": 2}, on_disk, "continue"))
    assert same(continued, learned("disk", {"dp": 2}, optimizer, "continue"))
    for sizes in ({"dp": 1}, {"dp": 1, "tp": 2}):
        assert largest_difference([learned("disk", sizes, on_disk, "continue")], continued) < 1e-4


def engine_of(transport: Transport, config: ModelConfig, sharding: ShardingSetup, *, is_trained: bool) -> FsdpEngine:
    setup = setup_of(transport, Layout(transport.world.ranks, transport.world.size), config.path)
    engine = make_engine(replace(setup, model=config, sharding=sharding, optimizer=ADAMW if is_trained else None))
    assert isinstance(engine, FsdpEngine)
    return engine


def gradients(folder: str, path: str, compute_dtype: str) -> list[tuple[Numbers, int]]:
    """Gradients with inputs of layers here and in a file, and bytes that were written."""
    transport, found = Transport(torch.device("cpu"), timeout_s=300), []
    samples, place = random_samples(LENGTHS, siblings=3), transport.rank
    mine = torch.arange(len(samples)) % transport.world.size == place
    for is_away in (False, True):
        written: list[int] = []
        config = ModelConfig(
            path=path, compute_dtype=compute_dtype, gradient_checkpointing=True, offload_activations=is_away
        )
        engine = engine_of(transport, config, ShardingSetup(offload_folder=Path(folder)), is_trained=True)
        with watching(written):
            for _ in range(2):
                add_gradients(engine, samples.select(mine), loss_of)
        own = {name: one.grad for name, one in engine.named_weights() if one.grad is not None}
        own = {name: one.to_local() if hasattr(one, "to_local") else one for name, one in own.items()}
        found.append(({name: one.clone() for name, one in own.items()}, sum(written)))
    return found


class watching:  # noqa: N801
    """Notes the bytes that are written to files without names."""

    def __init__(self, written: list[int]) -> None:
        self._written = written

    def __enter__(self) -> None:
        from leaderless.base.scratch_files import ScratchFile

        self._before: Callable[..., None] = ScratchFile.write

        def write(file: ScratchFile, data: memoryview, offset: int) -> None:
            self._written.append(len(data))
            self._before(file, data, offset)

        ScratchFile.write = write  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from leaderless.base.scratch_files import ScratchFile

        ScratchFile.write = self._before  # type: ignore[method-assign]


@pytest.mark.parametrize(("num_ranks", "compute_dtype"), [(1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_no_bit_of_a_gradient_depends_on_where_inputs_of_layers_wait(
    ranks: RankPool, tmp_path: Path, num_ranks: int, compute_dtype: str
) -> None:
    for (here, nothing), (away, written) in ranks.run(
        num_ranks, gradients, str(tmp_path), tiny_model("qwen3"), compute_dtype
    ):
        assert same(here, away)
        assert any(one.any() for one in here.values())
        assert nothing == 0 < written


def scores(folder: str, path: str, compute_dtype: str) -> list[tuple[Jagged, Jagged, int]]:
    """Scores of a model whose weights stay and of one whose weights sleep, twice, and bytes of weights in between."""
    transport, found = Transport(torch.device("cpu"), timeout_s=300), []
    samples, config = random_samples(LENGTHS, siblings=3), ModelConfig(path=path, compute_dtype=compute_dtype)
    for place in ("none", "disk"):
        sharding = ShardingSetup(offload_folder=Path(folder), offload_frozen=place)
        engine = engine_of(transport, config, sharding, is_trained=False)
        first = engine.log_probs(samples)
        weights = [one.to_local() if hasattr(one, "to_local") else one for one in engine.model.parameters()]
        held = sum(one.detach().untyped_storage().nbytes() for one in weights)
        found.append((first, engine.log_probs(samples), held))
    return found


@pytest.mark.parametrize(("num_ranks", "compute_dtype"), [(1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_weights_that_sleep_score_as_others_and_take_no_memory_in_between(
    ranks: RankPool, tmp_path: Path, num_ranks: int, compute_dtype: str
) -> None:
    for (wanted, _, held), (first, second, left) in ranks.run(
        num_ranks, scores, str(tmp_path), tiny_model("qwen3"), compute_dtype
    ):
        assert torch.equal(wanted.values, first.values)
        assert torch.equal(wanted.values, second.values)
        assert left == 0 < held
