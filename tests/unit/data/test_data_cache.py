"""The index of an earlier start, and Parquet as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.counts import counting_bytes_read
from tests.rows import Characters, open_sets, recipe_of, shards_of, take, write_jsonl

from leaderless.config import Recipe, RecipeError
from leaderless.data.dataset import Dataset
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources.disk_cache import Arrays, DataCache, whole_file
from leaderless.data.sources.parquet import UnpackedSource
from leaderless.data.sources.row_sources import Row
from leaderless.observability.run_directory import RunDirectory


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The positions of rows that are tokenized."""
    places: list[str] = []
    texts = RowEncoder.texts

    def watched(self: RowEncoder, row: Row, place: str) -> tuple[str, str]:
        places.append(place)
        return texts(self, row, place)

    monkeypatch.setattr(RowEncoder, "texts", watched)
    return places


def open_one(recipe: Recipe, folder: Path) -> Dataset:
    (one,) = open_sets(recipe, DataCache(folder=folder))
    assert isinstance(one, Dataset)
    return one


def test_a_second_start_encodes_nothing(tmp_path: Path, encoded: list[str]) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": "x" * length, "level": -length} for length in (1, 9, 2, 3, 9, 9)]
    )
    recipe = recipe_of(path, {"max_prompt_tokens": 5, "curriculum": "level"})
    first = open_one(recipe, tmp_path / "cache")
    assert len(encoded) == 6
    with counting_bytes_read() as read:
        again = open_one(recipe, tmp_path / "cache")
    assert len(encoded) == 6
    assert read.total == 0
    for dataset in (first, again):
        assert dataset.rows.tolist() == [0, 2, 3]
        assert dataset.num_overlong == 3
        assert dataset.levels is not None
        assert dataset.levels.tolist() == [-1, -2, -3]
    loaders = [shards_of(recipe, 1, cache=DataCache(folder=folder)) for folder in (None, tmp_path / "cache")]
    assert take(loaders[0], 1) == take(loaders[1], 1)


@pytest.mark.parametrize(
    "change",
    [
        {"max_prompt_tokens": 6},
        {"template": "{prompt}!"},
        {"limit": 1},
        {"overlong": "error"},
        {"curriculum": "level"},
    ],
)
def test_other_settings_are_looked_at_anew(tmp_path: Path, encoded: list[str], change: dict[str, object]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "level": 1}, {"prompt": "y", "level": 2}])
    open_one(recipe_of(path, {"max_prompt_tokens": 5}), tmp_path / "cache")
    num_before = len(encoded)
    open_one(recipe_of(path, {"max_prompt_tokens": 5} | change), tmp_path / "cache")
    assert len(encoded) > num_before


def test_another_tokenizer_or_a_changed_file_is_looked_at_anew(
    tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    recipe = recipe_of(path)
    open_one(recipe, tmp_path / "cache")
    monkeypatch.setattr(Characters.__init__, "__defaults__", (None, 7))
    open_one(recipe, tmp_path / "cache")
    assert len(encoded) == 4
    os.utime(path, ns=(1, 1))
    with counting_bytes_read() as read:
        open_one(recipe, tmp_path / "cache")
    assert read.total > 0
    assert len(encoded) == 6


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive"])
def test_what_was_cut_off_is_found_out_again(tmp_path: Path, content: bytes) -> None:
    recipe = recipe_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}]))
    open_one(recipe, tmp_path / "cache")
    files = list((tmp_path / "cache").iterdir())
    assert sorted(file.name.partition("-")[0] for file in files) == ["lines", "usable"]
    for file in files:
        file.write_bytes(content)
    assert open_one(recipe, tmp_path / "cache").rows.tolist() == [0, 1]


def test_nothing_that_could_run_is_read_back(tmp_path: Path) -> None:
    cache = DataCache(folder=tmp_path)
    path = cache.path("x", 1, ".npz")
    assert path is not None
    np.savez(path, rows=np.array([{"a": 1}], dtype=object))
    assert cache.kept("x", 1, lambda: {"rows": np.zeros(1)})["rows"].tolist() == [0]


