"""The data of a run on several ranks: the same order on any number of them, and each rank reads its own rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tests.counts import counting_bytes_read
from tests.distributed.ranks import RankPool
from tests.rows import mixed_recipe, open_sets, prompts_of, write_jsonl

from leaderless.base.values import Json
from leaderless.data.dataloader import Dataloader
from leaderless.data.sources.disk_cache import DataCache
from leaderless.distributed.transport import Transport

Taken = list[tuple[int, Json]]
SIZE = 12


def read_steps(
    train: Mapping[str, Json], folder: str | None, position: int, num_steps: int
) -> tuple[Taken, int, dict[str, float], int]:
    """This rank's prompts of some steps, the position and the metrics after them, and the bytes it has read."""
    recipe = mixed_recipe(train, {"max_prompt_tokens": 1200}, batch={"prompts_per_step": SIZE}, seed=5)
    transport = Transport(torch.device("cpu"), timeout_s=60)
    taken: Taken = []
    with counting_bytes_read() as read:
        sets = open_sets(recipe, DataCache(transport.world, Path(folder) if folder else None))
        loader = Dataloader(sets, recipe, transport.rank, transport.world.size)
        loader.position = position
        for _ in range(num_steps):
            batch = loader.next()
            taken += zip(batch.ids.tolist(), prompts_of(batch), strict=True)
        loader.close()
    return taken, loader.position, loader.numbers(), read.total


def write_all(folder: Path) -> dict[str, dict[str, Json]]:
    """A dataset of each kind, some rows of each overlong; and mixtures of them."""

    def rows(name: str, count: int) -> list[dict[str, Json]]:
        lengths = [1300 if index % 7 == 3 else 5 for index in range(count)]
        return [
            {"prompt": f"{name}{index}".ljust(length, "."), "level": index * 37 % 10}
            for index, length in enumerate(lengths)
        ]

    write_jsonl(folder / "lines.jsonl", rows("lines", 50))
    parquet.write_table(pa.Table.from_pylist(rows("parquet", 40)), folder / "table.parquet", row_group_size=7)
    with gzip.open(folder / "stream.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows("stream", 25))
    lines: dict[str, Json] = {"path": str(folder / "lines.jsonl")}
    table: dict[str, Json] = {"path": str(folder / "table.parquet"), "curriculum": "level"}
    stream: dict[str, Json] = {"path": str(folder / "stream.jsonl.gz"), "streaming": True, "shuffle_buffer": 10}
    mixture: dict[str, Json] = {
        "lines": lines | {"weight": 0.5},
        "stream": stream | {"weight": 0.2},
        "table": table | {"weight": 0.3},
    }
    return {"lines": lines, "curriculum of a table": table, "stream": stream, "mixture": mixture}


@pytest.mark.parametrize("kind", ["lines", "curriculum of a table", "stream", "mixture"])
def test_a_run_goes_on_with_the_same_rows_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    train = write_all(tmp_path)[kind]
    ((expected, _, numbers, _),) = ranks.run(1, read_steps, train, str(tmp_path / "alone"), 0, 12)
    assert [place for place, _ in expected] == list(range(12 * SIZE))
    taken: Taken = []
    position, last = 0, {}
    for world_size, num_steps in ((4, 5), (2, 4), (1, 3)):
        results = ranks.run(world_size, read_steps, train, str(tmp_path / "run"), position, num_steps)
        positions, metrics = [result[1] for result in results], [result[2] for result in results]
        assert set(positions) == {position + num_steps * SIZE}
        assert all(one == metrics[0] for one in metrics), "all ranks say the same"
        position, last = positions[0], metrics[0]
        taken += sorted(pair for result in results for pair in result[0])
    assert taken == expected
    assert last == numbers
    assert last["data/epoch"] > (1 if kind == "mixture" else 3)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_rank_reads_its_share_of_the_bytes(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    num_rows = 100 * SIZE
    rows = [{"prompt": f"{index:05} {index * 7919 % 104729:0900d}"} for index in range(num_rows)]
    path = tmp_path / f"a.{kind}"
    write_jsonl(tmp_path / "a.jsonl", rows)
    num_bytes = (tmp_path / "a.jsonl").stat().st_size
    if kind == "parquet":
        parquet.write_table(
            pa.Table.from_pylist(rows), path, row_group_size=100, compression="none", use_dictionary=False
        )
    for world_size in (1, 2, 4):
        folder = str(tmp_path / f"cache-{world_size}")
        # To find lines, to see which rows can be used, and to train on them; Parquet is read once more before that.
        for num_passes in (3 + (kind == "parquet"), 1):
            results = ranks.run(world_size, read_steps, {"path": str(path)}, folder, 0, num_rows // SIZE)
            for _, _, _, read in results:
                assert read == pytest.approx(num_passes * num_bytes / world_size, rel=0.05)


def test_a_file_of_one_row_group_is_read_by_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": f"{index:0900d}"} for index in range(400)]), path)
    train = {"path": str(path)}
    results = ranks.run(4, read_steps, train, str(tmp_path / "cache"), 0, 4)
    alone = ranks.run(1, read_steps, train, None, 0, 4)
    assert sorted(pair for result in results for pair in result[0]) == alone[0][0]
    parts = sorted((tmp_path / "cache").glob("rows-*/part-*.jsonl"))
    assert sorted(len(part.read_text().splitlines()) for part in parts) == [0, 0, 0, 400]
