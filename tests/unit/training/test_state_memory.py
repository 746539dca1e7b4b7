"""What optimizers keep may lie in a file or in host memory: no number depends on it, and files leave no trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.unit.training.test_optimizers import EXPERTS, MATRIX, VECTOR, WORDS, trained, walk
from torch import Tensor

from leaderless.base.scratch_files import MappedFile, ScratchFile, check_folder, release_pages
from leaderless.config import RecipeError
from leaderless.config.models import OptimizerConfig
from leaderless.training.optimizers import make_optimizer as maker
from leaderless.training.optimizers import state_memory
from leaderless.training.optimizers.make_optimizer import make_optimizer
from leaderless.training.optimizers.optimizer import Optimizer
from leaderless.training.optimizers.state_memory import StagedStates, StatesInFile, StateSpec

CPU = torch.device("cpu")
SHAPES = {MATRIX: (16, 256), EXPERTS: (3, 16, 256), VECTOR: (256,), WORDS: (70, 256), "scale": (1,)}
"""Rows of whole blocks, so that 8 bits are used, and weights that are not in layers."""
OPTIMIZERS = [
    OptimizerConfig(weight_decay=0.1),
    OptimizerConfig(weight_decay=0.1, state_dtype="bfloat16"),
    OptimizerConfig(type="muon", weight_decay=0.1),
    OptimizerConfig(type="muon", state_dtype="bfloat16"),
    OptimizerConfig(type="sgd", learning_rate=0.1),
    OptimizerConfig(type="sgd", learning_rate=0.1, state_dtype="bfloat16"),
    OptimizerConfig(type="sgd", learning_rate=0.1, momentum=0.0),
    pytest.param(
        OptimizerConfig(type="adamw_8bit", weight_decay=0.1),
        marks=pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra adamw-8bit, is missing"),
    ),
]
MEMORIES: dict[str, Callable[[Path], object]] = {
    "file": StatesInFile,
    # The way through a device, whose streams torch has for the CPU, too.
    "staged": lambda _: StagedStates(CPU),
    "staged-file": lambda folder: StagedStates(CPU, StatesInFile(folder)),
}


def states_of(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{weight.name} {kind}": kept.clone()
        for weight in optimizer.weights
        for kind, kept in optimizer.states(weight.parameter).items()
    }


@pytest.mark.parametrize("group_bytes", [1, 1 << 15, 1 << 26])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda one: f"{one.type}-{one.state_dtype}-{one.momentum}")
def test_no_bit_depends_on_where_states_are(
    tmp_path: Path, config: OptimizerConfig, memory: str, group_bytes: int
) -> None:
    with patch.object(state_memory, "STATE_GROUP_BYTES", group_bytes):
        expected_weights = trained(SHAPES)
        expected = make_optimizer(expected_weights.values(), config)
        weights = trained(SHAPES)
        with patch.object(maker, "memory_for", lambda *_: MEMORIES[memory](tmp_path)):
            optimizer = make_optimizer(weights.values(), config)
        for num_steps in (2, 3):
            wanted, found = walk(expected, expected_weights, num_steps), walk(optimizer, weights, num_steps)
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        wanted, found = states_of(expected), states_of(optimizer)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert not any(expected_weights[name].parameter.equal(one.parameter) for name, one in trained(SHAPES).items())


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda one: f"{one.type}-{one.state_dtype}-{one.momentum}")
def test_what_was_kept_elsewhere_continues_on_the_device_and_back(tmp_path: Path, config: OptimizerConfig) -> None:
    wanted_weights = trained(SHAPES)
    wanted = walk(make_optimizer(wanted_weights.values(), config), wanted_weights, 3)
    places = ["none", "disk", "none"]
    weights, before = trained(SHAPES), None
    for number, place in enumerate(places):
        optimizer = make_optimizer(weights.values(), config.model_copy(update={"offload": place}), folder=tmp_path)
        if before is not None:
            for weight in optimizer.weights:
                for kind, kept in optimizer.states(weight.parameter).items():
                    kept.copy_(before[f"{weight.name} {kind}"])
            optimizer.resume(number)
        found = walk(optimizer, weights, 1)
        before = states_of(optimizer)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_weights_without_a_gradient_stay(tmp_path: Path) -> None:
    config, weights = OptimizerConfig(offload="disk"), trained(SHAPES)
    optimizer = make_optimizer(weights.values(), config, folder=tmp_path)
    before = weights[WORDS].parameter.detach().clone()
    weights[MATRIX].parameter.grad = torch.ones(SHAPES[MATRIX])
    optimizer.step(0.1)
    assert torch.equal(weights[WORDS].parameter, before)
    assert not optimizer.states(weights[WORDS].parameter)["exp_avg"].any()
    assert optimizer.states(weights[MATRIX].parameter)["exp_avg"].all()


def resident_bytes() -> int:
    """Memory of this process, that of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_states_in_a_file_take_no_memory_between_updates_and_lose_nothing(tmp_path: Path) -> None:
    memory, size = StatesInFile(tmp_path), 1 << 24
    (states,) = memory.zeros([StateSpec((size,), torch.float32)])
    before = resident_bytes()
    for _, (kept,) in memory.groups([{"momentum": states}]):
        kept["momentum"].copy_(torch.arange(size))
        assert resident_bytes() - before > 2 * size
    assert resident_bytes() - before < size
    assert torch.equal(states, torch.arange(size).float())


def test_files_have_no_names_and_are_made_with_all_of_their_room(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "folder"
    file = MappedFile(folder, 12345)
    assert [*folder.iterdir()] == []
    found = os.fstat(file.file.fileno())
    assert found.st_size == 12345
    assert found.st_blocks * 512 >= 12345


def test_memory_that_is_of_no_file_is_left_alone(tmp_path: Path) -> None:
    MappedFile(tmp_path, 1 << 16)
    values = torch.ones(1 << 16)
    release_pages(values.data_ptr(), values.nbytes)
    assert values.all()


def test_parts_of_a_file_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.write(memoryview(b"leader"), 10)
    file.write(memoryview(b"less"), 16)
    found = bytearray(10)
    file.read(memoryview(found), 10)
    assert bytes(found) == b"leaderless"
    with pytest.raises(RuntimeError, match="ends at byte 20"):
        file.read(memoryview(found), 15)


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run\.offload_folder.*cannot be written to.*name a folder on another disk"):
        check_folder(tmp_path / "file" / "below")


def test_a_disk_that_is_too_small_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"GiB of room, and 4194304\.00 GiB more are needed there: name a folder"):
        StatesInFile(tmp_path).zeros([StateSpec((1 << 50,), torch.float32)])


def test_host_memory_is_no_other_place_for_a_cpu() -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.offload.*in host memory already: set disk, or leave it out"):
        make_optimizer(trained(SHAPES).values(), OptimizerConfig(offload="host"))
