"""From files to the prompts of each step: sources, tokens, order, shards."""

from __future__ import annotations

import datetime as dt
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from huggingface_hub import constants
from pyarrow import parquet
from tests.counts import counting_bytes_read
from tests.rows import (
    Characters,
    open_path,
    open_recipe,
    open_sets,
    prompts_of,
    recipe_of,
    rows_of,
    text_of,
    write_jsonl,
)
from tests.tiny import tiny_model

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.data.dataloader import Dataloader
from leaderless.data.dataset import Dataset, RowOrder, open_dataset
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources import jsonl
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.hub import _unreachable
from leaderless.data.sources.open_source import open_source
from leaderless.data.sources.parquet import ParquetSource
from leaderless.data.sources.row_sources import Row, RowSource
from leaderless.models.loading.tokenizer import load_tokenizer

# Sources


def test_jsonl_rows_are_found_and_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\n{"prompt": "naïve 🤖"}\r\n  \n{"prompt": [1, {"b": null}]}'.encode())
    source = open_path(path)
    assert rows_of(source) == [{"prompt": "naïve 🤖"}, {"prompt": [1, {"b": None}]}]
    assert [source.describe(index) for index in range(2)] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [(b'{"prompt": ', "is not JSON"), (b'{"prompt": "\xff"}', "is not JSON.*utf-8"), (b"[1]", "must be an object")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    source = open_path(path)
    assert source.row(0) == {"prompt": "good"}
    with pytest.raises(RecipeError, match=f"a.jsonl:2 {message}"):
        source.row(1)


@pytest.mark.parametrize("scan_bytes", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize("tail", [b"", b"\n", b"\n \t\n\n", b"\n  "])
def test_jsonl_lines_are_found_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan_bytes: int, tail: bytes
) -> None:
    monkeypatch.setattr(jsonl, "SCAN_BYTES", scan_bytes)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n\n{"a": 1}\n   \n  {"a": 22}\r\n\v\n{"a": 333}' + tail)
    source = open_path(path)
    assert [row["a"] for row in rows_of(source)] == [1, 22, 333]
    assert [source.describe(index) for index in range(3)] == [f"{path}:{line}" for line in (3, 5, 7)]


def test_a_jsonl_file_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "SCAN_BYTES", 1 << 16)
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * 100_000}] * 40)
    tracemalloc.start()
    source = open_path(path)
    source.fingerprint()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) == 40
    assert most < 1_000_000


def test_a_dataset_is_known_by_its_size_and_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, *texts: str) -> RowSource:
        (tmp_path / name).mkdir(exist_ok=True)
        return open_path(write_jsonl(tmp_path / name / "a.jsonl", [{"prompt": text} for text in texts]))

    first = write("one", "a", "b").fingerprint()
    assert write("two", "a", "b").fingerprint() == first == open_path(tmp_path / "one" / "a.jsonl").fingerprint()
    assert len({first, *(write("two", *texts).fingerprint() for texts in ("ab", "ac", "cb", "abb"))}) == 4
    folder = open_path(tmp_path / "one").fingerprint()
    write_jsonl(tmp_path / "one" / "b.jsonl", [{"prompt": "c"}])
    assert open_path(tmp_path / "one").fingerprint() != folder
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *_, **__: [{"prompt": path}])
    named = [open_source(DatasetConfig(path=name), "data.train").fingerprint() for name in ("o/a", "o/a", "o/b")]
    assert named[0] == named[1] != named[2]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="has no rows"):
        open_path(path)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\n")
    for name, message in (
        ("a.csv", "must end in .jsonl, .parquet or .jsonl.gz"),
        ("b.jsonl", "does not exist"),
        ("", "holds no"),
    ):
        with pytest.raises(RecipeError, match=message):
            open_path(tmp_path / name)
    with pytest.raises(RecipeError, match=r"there is no .jsonl, .parquet or .jsonl.gz file named .*part-\*"):
        open_path(tmp_path / "part-*")


def test_a_pattern_names_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("part-1.jsonl", "part-0.jsonl", "other.jsonl"):
        write_jsonl(tmp_path / name, [{"prompt": name}])
    monkeypatch.chdir(tmp_path)
    for pattern in (tmp_path / "part-*.jsonl", Path("part-?.jsonl"), Path("part-[01].*")):
        assert [row["prompt"] for row in rows_of(open_path(pattern))] == ["part-0.jsonl", "part-1.jsonl"]


