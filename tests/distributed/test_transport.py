"""What ranks send each other: agreed numbers, rows, texts and bytes; and the dataset that they agree on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.counts import counting_traffic
from tests.distributed.ranks import RankPool
from tests.rows import Characters
from tests.transports import VARIABLE

from leaderless.config import Recipe
from leaderless.data.dataloader import Dataloader
from leaderless.data.dataset import open_dataset
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.open_source import open_source
from leaderless.distributed import transport
from leaderless.distributed.errors import CollectiveError
from leaderless.distributed.in_flight import RoundUnderWay
from leaderless.distributed.roll_call import ROLL_CALL_S
from leaderless.distributed.transport import ProcessGroup, Transport


def talk() -> None:
    """Every kind of message, in the world and in a group."""
    transport = Transport(torch.device("cpu"), timeout_s=20)
    rank, size = transport.rank, transport.world.size
    for ranks in ((0,), (0, size - 1), tuple(range(size))):
        transport.add_process_group(tuple(sorted(set(ranks))))
    for ranks in {(0,), tuple(sorted({0, size - 1})), tuple(range(size))}:
        if rank not in ranks:
            continue
        group = transport.process_group(ranks)
        assert group.sum(torch.tensor([rank, 1]), "x").tolist() == [sum(ranks), len(ranks)]
        assert group.max(torch.tensor(-rank), "x").item() == 0
        mine = torch.full((rank, 2), rank)  # rank 0 has no row
        assert [part.tolist() for part in group.gather(mine, "x")] == [[[other, other]] * other for other in ranks]
        assert [part.shape for part in group.gather(mine[:0], "x")] == [(0, 2)] * len(ranks)
        for text in ("", "naïve 🤖 数学"):
            assert group.broadcast_text(text if rank == ranks[-1] else "?", ranks[-1], "x") == text
        messages = {other: torch.full((other + 1,), rank, dtype=torch.uint8) for other in ranks if other != rank}
        with counting_traffic() as traffic:
            arrived = group.exchange(messages, sorted(messages), "x")
        assert {other: part.tolist() for other, part in arrived.items()} == {
            other: [other] * (rank + 1) for other in messages
        }
        assert traffic.sent == sum(other + 1 for other in messages)
        assert traffic.received == (rank + 1) * len(messages)
        assert group.exchange({}, [], "x") == {}


def sums_of_many(_: object) -> list[list[float]]:
    """Sums and largest values, with blocks as for very many ranks."""
    rank, world = dist.get_rank(), Transport(torch.device("cpu"), timeout_s=20).world
    with patch.object(transport, "is_in_blocks", lambda _: True), patch.object(dist, "all_reduce", None):
        scalar, table = torch.tensor(rank), torch.tensor([[0.1, rank], [1e8, -(rank**2)]])
        found = [world.sum(scalar, "x"), world.max(scalar, "x"), world.sum(table, "x"), world.max(table, "x")]
        assert [part.shape for part in found] == [(), (), (2, 2), (2, 2)]
        assert found[0].dtype == torch.int64
    return [part.reshape(-1).tolist() for part in found]


@pytest.mark.parametrize("world_size", [3, 4])  # in one block, and in two
def test_many_ranks_sum_in_blocks_without_a_ring(ranks: RankPool, world_size: int) -> None:
    first, *others = ranks.run(world_size, sums_of_many, None)
    assert all(other == first for other in others), "to the last bit"
    total, squares = sum(range(world_size)), -sum(rank**2 for rank in range(world_size))
    assert first[:2] == [[total], [world_size - 1]]
    assert first[2] == pytest.approx([world_size * 0.1, total, world_size * 1e8, squares])
    assert first[3] == pytest.approx([0.1, world_size - 1, 1e8, 0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_understand_each_other(ranks: RankPool, world_size: int) -> None:
    ranks.run(world_size, talk)


def first_messages() -> list[str]:
    """The operations of a rank on payload tensors, from the creation of process groups to an exchange."""
    seen: list[str] = []

    def watch(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(first: object, *args: object, **options: Any) -> object:
            if not isinstance(first, torch.Tensor) or first.dtype == torch.float32:
                seen.append(f"{name} {dist.get_world_size(options.get('group')) if name == 'all_reduce' else ''}")
            return function(first, *args, **options)

        return call

    names = ("all_reduce", "batch_isend_irecv")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, watch(name, getattr(dist, name))))
        whole = Transport(torch.device("cpu"), timeout_s=20)
        for members in ((0, 1), (1, 2), (0, 1)):
            whole.add_process_group(members)
        others = {other: torch.zeros(3, dtype=torch.uint8) for other in whole.world.ranks if other != whole.rank}
        whole.world.exchange(others, sorted(others), "x")
    return seen


@pytest.mark.skipif(VARIABLE in os.environ, reason="the messages of torch are counted")
def test_the_first_message_of_a_process_group_is_one_of_all_its_ranks(ranks: RankPool) -> None:
    first, second, third = ranks.run(3, first_messages)
    sent = ["batch_isend_irecv "] * 2
    assert first == third == ["all_reduce 3", "all_reduce 2", *sent]
    assert second == ["all_reduce 3", "all_reduce 2", "all_reduce 2", *sent]


class Never:
    """An exchange on an accelerator that does not end; `wait` only queues, as that of NCCL does."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        pass


