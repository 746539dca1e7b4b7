"""Layouts with several axes: their meshes, and a back end that divides weights along one of them only."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.contracts.test_train_engine import OPTIMIZER, same, weights_of
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import LENGTHS
from tests.end_to_end.test_many_ranks import merged, walk_steps
from tests.tiny import add_gradients, random_samples, tiny_model, write_recipe
from tests.unit.recipes import plan_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from leaderless import EngineSetup, train_backend
from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.config.run import CheckpointConfig
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.training.engine import TrainEngine
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sharding import WeightSharding
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint
from leaderless.worker.checkpoint.writer import CheckpointWriter, Content

REPEATING = "tests.distributed.test_mesh:repeats_over_pp"


@train_backend(shards_weights=True, axes=["pp"])
def repeats_over_pp(setup: EngineSetup) -> TrainEngine:
    """An engine whose ranks along `pp` all do the same."""
    return FsdpEngine(
        load_causal_lm(setup.model, setup.role),
        setup.model,
        setup.process_group,
        setup.device,
        setup.micro_batch_tokens,
        optimizer=setup.optimizer,
        num_updates=setup.num_updates,
        division=WeightSharding(setup.mesh()),
    )


def setup_of(transport: Transport, layout: Layout, path: str) -> EngineSetup:
    transport.add_axes([layout])
    transport.add_process_group(layout.ranks)
    return EngineSetup(
        role="policy",
        model=ModelConfig(path=path),
        is_critic=False,
        layout=layout,
        process_group=transport.process_group(layout.ranks),
        axis_groups=transport.axis_groups(layout),
        device=torch.device("cpu"),
        optimizer=OPTIMIZER,
        num_updates=4,
        micro_batch_tokens=64,
    )


def check_mesh(sizes: dict[str, int], path: str) -> None:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout((0, 1, 2, 3), **sizes)
    mesh = setup_of(transport, layout, path).mesh()
    assert mesh.mesh_dim_names == layout.axes
    place = mesh.get_coordinate()
    assert place is not None
    assert dict(zip(layout.axes, place, strict=True)).items() <= layout.coordinates(transport.rank).items()
    for axis in layout.axes:
        peers = layout.peers(transport.rank, axis)
        total = torch.tensor([transport.rank])
        torch.distributed.all_reduce(total, group=mesh.get_group(axis))
        assert mesh[axis].mesh.tolist() == list(peers)
        assert int(total) == sum(peers), "its collectives are those of the peers"


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 2, "pp": 2}, {"dp": 1, "cp": 4}])
def test_a_mesh_has_the_coordinates_of_its_layout(ranks: RankPool, sizes: dict[str, int]) -> None:
    ranks.run(4, check_mesh, sizes, tiny_model())


def add_later() -> None:
    """Make the groups of further layouts when ranks have different numbers of process groups, as under a new plan."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    for ranks in ((0, 1), (0,), (1, 2, 3)):
        transport.add_process_group(ranks)
    transport.add_lane("windows", (0, 1))
    for layout in (Layout((0, 1, 2, 3), dp=2, tp=2), Layout((1, 2), dp=1, tp=2), Layout((0, 1, 2, 3), dp=2, tp=2)):
        transport.add_process_group(layout.ranks)
        transport.add_axes([layout])
        for axis in layout.axes if transport.rank in layout else ():
            peers = layout.peers(transport.rank, axis)
            total = transport.process_group(peers).sum(torch.tensor([transport.rank]), "x")
            assert int(total) == sum(peers)


def test_process_groups_can_be_added_when_ranks_have_different_numbers_of_them(ranks: RankPool) -> None:
    ranks.run(4, add_later, timeout_s=20)


def make_groups(sizes: list[tuple[tuple[int, ...], int, int]], world_size: int | None = None) -> int:
    """Talk along all axes of some layouts; the number of process groups that this rank has made.

    With a world size nothing is sent, as the other ranks do not exist.
    """
    if world_size is not None:
        dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    transport, layouts = Transport(torch.device("cpu"), 30), [Layout(ranks, dp, tp) for ranks, dp, tp in sizes]
    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        transport.add_axes(layouts)
    for layout in layouts:
        transport.add_process_group(layout.ranks)
    for layout in layouts if world_size is None else ():
        for axis in layout.axes if transport.rank in layout else ():
            peers = layout.peers(transport.rank, axis)
            total = transport.process_group(peers).sum(torch.tensor([transport.rank]), "peers")
            assert int(total) == sum(peers)
    if world_size is None:  # other groups are named by the number of groups, and all ranks must have the same
        transport.add_lane("later", transport.world.ranks)
        assert int(transport.lane("later", transport.world.ranks).sum(torch.tensor([1]), "all")) == 4
    else:
        dist.destroy_process_group()
    return new_group.call_count