def test_only_wanted_columns_are_kept(tmp_path: Path) -> None:
    rows: list[Row] = [{"q": "a", "a": "b", "kind": 1, "level": 2, "extra": 3, "unused": 4}] * 3
    write_jsonl(tmp_path / "a.jsonl", rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    more = {"prompt": "q", "answer": "a", "source": "kind", "template": "{q}{level}", "columns": ["extra"]}
    for name in ("a.jsonl", "a.parquet"):
        config = DatasetConfig.model_validate({"path": str(tmp_path / name), **more})
        assert open_source(config, "data.train").row(1) == {"q": "a", "a": "b", "kind": 1, "level": 2, "extra": 3}
        recipe = recipe_of(tmp_path / name, {**more, "columns": ["extar"]})
        with pytest.raises(RecipeError, match=r"data.train.columns: .*a\.\w+( row 0|:1) has no column 'extar'"):
            open_recipe(recipe)
    sizes: dict[bool, int] = {}
    for columns, expected in ((None, rows[0]), ({"q", "a"}, {"q": "a", "a": "b"})):
        with counting_bytes_read() as read:
            assert ParquetSource(tmp_path / "a.parquet", columns).row(0) == expected
        sizes[columns is None] = read.total
    assert 0 < sizes[False] < sizes[True] / 2


def test_parquet_rows_are_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows: list[Row] = [{"prompt": f"p{i}", "tags": [i, None], "info": {"level": i}} for i in range(10)]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    source = open_path(path)
    assert len(source) == 10
    for index in (9, 0, 5, 3, 2, 8):
        assert source.row(index) == rows[index]
    assert source.describe(4) == f"{path} row 4"


def test_parquet_rows_hold_only_what_json_can(tmp_path: Path) -> None:
    moment = dt.datetime(2024, 5, 6, 7, 8, 9)
    table = pa.table({"when": [moment], "day": [moment.date()], "price": [Decimal("1.50")], "at": [[moment]]})
    parquet.write_table(table, tmp_path / "a.parquet")
    row = open_path(tmp_path / "a.parquet").row(0)
    text = "2024-05-06T07:08:09"
    assert row == {"when": text, "day": "2024-05-06", "price": "1.50", "at": [text]}
    parquet.write_table(pa.table({"image": [b"\x00"]}), tmp_path / "b.parquet")
    with pytest.raises(RecipeError, match=r"b.parquet row 0: column 'image' holds bytes"):
        open_path(tmp_path / "b.parquet").row(0)


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really PAR1"])
def test_a_broken_parquet_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"a.parquet is not a readable Parquet file"):
        ParquetSource(path)


def test_a_folder_is_its_files_one_behind_the_other(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "b.jsonl").write_text("")
    parquet.write_table(pa.table({"prompt": ["3", "4"]}), tmp_path / "c.parquet")
    write_jsonl(tmp_path / "d.jsonl", [{"prompt": "5"}])
    (tmp_path / "readme.md").write_text("not data")
    source = open_path(tmp_path)
    assert [row["prompt"] for row in rows_of(source)] == list("12345")
    assert [Path(source.describe(index)).name for index in (1, 2, 4)] == ["a.jsonl:2", "c.parquet row 0", "d.jsonl:1"]