def wait_for_an_accelerator() -> tuple[str, float]:
    """The error of rank 0, which waits for a rank that sends nothing, and how long it took."""
    if dist.get_rank() == 1:
        time.sleep(2)
        return "", 0.0
    begin = time.monotonic()
    device = torch.device("meta")  # any device but the CPU
    process_group = ProcessGroup((0, 1), 0, payload_device=device, timeout_s=0.5)
    try:
        process_group._finish(RoundUnderWay([cast("dist.Work", Never())], [], [], stays=False), "rows")
    except CollectiveError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


def test_an_exchange_that_never_ends_names_who_is_missing_before_the_backend_gives_up(ranks: RankPool) -> None:
    (message, seconds), _ = ranks.run(2, wait_for_an_accelerator)
    assert "rank 0 waited for rows with ranks [1]; nothing is heard of rank 1" in message
    assert 0.45 <= seconds < 0.5 + ROLL_CALL_S + 0.5


def read_dataset(path: str, max_prompt_tokens: int) -> tuple[list[int], list[int]]:
    """The usable rows, and the ids of this rank's prompts of two steps."""
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "workflow": "grpo",
            "models": {},
            "steps": 1,
            "data": {"train": {"path": path, "limit": 10}, "max_prompt_tokens": max_prompt_tokens},
            "batch": {"prompts_per_step": 5},
        }
    )
    cache = DataCache(Transport(torch.device("cpu"), timeout_s=20).world)
    encoder = RowEncoder(Characters(), recipe.data.train, "data.train")
    dataset = open_dataset(open_source(recipe.data.train, "data.train", cache), encoder, recipe, cache)
    loader = Dataloader([dataset], recipe, dist.get_rank(), dist.get_world_size())
    return dataset.rows.tolist(), [*loader.next().ids.tolist(), *loader.next().ids.tolist()]


def read_some(paths: list[str], max_rows: int | None) -> tuple[list[int], int] | str:
    """The usable rows and the number of overlong ones, or the error, if each rank has a different file."""
    path = paths[dist.get_rank()]
    config = {"name": "test", "workflow": "grpo", "models": {}, "steps": 1}
    recipe = Recipe.model_validate(config | {"data": {"train": {"path": path}, "max_prompt_tokens": 5}})
    cache = DataCache(Transport(torch.device("cpu"), timeout_s=20).world)
    encoder = RowEncoder(Characters(), recipe.data.train, "data.train")
    try:
        dataset = open_dataset(
            open_source(recipe.data.train, "data.train", cache), encoder, recipe, cache, None, max_rows
        )
    except RuntimeError as error:
        return str(error)
    return dataset.rows.tolist(), dataset.num_overlong


@pytest.mark.parametrize("change", ["another row", "a row less", "a text of the same length"])
def test_ranks_with_other_data_all_stop_and_are_named(ranks: RankPool, tmp_path: Path, change: str) -> None:
    same, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = ['{"prompt": "a"}\n', '{"prompt": "b"}\n']
    same.write_text("".join(rows))
    changed = {"another row": [*rows, rows[0]], "a row less": rows[:1], "a text of the same length": rows[::-1]}
    other.write_text("".join(changed[change]))
    files = [str(same), str(other), str(same), str(other)]
    for rank, error in enumerate(ranks.run(4, read_some, files, None)):
        assert str(error).startswith(
            f"rank {rank}: ranks 1,3 have other data for data.train than rank 0 (here {tmp_path}"
        )
        assert str(error).endswith("give all machines the same files")
    assert ranks.run(2, read_some, [str(same)] * 2, None) == [([0, 1], 0)] * 2


def test_all_ranks_find_the_same_first_rows(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lengths = [1, 9, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1, 9, 1]
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in lengths))
    for world_size in (1, 3):
        for max_rows, expected in ((2, ([0, 2], 1)), (3, ([0, 2, 12], 10)), (9, ([0, 2, 12, 13, 15], 11))):
            assert ranks.run(world_size, read_some, [str(path)] * world_size, max_rows) == [expected] * world_size


def test_all_ranks_agree_on_the_rows_that_are_used(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lengths = [1, 9, 2, 2, 9, 9, 9, 1, 9, 1, 1, 1]
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in lengths))
    for world_size in (1, 2, 3, 4):
        results = ranks.run(world_size, read_dataset, str(path), 5)
        assert [rows for rows, _ in results] == [[0, 2, 3, 7, 9]] * world_size
        assert sorted(group for _, groups in results for group in groups) == list(range(10))
