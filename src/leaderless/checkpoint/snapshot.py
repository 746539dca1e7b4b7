"""A copy of what a rank holds of a model, which is written while training goes on.

Each rank writes its own shards, and needs to know of nobody else's: no rank plans for all, and none waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor


class Snapshot(DefaultSavePlanner):
    """This rank's part of a role's tensors, in memory of the host that is used again for the next one."""

    def __init__(self, part: int) -> None:
        """Nothing is held yet.

        Args:
            part: Place of this rank among those that hold the role, from 0.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._part = part
        self._buffers: dict[str, Tensor] = {}
        self.plan = SavePlan([])

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors as they are now.

        Args:
            state: By name: shards of distributed tensors, and whole ones, which all hold and the first rank writes.
        """
        mine = {name: value for name, value in state.items() if isinstance(value, DTensor) or self._part == 0}
        self.plan = replace(
            create_default_local_save_plan(mine, is_coordinator=True), storage_data={"shard_index": self._part + 1}
        )
        for name, value in mine.items():
            local = (value.to_local() if isinstance(value, DTensor) else value).detach()
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=not local.is_cpu)
            self._buffers[name].copy_(local, non_blocking=True)
        if any(not value.is_cpu for value in mine.values()):
            torch.accelerator.synchronize()

    def write(self, folder: Path) -> None:
        """Write the copies as safetensors, through to the disk.

        Args:
            folder: Of the role in the checkpoint; made if it is not there.
        """
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        writer.write_data(writer.prepare_local_plan(self.plan), self).wait()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The copy that an entry of the plan means; called by the writer.

        Args:
            write_item: The entry.
        """
        return self._buffers[write_item.index.fqn]