def test_other_names_are_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, subset: str | None, split: str) -> list[Row]:
        asked.append((path, subset, split))
        if path != "owner/data":
            raise FileNotFoundError("no such dataset")
        return [{"prompt": "a"}, {"prompt": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = open_source(DatasetConfig(path="owner/data", subset="main", split="test"), "data.train")
    assert asked == [("owner/data", "main", "test")]
    assert rows_of(source) == [{"prompt": "a"}, {"prompt": "b"}]
    assert source.describe(1) == "owner/data/main/test row 1"
    with pytest.raises(
        RecipeError, match=r"'typo.jsonx' is no local file or folder, and the hub does not give it.*no such"
    ):
        open_source(DatasetConfig(path="typo.jsonx"), "data.train")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that seems to be reachable, but does not answer."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    _unreachable.cache_clear()
    yield
    _unreachable.cache_clear()


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer_is_asked_once_and_given_up_soon() -> None:
    begin = time.monotonic()
    message = r"(?s)'owner/{}'.*the hub http://127.0.0.1:\d+ does not answer .*refused.*: connect, or download it"
    with pytest.raises(RecipeError, match=message.format("data")):
        open_source(DatasetConfig(path="owner/data"), "data.train")
    with pytest.raises(RecipeError, match=message.format("model")) as refused:
        load_tokenizer(ModelConfig(path="owner/model"), "policy")
    assert ".;" not in str(refused.value)
    assert constants.is_offline_mode(), "what the libraries do next asks nobody either"
    assert datasets.config.HF_HUB_OFFLINE
    assert time.monotonic() - begin < 10


@pytest.mark.usefixtures("hub")
def test_the_hub_is_not_asked_for_what_is_here(tmp_path: Path) -> None:
    open_path(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}]))
    load_tokenizer(ModelConfig(path=str(tiny_model())), "policy")
    assert not constants.is_offline_mode()


# Tokens


def encode(row: Row, tokenizer: Characters | None = None, **config: str | None) -> tuple[str, str]:
    settings = DatasetConfig.model_validate({"path": "x", **config})
    encoded = RowEncoder(tokenizer or Characters(), settings, "data.train").encode(row, "x.jsonl:7")
    return text_of(encoded.prompt), text_of(encoded.response)


def test_a_prompt_without_a_chat_template_is_taken_as_it_is() -> None:
    assert encode({"prompt": "1+1="}) == ("<1+1=", "")
    assert encode({"prompt": "1+1="}, Characters("template"), template="plain") == ("<1+1=", "")


def test_a_prompt_is_written_as_a_chat_where_the_tokenizer_can() -> None:
    chat = Characters("template")
    assert encode({"q": "1+1"}, chat, prompt="q") == ("user:1+1;assistant:", "")
    assert encode({"prompt": "1+1"}, chat, system="Be brief.") == ("system:Be brief.;user:1+1;assistant:", "")
    turns: list[Json] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert encode({"prompt": turns}, chat) == ("user:a;assistant:b;assistant:", "")


def test_a_template_is_filled_from_the_row() -> None:
    assert encode({"a": 1, "b": "x"}, template="{a}+{b}=") == ("<1+x=", "")
    assert encode({"a": 1}, template=r"{a} \boxed{{}}") == (r"<1 \boxed{}", "")


def test_a_response_ends() -> None:
    assert encode({"prompt": "1+1=", "r": "2"}, response="r") == ("<1+1=", "2>")
    assert encode({"prompt": "1+1=", "r": ""}, response="r") == ("<1+1=", ">")


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ({"promt": "a"}, {}, r"data.train: x.jsonl:7 has no column 'prompt' \(did you mean 'promt'\?\)"),
        ({"prompt": None}, {}, r"x.jsonl:7: column 'prompt' is null"),
        ({"prompt": "a"}, {"answer": "answer"}, r"x.jsonl:7 has no column 'answer'"),
        ({"prompt": "a", "answer": None}, {"answer": "answer"}, r"column 'answer' is null"),
        ({"prompt": "a"}, {"source": "source"}, r"x.jsonl:7 has no column 'source'"),
        ({"prompt": "a"}, {"response": "r"}, r"x.jsonl:7 has no column 'r'"),
        ({"prompt": "a", "r": ["b"]}, {"response": "r"}, r"data.train.response: x.jsonl:7: column 'r' holds list"),
        ({"prompt": ["a"]}, {}, r"data.train.prompt: x.jsonl:7: column 'prompt' holds list; without a chat template"),
        (
            {"a": 1},
            {"template": "{a}{b}"},
            r"data.train.template: x.jsonl:7: cannot be filled: 'b' \(columns that are not null: a\)",
        ),
        ({"a": None}, {"template": "{a}"}, r"cannot be filled: 'a' \(columns that are not null: none\)"),
        ({"a": 1}, {"template": r"{a} \boxed{}"}, r"braces that are text are written twice, as \{\{\}\}"),
        ({"a": 1}, {"template": "{a"}, r"data.train.template: x.jsonl:7: cannot be filled"),
        ({"a": 1}, {"template": "{a.b}"}, r"data.train.template: x.jsonl:7: cannot be filled"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: Row, config: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        encode(row, **config)


@pytest.mark.parametrize(
    ("part", "medium"),
    [
        ({"type": "image"}, "an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "an image"),
        ({"image": "a.png", "text": None}, "an image"),
        ({"type": "video", "video": "a.mp4"}, "a video"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
    ],
)
def test_a_message_with_more_than_text_is_refused_where_it_is(part: Json, medium: str) -> None:
    messages: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "How many?", "image": None}, part]}]
    problem = f"data.train.prompt: x.jsonl:7: column 'prompt' holds a message with {medium}, which is not read"
    with pytest.raises(RecipeError, match=problem):
        encode({"prompt": messages}, Characters("template"))


