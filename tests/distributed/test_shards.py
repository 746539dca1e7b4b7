"""Shard files are those of torch's distributed checkpoints, and any number of ranks can read them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import RankPool
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from leaderless.distributed.weights import files
from leaderless.worker.checkpoint import shards
from leaderless.worker.checkpoint.shards import (
    SHARDING,
    DamagedCheckpointError,
    FileEntry,
    Shard,
    read_tensors,
    shard_file,
    write_shards,
)

WHOLE = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "half": torch.arange(24).reshape(6, 4).bfloat16(),
    "vector": -torch.arange(3.0),
    "number": torch.tensor(4.5),
}


def sharded(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as the ranks have them: rows, but columns of one, and whole numbers; some ranks have nothing."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    placements = {"half": ShardPlacement(1), "number": Replicate()}
    return {
        name: distribute_tensor(value, mesh, [placements.get(name, ShardPlacement(0))])
        for name, value in values.items()
    }


class LocalPlanner(DefaultSavePlanner):
    """Plans what this rank writes without the others."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state = state

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        value = self.state[write_item.index.fqn]
        return value.to_local() if isinstance(value, DTensor) else value


def write_with_torch(folder: Path, rank: int, state: dict[str, Tensor]) -> None:
    planner = LocalPlanner(state)
    plan = replace(create_default_local_save_plan(state, is_coordinator=True), storage_data={"shard_index": rank + 1})
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.write_data(writer.prepare_local_plan(plan), planner).wait()


def read_with_torch(folder: Path, state: dict[str, Tensor]) -> None:
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(dict(state), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def content_of(file: Path) -> tuple[dict[str, object], bytes]:
    """The header, in which neither the order of the metadata nor the padding has a meaning, and the tensors."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"][SHARDING] = json.loads(header["__metadata__"][SHARDING])
    return header, content[8 + size :]


def write_both_ways(folder: str) -> None:
    rank, state = torch.distributed.get_rank(), sharded(WHOLE)
    mine = {name: value for name, value in state.items() if name != "number" or rank == 0}
    write_with_torch(Path(folder) / "torch", rank, mine)
    own = Path(folder) / "own"
    own.mkdir(exist_ok=True)
    file = own / shard_file(rank)
    with patch.object(shards, "BLOCK_BYTES", 16):
        entry = write_shards(file, {name: Shard.of(value) for name, value in mine.items()})
    assert entry == FileEntry.of(file), "the checksum is that of what is on the disk"
    assert content_of(file) == content_of(Path(folder) / "torch" / file.name)
    assert {**load_file(file)}.keys() == mine.keys()


def read_both_ways(folder: str) -> None:
    for reader, writer in ((read_tensors, "torch"), (read_tensors, "own"), (read_with_torch, "own")):
        state = sharded({name: torch.full_like(value, -7) for name, value in WHOLE.items()})
        with patch.object(files, "BLOCK_BYTES", 40):
            reader(Path(folder) / writer, state)
        for name, value in state.items():
            assert torch.equal(value.full_tensor(), WHOLE[name]), (reader, writer, name)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 3)])
def test_torch_and_this_package_read_what_the_other_has_written(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    ranks.run(before, write_both_ways, str(tmp_path))
    ranks.run(after, read_both_ways, str(tmp_path))


def test_plain_safetensors_are_read_into_another_type(tmp_path: Path) -> None:
    save_file(WHOLE, tmp_path / "model.safetensors")
    state = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in WHOLE.items()}
    read_tensors(tmp_path, state)
    assert all(torch.equal(state[name], value.float()) for name, value in WHOLE.items())


def test_ranks_that_have_written_a_checkpoint_read_no_headers_of_others(tmp_path: Path) -> None:
    matrix = WHOLE["matrix"]
    for part, rows in enumerate((slice(0, 4), slice(4, 7))):
        write_shards(tmp_path / shard_file(part), {"matrix": Shard(matrix[rows], (rows.start, 0))})
    with patch.object(shards, "read_header", wraps=shards.read_header) as read:
        for part, wanted, num_headers in ((0, matrix[:4], 1), (1, matrix[:4], 3), (2, matrix, 2), (None, matrix, 2)):
            read.reset_mock()
            found = torch.zeros_like(wanted)
            read_tensors(tmp_path, {"matrix": found}, part)
            assert torch.equal(found, wanted)
            assert read.call_count == num_headers, "all are read where the own file does not have it all"


def test_what_the_files_do_not_hold_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path / shard_file(0), {"matrix": Shard(WHOLE["matrix"][:3], (0, 0))})
    for state in ({"matrix": torch.zeros(7, 5)}, {"other": torch.zeros(2)}):
        with pytest.raises(DamagedCheckpointError, match=f"does not hold all of {next(iter(state))}"):
            read_tensors(tmp_path, state)
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        read_tensors(tmp_path, {"matrix": torch.zeros(15)})
    file = tmp_path / shard_file(0)
    for cut in (4, 100, 10):
        file.write_bytes(file.read_bytes()[:-cut])
        with pytest.raises(DamagedCheckpointError, match="cannot be read"):
            read_tensors(tmp_path, {"matrix": torch.zeros(3, 5)})
