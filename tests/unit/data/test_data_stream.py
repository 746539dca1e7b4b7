"""Streams: rows that are read in their order, shuffled within windows, epoch after epoch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tests.rows import Characters, mixed_recipe, open_sets, recipe_of, shards_of, take, write_jsonl

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.config.data import TrainingSetConfig
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources.open_source import open_source
from leaderless.data.sources.row_sources import RowStream
from leaderless.data.streamed_dataset import StreamedDataset, StreamFeed


def write_packed(path: Path, rows: Sequence[Json]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def numbered(count: int) -> list[Json]:
    return [{"prompt": f"{index:03}"} for index in range(count)]


def stream_of(path: Path, data: dict[str, object] | None = None, size: int = 5) -> Recipe:
    return recipe_of(path, {"streaming": True, "shuffle_buffer": 4, **(data or {})}, batch={"prompts_per_step": size})


class Lines(RowStream):
    """A stream in memory, whose prompts have the given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths, self.num_read = list(lengths), 0

    def rows(self):
        for index, length in enumerate(self.lengths):
            self.num_read += 1
            yield f"line {index}", {"prompt": "x" * length, "index": index}

    def fingerprint(self) -> str:
        return str(self.lengths)


def feed_of(stream: Lines, buffer: int, *, shuffle: bool = True, **data: Json) -> StreamFeed:
    config = {"path": "memory", "streaming": True, "shuffle_buffer": buffer}
    recipe = mixed_recipe(config, {"max_prompt_tokens": 5, **data})
    assert isinstance(recipe.data.train, TrainingSetConfig)
    encoder = RowEncoder(Characters(), recipe.data.train, "data.train")
    dataset = StreamedDataset(stream, encoder, recipe.data.train, recipe.data)
    return StreamFeed(dataset, 3, 0, shuffle=shuffle)


def indices(feed: StreamFeed, places: Sequence[int]) -> list[Json]:
    return [prompt.row["index"] for prompt in feed.take(places)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(2, 12), st.booleans(), st.integers(0, 100))
def test_every_epoch_of_a_stream_has_each_usable_row_once(
    lengths: list[int], buffer: int, shuffle: bool, begin: int
) -> None:
    usable = [index for index, length in enumerate(lengths) if length < 5]  # with the token that begins it
    feed = feed_of(Lines(lengths), buffer, shuffle=shuffle)
    if not usable:
        with pytest.raises(RecipeError, match=r"all rows of memory are overlong: raise data.max_prompt_tokens \(now 5"):
            feed.take([0])
        return
    taken = indices(feed, range(3 * len(usable)))
    for epoch in range(3):
        rows = taken[epoch * len(usable) : (epoch + 1) * len(usable)]
        assert sorted(map(int, map(str, rows))) == usable
        if not shuffle:
            assert rows == usable
        for first in range(0, len(rows) if shuffle else 0, buffer):  # no row leaves its window
            assert set(rows[first : first + buffer]) == set(usable[first : first + buffer])
    # A reader that begins anywhere, and takes only some rows, gets the same rows.
    places = list(range(begin % len(taken), len(taken), 3))
    again = feed_of(Lines(lengths), buffer, shuffle=shuffle)
    assert indices(again, places) == [taken[place] for place in places]
    assert again.epoch(len(taken)) == 3.0


def test_a_stream_is_shuffled_anew_in_every_epoch() -> None:
    feed = feed_of(Lines([1] * 12), 6)
    epochs = [tuple(indices(feed, range(12 * epoch, 12 * epoch + 12))) for epoch in range(4)]
    assert len(set(epochs)) == 4
    assert tuple(range(12)) not in epochs


def test_a_stream_is_read_no_further_than_its_window() -> None:
    stream = Lines([1] * 100)
    feed = feed_of(stream, 8)
    feed.take(range(9))
    assert stream.num_read == 17  # the first row was read before
    assert feed.epoch(9) == 0.0, "nobody knows yet"


def test_overlong_rows_of_a_stream_are_an_error_where_asked() -> None:
    feed = feed_of(Lines([1, 1, 9, 1]), 2, shuffle=False, overlong="error")
    assert indices(feed, [0, 1]) == [0, 1]
    with pytest.raises(RecipeError, match="line 2 has a prompt of 10 tokens, more than 5"):
        feed.take([2])