def test_parts_that_are_text_are_left_to_the_template() -> None:
    parts: list[Json] = [{"type": "text", "text": "an image", "image": None}, {"type": "thinking", "text": "b"}]
    messages: list[Json] = [{"role": "user", "content": parts}]
    assert encode({"prompt": messages}, Characters("template")) == (f"user:{parts};assistant:", "")


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        (Characters(eos_token_id=None), {}, "no end-of-sequence token"),
        (Characters(), {"template": "chat"}, "data.train.template: is 'chat', but the tokenizer has no chat template"),
        (Characters(), {"system": "Be brief."}, "data.train.system: needs a chat template"),
        (Characters("template"), {"system": "Be brief.", "template": "{a}"}, "data.train.system: needs a chat"),
    ],
)
def test_a_tokenizer_that_cannot_do_it_is_refused(tokenizer: Characters, config: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        RowEncoder(tokenizer, DatasetConfig.model_validate({"path": "x", **config}), "data.train")


# Which rows are used


def numbered(tmp_path: Path, num_rows: int) -> Path:
    return write_jsonl(tmp_path / "n.jsonl", [{"prompt": f"{index:03}"} for index in range(num_rows)])


def test_overlong_rows_are_dropped_before_rows_are_divided(tmp_path: Path) -> None:
    rows: list[Json] = [{"prompt": "a" * length, "r": "b"} for length in (3, 4, 1, 9, 2)]
    rows.append({"prompt": "a", "r": "b" * 9})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    recipe = recipe_of(path, {"max_prompt_tokens": 4, "max_response_tokens": 4, "response": "r"})
    assert open_recipe(recipe).rows.tolist() == [0, 2, 4]
    assert open_recipe(recipe_of(path, {"max_prompt_tokens": 4, "limit": 3})).rows.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"overlong": "error", "max_prompt_tokens": 3},
            r"data.max_prompt_tokens: .*a.jsonl:2 has a prompt of 4 tokens",
        ),
        ({"max_prompt_tokens": 1}, r"all 2 rows of .*a.jsonl are overlong: raise data.max_prompt_tokens \(now 1\)$"),
        (
            {"overlong": "error", "response": "prompt", "max_response_tokens": 3},
            r"data.max_response_tokens: .*a.jsonl:2 has a response of 4 tokens",
        ),
        (
            {"response": "prompt", "max_response_tokens": 1},
            r"overlong: raise .* or data.max_response_tokens \(now 1\)$",
        ),
    ],
)
def test_overlong_rows_are_an_error_where_asked_or_where_none_is_left(
    tmp_path: Path, data: dict[str, object], message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "abc"}])
    with pytest.raises(RecipeError, match=message):
        open_recipe(recipe_of(path, data))


def test_an_empty_prompt_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(RecipeError, match=r"a.jsonl:2 has an empty prompt"):
        open_recipe(recipe_of(path, {"template": "{prompt}"}), NoBos())


@pytest.mark.parametrize("template", ["auto", "plain", "{prompt} {level}"])
def test_rows_that_are_encoded_together_get_the_tokens_they_get_alone(template: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model())), "policy")
    tokenizer.truncation_side = "left"
    tokenizer("a" * 9, truncation=True, max_length=2, padding="max_length")  # changes the state of the fast tokenizer
    config = DatasetConfig(path="x", response="r", template=template)
    encoder = RowEncoder(tokenizer, config, "data.train")
    rows: list[Row] = [{"prompt": "1+1=" * n, "r": "2" * n, "level": n} for n in (3, 1, 0, 40, 2)]
    together = encoder.encode_texts([encoder.texts(row, "x") for row in rows])
    assert together == [encoder.encode(row, "x") for row in rows]
    assert len(together[3].prompt) > len(together[0].prompt) > 2


