"""Two ranks on one device: the one that trains goes first, and a rank that dies holds nobody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.recipes import make_recipe, plan_of, write_model
from torch import Tensor

from leaderless.base import devices
from leaderless.config import RecipeError
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Plan
from leaderless.planner.layout import places_of_shard
from leaderless.worker.build.memory_bounds import bytes_of_helper
from leaderless.worker.device_sharing import FOLDER, DeviceSharing, open_turns, place_of_device

LAYOUT = {
    "rollout": {"ranks": "0,3"},
    "reward": {"ranks": "0,3"},
    "advantage": {"ranks": "1-2"},
    "policy": {"ranks": "1-2"},
}


def plan(rollout: object = None, **channel: object) -> Plan:
    channels = {"rollout": {"capacity": 1, "mode": "continuous", **channel}}
    batch = {"prompts_per_step": 6}
    return plan_of("grpo", 4, layout=LAYOUT, channels=channels, rollout=rollout or {}, batch=batch)


class World(ProcessGroup):
    """Ranks that all say what this one says."""

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:  # noqa: ARG002
        return [rows] * self.size


def world(rank: int) -> ProcessGroup:
    return World((0, 1, 2, 3), rank)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[tuple[DeviceSharing, DeviceSharing]]:
    """Those of rank 1, which trains, and of rank 3, which helps on its device."""
    with ExitStack() as stack:
        cpu, shared = torch.device("cpu"), plan(helpers={3: 1})
        yield tuple(  # type: ignore[misc]
            stack.enter_context(open_turns(shared, tmp_path, cpu, world(rank))) for rank in (1, 3)
        )


def test_training_goes_before_the_next_step_of_the_engine(turns: tuple[DeviceSharing, DeviceSharing]) -> None:
    training, helping = turns
    order, node = list[str](), plan(helpers={3: 1})["policy"]
    is_stepping, is_training = threading.Event(), threading.Event()

    def generate() -> None:
        for step in range(4):
            with helping.for_step():
                order.append("step")
                is_stepping.set()
                if step == 1:
                    is_training.wait()
                    time.sleep(0.1)  # until training waits
                order.append("stepped")

    def train() -> None:
        is_stepping.wait()
        is_training.set()
        with training.of(node):
            order.append("train")
            time.sleep(0.1)
            order.append("trained")

    threads = [threading.Thread(target=one) for one in (generate, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    turns_taken = [*zip(order[::2], order[1::2], strict=True)]
    assert sorted(turns_taken) == [("step", "stepped")] * 4 + [("train", "trained")], "one after the other"
    assert turns_taken.index(("train", "trained")) <= 2, "training has waited for the step under way only"


def test_other_nodes_and_other_ranks_take_no_turn(turns: tuple[DeviceSharing, DeviceSharing], tmp_path: Path) -> None:
    training, helping = turns
    shared = plan(helpers={3: 1})
    with training.of(shared["policy"]), training.of(shared["advantage"]), helping.of(shared["rollout"]):
        pass
    own = open_turns(shared, tmp_path, torch.device("cpu"), world(2))
    with own as alone, training.of(shared["policy"]), alone.of(shared["policy"]), alone.for_step():
        pass


def test_the_files_of_a_device_are_removed(tmp_path: Path) -> None:
    before = {*FOLDER.glob("leaderless-*")}
    with open_turns(plan(helpers={3: 1}), tmp_path, torch.device("cpu"), world(1)):
        assert len({*FOLDER.glob("leaderless-*")} - before) == 2
    assert not {*FOLDER.glob("leaderless-*")} - before


def test_ranks_that_see_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "gather", lambda _, rows, __: [rows, rows, rows, rows + 1])
    files = open_turns(plan(helpers={3: 1}), tmp_path, torch.device("cpu"), world(1))
    with pytest.raises(RuntimeError, match="ranks 1 and 3 share a device, but not the folder"), files:
        pass


def test_a_helper_has_the_device_of_the_rank_that_it_helps() -> None:
    shared = plan(helpers={3: 1})
    assert [place_of_device(shared, rank, rank, 4) for rank in range(4)] == [(0, 3), (1, 3), (2, 3), (1, 3)]
    assert place_of_device(plan(), 3, 1, 2) == (1, 2)
    with pytest.raises(RuntimeError, match=r"rank 3 .* of rank 1, which is on another machine: .* ranks 2 to 3"):
        place_of_device(shared, 3, 1, 2)


def test_two_workers_of_a_machine_with_one_gpu_both_get_it_if_one_of_them_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    gpus = SimpleNamespace(device_count=lambda: 1, set_device=chosen.append)
    monkeypatch.setattr(devices, "_usable_module", {"cuda": gpus}.get)
    monkeypatch.setenv(devices.COMPILERS_VARIABLE, "1")
    layout = {node: {"ranks": "0" if node in {"rollout", "reward"} else "1"} for node in LAYOUT}
    channels = {"rollout": {"capacity": 1, "mode": "continuous", "helpers": {0: 1}}}
    shared = plan_of("grpo", 2, layout=layout, channels=channels, batch={"prompts_per_step": 6})
    for rank in range(2):
        setup = devices.setup_device(*place_of_device(shared, rank, rank, 2))
        assert setup == devices.DeviceSetup(torch.device("cuda", 0), "cpu:gloo,cuda:nccl")
    assert chosen == [0, 0]
    with pytest.raises(RuntimeError, match="2 workers on a machine with 1 cuda devices"):
        devices.setup_device(*place_of_device(plan(), 0, 0, 2))


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        ({"helpers": {2: 1}}, r"rank 2 generates .* but rank 2 does not generate: name one of ranks 0,3"),
        ({"helpers": {3: 0}}, r"rank 0 does not train: name one of ranks 1-2"),
        ({"helpers": {0: 1, 3: 1}}, r"several ranks on the device of rank 1"),
        ({"portions": [1]}, r"has 1 numbers for the 2 ranks that generate, 0,3: one for each"),
        ({"portions": [1, 9]}, r"leaves nothing of the 6 prompts of a step for rank 0"),
        (
            {
                "helpers": {3: 1},
                "cache": "recompute",
                "rollout": {"engine": "sglang", "external": {"python": "python"}},
            },
            r"the engine 'sglang' share a device, but it also works between its steps",
        ),
        ({"portions": [1, 1], "mode": "fixed_lag"}, r"portions=.* with mode=fixed_lag there are none"),
    ],
)
def test_what_cannot_be_is_refused(channel: dict[str, object], message: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=message):
        plan(**channel)


def test_a_plan_knows_the_largest_portion() -> None:
    assert plan().batch.max_prompts_per_rank == 3
    assert plan(portions=[2, 1]).batch.max_prompts_per_rank == 4
    assert len({plan(portions=[2, 1]).hash(), plan().hash(), plan(helpers={3: 1}).hash()}) == 3


def test_a_helper_needs_memory_of_the_device_that_it_helps_on(tmp_path: Path) -> None:
    channels = {"rollout": {"capacity": 1, "mode": "continuous", "helpers": {3: 1}}}
    settings: dict[str, object] = {"layout": LAYOUT, "channels": channels, "batch": {"prompts_per_step": 6}}
    settings["models"] = {"policy": write_model(tmp_path / "model", hidden_size=256)}
    shared = plan_of("grpo", 4, **settings)
    assert shared.memory is not None
    needed = [bytes_of_helper(make_recipe(**settings), shared, rank) for rank in range(4)]
    assert needed[0] == needed[2] == needed[3] == 0
    assert 0 < needed[1] < shared.memory.accelerator.peak


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 200))
def test_shards_divide_all_prompts_in_proportion(portions: list[int], size: int) -> None:
    parts = [places_of_shard(shard, portions, size) for shard in range(len(portions))]
    assert [place for part in parts for place in part] == list(range(size))
    for part, portion in zip(parts, portions, strict=True):
        assert abs(len(part) - size * portion / sum(portions)) < 1