def test_a_stream_that_shrinks_is_noticed() -> None:
    stream = Lines([1] * 6)
    feed = feed_of(stream, 4)
    feed.take(range(6))
    assert feed.epoch(7) == pytest.approx(7 / 6)
    stream.lengths.pop()
    with pytest.raises(RuntimeError, match="memory has 5 usable rows now, and had 6 in the epoch before"):
        feed.take(range(6, 12))


@pytest.mark.parametrize("kind", ["one", "folder", "plain", "parquet"])
def test_files_are_streamed_in_their_order(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    match kind:
        case "one":
            write_packed(path, numbered(7))
        case "folder":
            path = tmp_path / "rows"
            path.mkdir()
            write_packed(path / "a.jsonl.gz", numbered(7)[:3])
            write_jsonl(path / "b.jsonl", [])
            parquet.write_table(pa.Table.from_pylist(numbered(7)[3:5]), path / "c.parquet", row_group_size=1)
            write_jsonl(path / "d.jsonl", numbered(7)[5:])
        case "plain":
            path = write_jsonl(tmp_path / "rows.jsonl", numbered(7))
        case "parquet":
            path = tmp_path / "rows.parquet"
            parquet.write_table(pa.Table.from_pylist(numbered(7)), path, row_group_size=3)
    recipe = stream_of(path, {"shuffle": False})
    expected = [(index, f"{index % 7:03}") for index in range(20)]
    assert take(shards_of(recipe, 1), 4) == expected
    assert take(shards_of(recipe, 2, position=10), 2) == expected[10:]
    limited = stream_of(path, {"shuffle": False, "limit": 3})
    assert take(shards_of(limited, 1), 1) == [(index, f"{index % 3:03}") for index in range(5)]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "rows.jsonl.gz", [{"prompt": f"{index * 7919:x}"} for index in range(5000)])
    path.write_bytes(path.read_bytes()[:-2000])
    (loader,) = shards_of(stream_of(path, size=5000), 1)
    with pytest.raises(RecipeError, match=r"rows.jsonl.gz cannot be read beyond line \d+: .*: it is damaged"):
        loader.next()


def test_an_archive_needs_streaming(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "rows.jsonl.gz", numbered(2))
    with pytest.raises(RecipeError, match=r"data.train.path: .*rows.jsonl.gz can only .* set `streaming: true`"):
        open_sets(recipe_of(path))
    recipe = recipe_of(path, {"evaluation": {"path": str(path)}})
    assert recipe.data.evaluation is not None
    with pytest.raises(RecipeError, match=r"data.evaluation.path: .*can only be read from its beginning: unpack it"):
        open_source(recipe.data.evaluation, "data.evaluation")


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(path: str, subset: str | None, *, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((path, subset, split, streaming))
        if path != "owner/data":
            raise FileNotFoundError("no such dataset")
        rows = [{"prompt": f"{index:03}", "more": index, "image": b"x"} for index in range(4)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train: Json = {"path": "owner/data", "subset": "main", "streaming": True, "columns": ["more"]}
    recipe = mixed_recipe(train, {"shuffle": False}, batch={"prompts_per_step": 6})
    (loader,) = shards_of(recipe, 1)
    batch = loader.next()
    assert asked == [("owner/data", "main", "train", True)]
    assert batch.objects("rows")[1] == {"prompt": "001", "more": 1}
    assert batch.ids.tolist() == list(range(6))
    assert loader.numbers()["data/epoch"] == 1.5
    with pytest.raises(RecipeError, match=r"'owner/typo' is no local file or folder, and the hub does not give it"):
        open_sets(mixed_recipe({"path": "owner/typo", "streaming": True}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "a"}, "rows.jsonl.gz:1 has no column 'prompt'"),
        ({"prompt": None}, "rows.jsonl.gz:1: column 'prompt'"),
    ],
)
def test_the_first_row_of_a_stream_is_looked_at_before_training(tmp_path: Path, row: Json, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        open_sets(stream_of(write_packed(tmp_path / "rows.jsonl.gz", [row])))