def test_a_tokenizer_that_encodes_in_its_own_way_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model())), "policy")
    monkeypatch.setattr(type(tokenizer), "encode", lambda _, text, **__: [7] * len(text))
    encoder = RowEncoder(tokenizer, DatasetConfig(path="x", template="plain"), "data.train")
    together = encoder.encode_texts([encoder.texts({"prompt": text}, "x") for text in ("1+1", "2")])
    assert [one.prompt for one in together] == [[7] * 3, [7]]


class NoBos(Characters):
    """A tokenizer that adds no token, so that a prompt may have none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return super().encode(text, add_special_tokens=False)


def test_progress_is_reported_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderless.data.dataset.BATCH_ROWS", 256)
    path = numbered(tmp_path, 300)
    recipe = recipe_of(path)
    reported: list[tuple[int, int]] = []
    encoder = RowEncoder(Characters(), recipe.data.train, "data.train")
    open_dataset(open_path(path), encoder, recipe, DataCache(), lambda *counts: reported.append(counts))
    assert reported == [(256, 300), (300, 300)]


def test_no_more_rows_are_encoded_than_are_asked_for(tmp_path: Path) -> None:
    path = numbered(tmp_path, 300)
    recipe = recipe_of(path)
    reported: list[tuple[int, int]] = []
    encoder = RowEncoder(Characters(), recipe.data.train, "data.train")
    opened = open_dataset(
        open_path(path), encoder, recipe, DataCache(), lambda *counts: reported.append(counts), max_rows=5
    )
    assert opened.rows.tolist() == [0, 1, 2, 3, 4]
    assert reported == [(5, 5)]


# Order


def test_every_epoch_is_another_permutation() -> None:
    rows = np.array([3, 5, 8, 9, 12, 40], dtype=np.int64)
    order = RowOrder(rows, 7, shuffle=True)
    epochs = [[order.row_at(6 * epoch + place) for place in range(6)] for epoch in range(5)]
    assert all(sorted(epoch) == rows.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    again = RowOrder(rows, 7, shuffle=True)
    assert [again.row_at(place) for place in (29, 0, 13, 6)] == [epochs[4][5], epochs[0][0], epochs[2][1], epochs[1][0]]
    other = RowOrder(rows, 8, shuffle=True)
    assert [other.row_at(place) for place in range(30)] != [row for epoch in epochs for row in epoch]


def test_without_shuffling_rows_come_as_they_are() -> None:
    order = RowOrder(np.array([3, 5, 8], dtype=np.int64), 7, shuffle=False)
    assert [order.row_at(place) for place in range(7)] == [3, 5, 8, 3, 5, 8, 3]


# Steps and shards


def steps_of(dataset: Dataset, recipe: Recipe, num_shards: int, num_steps: int) -> list[list[Batch]]:
    """The shards of each step."""
    shards = [Dataloader([dataset], recipe, shard, num_shards) for shard in range(num_shards)]
    return [[shard.next() for shard in shards] for _ in range(num_steps)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_do_not_depend_on_the_number_of_shards(tmp_path: Path, shuffle: bool) -> None:
    recipe = recipe_of(numbered(tmp_path, 10), {"shuffle": shuffle}, batch={"prompts_per_step": 7})
    dataset = open_recipe(recipe)
    alone = [Batch.concat(shards) for shards in steps_of(dataset, recipe, 1, 5)]
    assert [batch.ids.tolist() for batch in alone] == [list(range(7 * step, 7 * step + 7)) for step in range(5)]
    for num_shards in (2, 3, 4, 7):
        steps = steps_of(dataset, recipe, num_shards, 5)
        for whole, shards in zip(alone, steps, strict=True):
            sizes = [len(shard) for shard in shards]
            assert max(sizes) - min(sizes) <= 1
            together = Batch.concat(shards)
            assert together.ids.tolist() == whole.ids.tolist()  # so every shard's part is contiguous
            assert prompts_of(together) == prompts_of(whole)
            assert together.jagged("prompt_tokens").to_lists() == whole.jagged("prompt_tokens").to_lists()


def test_shards_that_take_turns_share_the_same_steps(tmp_path: Path) -> None:
    recipe = recipe_of(numbered(tmp_path, 10), batch={"prompts_per_step": 7})
    dataset = open_recipe(recipe)
    whole = Dataloader([dataset], recipe, 0, 1)
    shards = [Dataloader([dataset], recipe, shard, 3, in_turns=True) for shard in range(3)]
    assert [shard.num_mine for shard in shards] == [3, 2, 2]
    for step in range(3):
        parts, every = [shard.next() for shard in shards], whole.next()
        assert [part.ids.tolist() for part in parts] == [list(range(7 * step + i, 7 * step + 7, 3)) for i in range(3)]
        found = {i: prompt for part in parts for i, prompt in zip(part.ids.tolist(), prompts_of(part), strict=True)}
        assert [found[i] for i in every.ids.tolist()] == prompts_of(every)


def test_epochs_go_on_in_the_middle_of_a_step(tmp_path: Path) -> None:
    recipe = recipe_of(numbered(tmp_path, 5), batch={"prompts_per_step": 3})
    loader = Dataloader([open_recipe(recipe)], recipe, 0, 1)
    prompts = [prompt for _ in range(5) for prompt in prompts_of(loader.next())]
    for epoch in range(3):
        assert sorted(map(str, prompts[5 * epoch : 5 * epoch + 5])) == [f"{index:03}" for index in range(5)]
    assert loader.numbers() == {"data/position": 15, "data/epoch": 3.0}


def test_a_step_may_be_larger_than_the_data(tmp_path: Path) -> None:
    recipe = recipe_of(numbered(tmp_path, 2), batch={"prompts_per_step": 5})
    batch = Dataloader([open_recipe(recipe)], recipe, 0, 1).next()
    assert batch.ids.tolist() == [0, 1, 2, 3, 4]
    assert sorted(map(str, prompts_of(batch)[:4])) == ["000", "000", "001", "001"]


def test_position_is_the_whole_state(tmp_path: Path) -> None:
    recipe = recipe_of(numbered(tmp_path, 10), batch={"prompts_per_step": 4})
    dataset = open_recipe(recipe)
    loader = Dataloader([dataset], recipe, 0, 1)
    for _ in range(4):
        loader.next()
    resumed = [Dataloader([dataset], recipe, shard, 2) for shard in range(2)]  # on another number of ranks
    for shard in resumed:
        shard.position = loader.position
    for _ in range(3):
        expected, parts = loader.next(), [shard.next() for shard in resumed]
        assert torch.cat([part.ids for part in parts]).tolist() == expected.ids.tolist()
        assert [prompt for part in parts for prompt in prompts_of(part)] == prompts_of(expected)


def first_batch(recipe: Recipe) -> Batch:
    """The first batch; nothing is read ahead when this returns."""
    with closing(Dataloader([open_recipe(recipe)], recipe, 0, 1)) as loader:
        return loader.next()


def test_a_batch_holds_prompts_rows_and_responses(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "r": "c", "more": [1]}, {"prompt": "d", "r": ""}])
    recipe = recipe_of(path, {"response": "r", "shuffle": False}, batch={"prompts_per_step": 2})
    batch = first_batch(recipe)
    assert batch.names() == ["prompt_tokens", "response_mask", "rows", "tokens"]
    assert [text_of(tokens) for tokens in batch.jagged("prompt_tokens").to_lists()] == ["<ab", "<d"]
    assert [text_of(tokens) for tokens in batch.jagged("tokens").to_lists()] == ["c>", ">"]
    assert batch.jagged("response_mask").values.tolist() == [True, True, True]
    assert batch.objects("rows")[0] == {"prompt": "ab", "r": "c", "more": [1]}
    batch = first_batch(recipe_of(path))
    assert batch.names() == ["prompt_tokens", "rows"]


def test_a_row_without_the_column_of_an_advantage_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "task": 1}\n{"prompt": "b", "tsk": 1}\n')
    algorithm = {"advantage": {"type": "srpo", "task": "task"}}
    for settings, key in (
        ({"algorithm": algorithm}, "algorithm"),
        ({"roles": {"planner": {"algorithm": algorithm}}}, "roles.planner.algorithm"),
    ):
        with pytest.raises(RecipeError, match=rf"{key}.advantage.task: is 'task', but .*:2 has no such column .*'tsk'"):
            open_sets(recipe_of(path, **settings))
