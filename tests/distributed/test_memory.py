"""The memory of a reshard: no rank needs much more than its own rows, before and after."""

from __future__ import annotations

import ctypes
import gc
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.user_stages import Loop, recipe_of, short_workflow

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged, make_sample_ids
from leaderless.data.buffer import transfer
from leaderless.distributed import transport
from leaderless.planner import Reshard

MAX_RATIO = 2.5
"""Limit of the ratio of a rank's peak in a reshard to its share, the larger of its rows before and after."""
WORLD_SIZE = 4
STAGING_BYTES = 2 * transport.ROUNDS_AHEAD * (WORLD_SIZE - 1) * transfer.PIECE_BYTES[1]
"""Additional memory however large the batch is: one piece to and from every other rank in each round in progress."""
NUM_PROMPTS, RESPONSES = 64, 4
LAYOUTS: dict[str, dict[str, Json]] = {
    "pool to pool": {"sample": {"ranks": "0-1"}, "last": {"ranks": "2-3"}},
    "same ranks, to tp replicas": {"sample": {"ranks": "0-3"}, "last": {"ranks": "0-3", "tp": 2}},
    "same ranks, from tp replicas": {"sample": {"ranks": "0-3", "tp": 2}, "last": {"ranks": "0-3"}},
}


@dataclass(frozen=True)
class Peak:
    """A rank's memory in one reshard, in bytes.

    Attributes:
        before: Rows held before.
        after: Rows held after.
        most: Most of what was resident, less what else the process held.
    """

    before: int
    after: int
    most: int

    @property
    def share(self) -> int:
        return max(self.before, self.after)


def uneven_answers(batch: Batch, num_bytes: int, *, as_text: bool) -> Batch:
    """Answers of about this number of bytes over all ranks; the last ones are four times as long on average."""
    index = torch.arange(len(batch)).repeat_interleave(RESPONSES)
    siblings = torch.arange(RESPONSES).repeat(len(batch))
    prompts = batch.ids[index]
    weights = (1 + 3 * prompts / NUM_PROMPTS) * (1 + (prompts * 29 + siblings * 13) % 16) / 8.5
    values = Jagged(torch.empty(0), torch.zeros(len(index), dtype=torch.int64), "tokens")
    lengths = (num_bytes / (2.5 * NUM_PROMPTS * RESPONSES) * weights).long()
    texts = tuple("a" * (length if as_text else 0) for length in lengths.tolist())
    if not as_text:
        lengths //= 4
        values = Jagged(torch.ones(int(lengths.sum())), lengths, "tokens")
    columns = {"tokens": values, "note": texts, "unread": torch.zeros(len(index))}
    return Batch(make_sample_ids(prompts, siblings), columns, batch, index)


def peaks(layout: dict[str, Json], sizes: list[int], as_text: bool) -> list[Peak]:
    """A rank's memory while batches of several sizes, in bytes over all ranks, are resharded."""
    found: list[Peak] = []
    workflow = short_workflow("use_notes" if as_text else "use_tokens")
    loop = Loop(recipe_of(layout, prompts=NUM_PROMPTS, responses=RESPONSES), workflow, WORLD_SIZE, timeout_s=60)
    reshard = loop.buffer.reshard

    def measured(action: Reshard) -> None:
        before, resident = _held(loop), _resident_after_cleaning()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        reshard(action)
        found.append(Peak(before, _held(loop) - before, before + _memory("VmHWM") - resident))

    loop.buffer.reshard = measured
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in sizes:
            loop.stages["sample"] = lambda batch, _, size=size: uneven_answers(batch, size, as_text=as_text)
            loop.step()
            loop.buffer.clear()
    return found


def _held(loop: Loop) -> int:
    """Bytes of the rows' own columns on a rank, including texts."""
    return sum(_size(column) for table in loop.buffer._tables.values() for column in table.columns.values())


def _size(column: Column) -> int:
    match column:
        case Jagged(values=values):
            return values.nbytes
        case torch.Tensor():
            return column.nbytes
        case _:
            return sum(len(text) for text in column if isinstance(text, str))


def _resident_after_cleaning() -> int:
    """Resident bytes when all free memory has been returned, so that no new memory is hidden in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak from now on")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_needs_memory_for_its_own_rows_only(ranks: RankPool, layout: str) -> None:
    sizes = [WORLD_SIZE * megabytes << 20 for megabytes in (32, 64, 128)]
    results = ranks.run(WORLD_SIZE, peaks, LAYOUTS[layout], sizes, False, timeout_s=300, deadline_s=600)
    assert max(peak.share for result in results for peak in result) > sizes[-1] / WORLD_SIZE
    for rank, result in enumerate(results):
        for peak in result:
            print(f"{layout}, rank {rank}: {peak}, {peak.most / peak.share:.2f} of its share")
            assert peak.most <= MAX_RATIO * peak.share + STAGING_BYTES
            # Nothing exists twice: rows are sent from their place and received in their final place.
            assert peak.most <= peak.before + peak.after + STAGING_BYTES


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak from now on")
def test_objects_need_their_text_beside_them_and_no_more(ranks: RankPool) -> None:
    sizes = [WORLD_SIZE * 48 << 20]
    results = ranks.run(WORLD_SIZE, peaks, LAYOUTS["pool to pool"], sizes, True, timeout_s=300, deadline_s=600)
    for rank, (peak,) in enumerate(results):
        print(f"texts, rank {rank}: {peak}, {peak.most / peak.share:.2f} of its share")
        assert peak.share > sizes[0] / WORLD_SIZE
        assert peak.most <= MAX_RATIO * peak.share + STAGING_BYTES / 2