def test_a_damaged_byte_is_never_trusted(tmp_path: Path) -> None:
    cache = DataCache(folder=tmp_path)
    path = cache.path("x", 1, ".npz")
    rows, num_found_out = np.arange(40), 0

    def find_out() -> Arrays:
        nonlocal num_found_out
        num_found_out += 1
        return {"rows": rows}

    cache.kept("x", 1, find_out)
    assert path is not None
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert np.array_equal(cache.kept("x", 1, find_out)["rows"], rows)
    assert num_found_out > 1 + rows.nbytes


def test_what_one_run_has_found_another_one_knows(tmp_path: Path, encoded: list[str]) -> None:
    recipe = recipe_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]), run={"directory": str(tmp_path / "runs")})
    folders = {RunDirectory.of(recipe.model_copy(update={"name": name})).data for name in ("one", "two")}
    (folder,) = folders
    for _ in range(2):
        open_one(recipe, folder)
    assert len(encoded) == 1


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = recipe_of(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}]))
    assert open_one(recipe, tmp_path / "file").rows.tolist() == [0]


def test_unpacked_rows_that_were_cut_off_are_written_again(tmp_path: Path) -> None:
    rows: list[Row] = [{"prompt": f"{index}"} for index in range(10)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    recipe = recipe_of(tmp_path / "a.parquet")
    open_one(recipe, tmp_path / "cache")
    (part,) = (tmp_path / "cache").glob("rows-*/*.jsonl")
    whole = part.read_bytes()
    for damaged in (whole[:-20], whole.replace(b'"4"', b'"5"')):
        part.write_bytes(damaged)
        dataset = open_one(recipe, tmp_path / "cache")
        assert [dataset.source.row(index) for index in range(10)] == rows


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_parquet_is_unpacked_once_and_its_rows_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = [{"prompt": f"naïve\n{index}", "more": [index], "unused": "x" * 100} for index in range(10)]
    (tmp_path / "data").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows[:7]), tmp_path / "data" / "a.parquet", row_group_size=3)
    write_jsonl(tmp_path / "data" / "b.jsonl", rows[7:])
    recipe = recipe_of(tmp_path / "data", {"columns": ["more"]})
    first = open_one(recipe, tmp_path / "cache")
    assert isinstance(first.source, UnpackedSource)
    expected = [{"prompt": row["prompt"], "more": row["more"]} for row in rows]
    with counting_bytes_read() as read:
        again = open_one(recipe, tmp_path / "cache")
    assert read.total == 0
    for dataset in (first, again):
        assert [dataset.source.row(index) for index in range(10)] == expected
        assert [Path(dataset.source.describe(index)).name for index in (4, 8)] == ["a.parquet row 4", "b.jsonl:2"]
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    written = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    assert [json.loads(line) for line in written.splitlines()] == expected
    plain = open_sets(recipe)[0]
    assert isinstance(plain, Dataset)
    assert not isinstance(plain.source, UnpackedSource)


@pytest.mark.parametrize("limit", [1, 3, 4, 9, 50])
def test_no_more_row_groups_are_unpacked_than_are_used(tmp_path: Path, limit: int) -> None:
    rows: list[Row] = [{"prompt": f"{index}"} for index in range(10)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=3)
    dataset = open_one(recipe_of(tmp_path / "a.parquet", {"limit": limit}), tmp_path / "cache")
    assert dataset.rows.tolist() == list(range(min(limit, 10)))
    assert len(dataset.source) == min(10, -(-limit // 3) * 3)


def test_a_bad_row_of_parquet_is_named_by_its_file(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"prompt": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"a.parquet row 1: column 'prompt' is null"):
        open_one(recipe_of(tmp_path / "a.parquet"), tmp_path / "cache")
