"""Rows of real processes, divided in blocks and all at once: `python benchmarks/block_processes.py`.

Processes that have imported everything are forked, join one gloo process group and really exchange rows of lognormal
lengths, in both ways. Printed is the work of the fullest rank, in that of the mean: of the step, and of its updates,
each of which waits for its fullest rank. Then what a rank is told until all have agreed, at most.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer import reshard as ways
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout, Reshard
from leaderless.planner.assign.balance import Int, sequence_cost
from leaderless.planner.entries import QUADRATIC_TOKENS

ROWS_PER_RANK, SIBLINGS, LONGEST = 16, 8, 7168
NUM_UPDATES = (1, 4)
SIZES = (8, 16, 32, 64)
TIMEOUT_S = 300


@dataclass
class Counting(ProcessGroup):
    """A process group that counts the bytes it is told."""

    told: list[int] = field(default_factory=lambda: [0])

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:
        """Gather, and count the rows of others."""
        parts = super().gather(rows, what)
        self.told[0] += sum(part.nbytes for part in parts) - rows.nbytes
        return parts

    def exchange(self, messages: Mapping[int, Tensor], senders: Sequence[int], what: str) -> dict[int, Tensor]:
        """Exchange, and count what comes."""
        received = super().exchange(messages, senders, what)
        self.told[0] += sum(part.nbytes for part in received.values())
        return received


@dataclass(frozen=True)
class Case:
    """Rows on their way between two layouts."""

    name: str
    source: Layout
    target: Layout
    num_updates: int

    @property
    def action(self) -> Reshard:
        """The entry of a plan that sends them."""
        return Reshard(
            "rollout", "rollout", ("tokens",), self.source, self.target, keep_groups=False, num_updates=self.num_updates
        )

    def lengths(self, shard: int) -> Int:
        """[n] lengths of the rows that a shard has; those of later shards are longer where all ranks have some."""
        generator = np.random.default_rng([self.source.dp, shard])
        median = 1800 * (1 + (shard / self.source.dp if self.source == self.target else 0))
        drawn = median * np.exp(0.8 * generator.standard_normal(ROWS_PER_RANK))
        return np.clip(np.rint(drawn), 1, LONGEST).astype(np.int64)

    def held(self, rank: int) -> Batch | None:
        """The rows of a rank."""
        if rank not in self.source:
            return None
        shard = self.source.shard_of(rank)
        ids, lengths = ROWS_PER_RANK * shard + torch.arange(ROWS_PER_RANK), torch.from_numpy(self.lengths(shard))
        tokens = Jagged(torch.repeat_interleave(ids, lengths).int(), lengths, "tokens")
        firsts = torch.unique(ids // SIBLINGS)
        return Batch(ids, {"tokens": tokens}, Batch(firsts, {}), ids // SIBLINGS - firsts[0])

    def evenness(self, owners: Int) -> tuple[float, float]:
        """Work of the fullest rank of the step, and of its updates, in that of the mean; [n] owner of each row."""
        lengths = np.concatenate([self.lengths(shard) for shard in range(self.source.dp)])
        costs = sequence_cost(lengths, QUADRATIC_TOKENS)
        groups = np.arange(len(costs)) // SIBLINGS
        updates = groups * max(NUM_UPDATES) // (int(groups[-1]) + 1)
        work = [np.bincount(owners[part], weights=costs[part], minlength=self.target.dp) for part in _parts(updates)]
        mean = costs.sum() / self.target.dp
        return float(sum(work).max() / mean), float(sum(part.max() for part in work) / mean)


def _parts(updates: Int) -> list[Int]:
    return [np.flatnonzero(updates == update) for update in range(max(NUM_UPDATES))]


def cases(world_size: int) -> list[Case]:
    """What is measured with some ranks."""
    every, half = tuple(range(world_size)), world_size // 2
    whole, first, second = Layout(every, world_size), Layout(every[:half], half), Layout(every[half:], half)
    return [
        Case(name, *layouts, num_updates)
        for name, layouts in (("pool to pool", (first, second)), ("uneven rows", (whole, whole)))
        for num_updates in NUM_UPDATES
    ]


def play(rank: int, world_size: int, store: Path, answers: Connection) -> None:
    """One rank: every case in both ways; for each way and case the ids it got and the bytes that it was told."""
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(store), world_size)
    dist.init_process_group(
        "gloo", store=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    found = []
    for case in cases(world_size):
        for in_blocks in (True, False):
            group = Counting(tuple(range(world_size)), rank)
            with patch.object(ways, "is_in_blocks", lambda _, way=in_blocks: way):
                arrived = ways.reshard(case.action, group, case.held(rank), None)
            ids: list[int] = []
            if arrived is not None:
                ids, tokens = arrived.ids.tolist(), arrived.jagged("tokens")
                assert torch.equal(tokens.values, torch.repeat_interleave(arrived.ids, tokens.lengths).int())
            found.append((ids, group.told[0]))
    answers.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int) -> list[str]:
    """The lines of the table for some ranks."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=play, args=(rank, world_size, Path(folder) / "store", sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            found = [receiver.recv() for receiver, _ in pipes if receiver.poll(TIMEOUT_S)]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    assert len(found) == world_size, "all ranks answer"
    lines = []
    for number, case in enumerate(cases(world_size)):
        cells = [f"{world_size}", case.name, f"{case.num_updates}"]
        for way in (0, 1):
            answers = [one[2 * number + way] for one in found]
            owners = np.full(ROWS_PER_RANK * case.source.dp, -1, dtype=np.int64)
            for rank in case.target.ranks:
                owners[answers[rank][0]] = case.target.shard_of(rank)
            assert sum(len(ids) for ids, _ in answers) == len(owners), "every row arrives once"
            step, updates = case.evenness(owners)
            cells += [f"{step:.3f}", f"{updates:.3f}", f"{max(told for _, told in answers) / 1e3:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    titles = ["processes", "rows", "updates", "in blocks: step", "updates", "KB", "at once: step", "updates", "KB"]
    print(f"| {' | '.join(titles)} |")
    print(f"| ---: | --- |{' ---: |' * 7}")
    for world_size in SIZES:
        print("\n".join(measure(world_size)), flush=True)
