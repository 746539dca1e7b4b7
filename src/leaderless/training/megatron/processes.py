"""The Megatron processes of a model: where they meet, and the folder from which those of a machine read weights."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from leaderless.distributed.meeting import choose_meeting
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout


def megatron_rank(layout: Layout, rank: int) -> int:
    """The place of a rank's process in Megatron's order, in which `pp` is the outermost axis and `dp` comes next."""
    at = layout.coordinates(rank)
    return (at["pp"] * layout.dp + at["dp"]) * layout.tp + at["tp"]


def meeting_of(layout: Layout, group: ProcessGroup) -> str:
    """Choose where processes of all ranks meet: the first in Megatron's order listens.

    All ranks call it together.
    """
    first = next(rank for rank in layout.ranks if megatron_rank(layout, rank) == 0)
    return choose_meeting(group, first, "leaderless-megatron", "where Megatron's processes meet")


FILE_BYTES = 1 << 30
"""Bytes after which another file begins."""
INDEX = "model.safetensors.index.json"


@contextmanager
def written(
    weights: Iterable[tuple[str, Tensor]], describe: Callable[[Path], None], group: ProcessGroup
) -> Iterator[Path]:
    """Let the first rank of each machine write a model as `transformers` does; all ranks use the folder together.

    Args:
        weights: Whole weights by name, which arrive on every rank.
        describe: Function that writes the files next to the weights.
        group: Ranks that call it together.
    """
    name = group.broadcast_text(f"leaderless-state-{secrets.token_hex(8)}", group.ranks[0], "where weights are written")
    folder, here = Path(tempfile.gettempdir(), name), group.hosts.get(group.rank, -1 - group.rank)
    peers = [rank for rank in group.ranks if group.hosts.get(rank, -1 - rank) == here]
    is_writer = group.rank == min(peers)
    try:
        if is_writer:
            folder.mkdir(mode=0o700)
            describe(folder)
            _write(weights, folder)
        else:
            for _ in weights:
                pass
        group.sum(torch.zeros(1), "weights that are written for Megatron")
        yield folder
        group.sum(torch.zeros(1), "weights that Megatron has read")
    finally:
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)


def _write(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write files of bounded size, and which weight is in which of them."""
    part, num_bytes, places = dict[str, Tensor](), 0, dict[str, str]()

    def save() -> None:
        file = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
        part.clear()

    for name, weight in weights:
        part[name] = weight.cpu().clone()
        num_bytes += part[name].nbytes
        if num_bytes >= FILE_BYTES:
            save()
            num_bytes = 0
    if part:
        save()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