def test_a_rank_makes_the_groups_along_its_own_axes_only(ranks: RankPool) -> None:
    layouts = [((0, 1, 2, 3), 2, 2), ((0, 1), 2, 1), ((2, 3), 1, 2), ((0, 1, 2, 3), 2, 2), ((1, 2), 1, 2)]
    assert ranks.run(4, make_groups, layouts) == [2 * 3] * 4, "two of each layout with two axes"
    many = tuple(range(80))  # more would talk in blocks, and wait for ranks that do not exist
    large = [(many, 40, 2), (many[:40], 20, 2), (many[:10], 10, 1)]
    assert ranks.run(1, make_groups, large, 80, init_group=False) == [2 * 2]


def save_and_load(folder: str, path: str) -> int:
    """The number of shards of a checkpoint; an engine that reads it has the weights of the one that wrote it."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout((0, 1, 2, 3), dp=2, pp=2), path)
    engine, other = (repeats_over_pp(setup) for _ in range(2))
    shard = torch.arange(len(LENGTHS)) % 2 == setup.layout.shard_of(transport.rank)
    add_gradients(engine, random_samples(LENGTHS).select(shard), lambda out, _: out.log_probs.sum() / 50)
    engine.optimizer_step()
    tokenizer = load_tokenizer(setup.model, "policy")
    writer = CheckpointWriter(
        Path(folder), {"policy": engine}, transport.world, tokenizer, CheckpointConfig(), 30.0, {"recipe.yaml": ""}
    )
    writer.begin(Content(RunState(1, 0, 0.0)))
    writer.finish()
    (checkpoint,) = list_checkpoints(Path(folder))
    load_checkpoint(checkpoint, {"policy": other})
    assert same(weights_of(engine), weights_of(other))
    return len(list((checkpoint / "policy").glob("*.safetensors")))


def test_of_replicas_one_writes_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, save_and_load, str(tmp_path), tiny_model()) == [2] * 4


def test_ranks_that_repeat_the_work_of_others_change_no_number(ranks: RankPool, tmp_path: Path) -> None:
    settings = {
        "workflow": "sft",
        "data.train.response": "answer",
        "data.max_response_tokens": 4,
        "batch.updates_per_step": 2,
        "reward": {},
    }
    recipe = write_recipe(tmp_path, tiny_model(), settings)
    expected = ranks.run(2, walk_steps, str(recipe), "two", 2, init_group=False)
    changes = {"training.backend": REPEATING, "layout": {"policy": {"dp": 2, "pp": 2}}}
    recipe = write_recipe(tmp_path, tiny_model(), {**settings, **changes})
    found = ranks.run(4, walk_steps, str(recipe), "four", 2, init_group=False)
    for step in range(2):
        ours, theirs = merged(found, step), merged(expected, step)
        for name, value in theirs["numbers"].items():  # type: ignore[attr-defined]
            if not name.startswith(("time", "seconds/", "sent/", "throughput/tokens_per_s", "data/", "memory")):
                assert ours["numbers"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name  # type: ignore[index]
        for name, weights in theirs["weights"].items():  # type: ignore[attr-defined]
            torch.testing.assert_close(ours["weights"][name], weights, atol=1e-6, rtol=1e-5)  # type: ignore[index]
    assert theirs["numbers"]["policy/grad_norm"] > 1e-3, "there is something to learn"  # type: ignore[index]


def test_ranks_hold_a_model_in_one_layout() -> None:
    layout = {"rollout": {"ranks": "0-3"}, "old": {"ranks": "0-3"}, "policy": {"dp": 2, "pp": 2}}
    message = r"role 'policy' is divided as ranks 0-3 dp=4 for 'old' and as ranks 0-3 dp=2 pp=2 for 'policy'"
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 4, training={"backend": REPEATING}, layout=layout, batch={"updates_per_step": 2})
