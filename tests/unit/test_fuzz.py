"""Whatever a file contains, it is read or refused with a message for people; no error comes from deep inside."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tests.rows import open_recipe, recipe_of
from tests.unit.recipes import RECIPE

from leaderless.config import RecipeError, load_recipe
from leaderless.config.data import TrainingSetConfig
from leaderless.data.sources.open_source import open_stream
from leaderless.data.sources.row_sources import Row
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.worker.checkpoint.shards import DamagedCheckpointError, FileEntry, Manifest

ROWS: list[Row] = [{"prompt": f"{number} + é = ", "answer": str(number), "level": number} for number in range(40)]
ODD = st.sampled_from(
    """
    ''|null|~|-1|1e999|.nan|true|[]|{}|[[[1]]]|{a: {b: c}}|'x'|!!python/name:os.system|&a [*a]|*nowhere|\t|\0|\ud7ff
    1_000|0x10|2026-01-01|- 1|? 1|>|%TAG|a: b: c|=|<<|@|"|{|[1, 2|99999999999999999999|-0.0|../../x|/etc/passwd
    """.strip()
    .replace("\n    ", "|")
    .split("|")
)
damages = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "zero", "double"]), st.binary(max_size=6)),
    min_size=1,
    max_size=3,
)
once_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def damaged(content: bytes, damage: list[tuple[float, str, bytes]]) -> bytes:
    """A file after some damage, each at its place."""
    for place, how, extra in damage:
        at = int(place * max(0, len(content) - 1))
        match how:
            case "flip":
                content = content[:at] + bytes(b ^ (1 << len(extra)) for b in content[at : at + 1]) + content[at + 1 :]
            case "cut":
                content = content[:at]
            case "insert":
                content = content[:at] + extra + content[at:]
            case "zero":
                content = content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :]
            case "double":
                content = content[:at] + content[at : at + 50] + content[at:]
    return content


def places_of(tree: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value in settings."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places_of(value, (*path, key))


FULL = RECIPE + "batch: {prompts_per_step: 4}\nlayout: {policy: {ranks: 0-1}}\nalgorithm: {kl: {coefficient: 0.1}}\n"
PLACES = [path for path in places_of(yaml.safe_load(FULL)) if path]


def read_and_plan(path: Path) -> str:
    """The result of a recipe: a plan's hash, or why it is refused."""
    try:
        recipe = load_recipe(path).recipe
        return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(2)).hash()
    except RecipeError as error:
        return "" if any(not problem.message.strip() for problem in error.problems) else str(error)


@given(place=st.sampled_from(PLACES), odd=ODD)
@example(place=("steps",), odd="!!python/object/apply:os.system [touch pwned]")
@once_a_folder
def test_any_value_in_a_recipe_is_taken_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[str | int, ...], odd: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(FULL)
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = "<here>"
    text = yaml.safe_dump(tree, sort_keys=False).replace("<here>", odd)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    assert read_and_plan(tmp_path / "recipe.yaml")
    assert not (tmp_path / "pwned").exists()


@given(damage=damages)
@once_a_folder
def test_any_damage_to_a_recipe_is_taken_or_refused(tmp_path: Path, damage: list[tuple[float, str, bytes]]) -> None:
    (tmp_path / "recipe.yaml").write_bytes(damaged(FULL.encode(), damage))
    assert read_and_plan(tmp_path / "recipe.yaml")


def read_rows(path: Path) -> list[Row] | str:
    """The rows of a training set, or why it is refused."""
    try:
        if path.suffix == ".gz":
            config = recipe_of(path, {"streaming": True}).data.train
            assert isinstance(config, TrainingSetConfig)
            return [row for _, row in open_stream(config, "data.train").rows()]
        source = open_recipe(recipe_of(path, {"max_prompt_tokens": 100})).source
        return [source.row(index) for index in range(len(source))]
    except RecipeError as error:
        return str(error)


def is_refused(rows: list[Row] | str, path: Path) -> bool:
    """Whether it was refused with the name of the file."""
    return isinstance(rows, str) and path.name in rows


def naive_rows(content: bytes) -> list[object] | None:
    """The content of JSON lines, as the standard library reads them."""
    try:
        return [json.loads(line.decode()) for line in content.split(b"\n") if line.strip()]
    except ValueError:
        return None


JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@given(damage=damages)
@once_a_folder
def test_damaged_json_lines_are_read_as_they_stand_or_refused(
    tmp_path: Path, damage: list[tuple[float, str, bytes]]
) -> None:
    content = damaged(JSON_LINES, damage)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    rows = read_rows(path)
    assert is_refused(rows, path) or rows == naive_rows(content)


@given(damage=damages)
@once_a_folder
def test_damaged_archives_are_read_as_they_stand_or_refused(
    tmp_path: Path, damage: list[tuple[float, str, bytes]]
) -> None:
    content = damaged(gzip.compress(JSON_LINES, mtime=0), damage)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    rows = read_rows(path)
    assert is_refused(rows, path) or rows == (ROWS if content else []), "an archive has checksums"


@given(damage=damages)
@example(damage=[(0.5613979037843385, "flip", b"")])  # pages that claim to have no rows
@once_a_folder
def test_damaged_pages_of_parquet_are_never_taken_for_other_rows(
    tmp_path: Path, damage: list[tuple[float, str, bytes]]
) -> None:
    path = tmp_path / "rows.parquet"
    # Damaged compressed data could hardly be read any more; checksums detect the rest.
    options = {"compression": "none", "use_dictionary": False}
    parquet.write_table(pa.Table.from_pylist(ROWS), path, write_page_checksum=True, row_group_size=16, **options)
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little") + 8
    whole = path.read_bytes()
    pages = damaged(whole[4:-footer], [item for item in damage if item[1] in {"flip", "zero"}])
    path.write_bytes(whole[:4] + pages + whole[-footer:])
    rows = read_rows(path)
    assert is_refused(rows, path) or rows == ROWS


@given(damage=damages)
@once_a_folder
def test_parquet_that_is_damaged_anywhere_is_read_or_refused(
    tmp_path: Path, damage: list[tuple[float, str, bytes]]
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path, write_page_checksum=True, row_group_size=16)
    path.write_bytes(damaged(path.read_bytes(), damage))
    rows = read_rows(path)
    assert isinstance(rows, list) or is_refused(rows, path)


def write_checkpoint(folder: Path) -> None:
    (folder / "policy").mkdir(parents=True, exist_ok=True)
    contents = {"state.json": b'{"step": 3}', "policy/shard-1.safetensors": bytes(range(256)), "empty": b""}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {name: FileEntry.of(folder / name) for name in contents}
    Manifest(3, 2, {"evaluation/accuracy": 0.5}, files).write(folder)


def read_checkpoint(folder: Path) -> Manifest | None:
    """The content of a checkpoint, if it is complete."""
    try:
        manifest = Manifest.read(folder)
        manifest.check(folder, manifest.files)
    except DamagedCheckpointError as error:
        return None if str(folder) in str(error) else pytest.fail(str(error))
    return manifest


@given(victim=st.sampled_from(["state.json", "policy/shard-1.safetensors", "empty", "manifest.json"]), damage=damages)
@once_a_folder
def test_a_checkpoint_that_is_not_what_was_written_is_never_taken(
    tmp_path: Path, victim: str, damage: list[tuple[float, str, bytes]]
) -> None:
    write_checkpoint(tmp_path)
    before, whole = (tmp_path / victim).read_bytes(), Manifest.read(tmp_path)
    (tmp_path / victim).write_bytes(damaged(before, damage))
    manifest = read_checkpoint(tmp_path)
    is_same = victim == "manifest.json" or (tmp_path / victim).read_bytes() == before
    assert manifest == (whole if is_same else None) or (victim == "manifest.json" and manifest is None)


odd_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("../../etc/passwd"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
manifests = odd_json | st.fixed_dictionaries(
    {
        "step": odd_json,
        "world_size": odd_json,
        "metrics": odd_json,
        "files": odd_json
        | st.dictionaries(st.sampled_from(["state.json", "/etc/passwd", "../x", "a\x00b", "."]), odd_json, max_size=2),
    }
)


@given(body=manifests)
@example(body={"step": 1, "world_size": 1, "metrics": {}, "files": {"../x": {"num_bytes": 0, "sha256": ""}}})
@once_a_folder
def test_a_manifest_that_somebody_made_up_is_refused(tmp_path: Path, body: object) -> None:
    text = json.dumps(body)
    envelope = {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (tmp_path / "manifest.json").write_text(json.dumps(envelope))
    manifest = read_checkpoint(tmp_path)
    assert manifest is None or not manifest.files, "none of the files is there"


def test_a_manifest_names_no_file_outside_its_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-000003")
    (tmp_path / "outside").write_text("x")
    for name in ("../outside", str(tmp_path / "outside"), "policy/../../outside"):
        Manifest(3, 1, {}, {name: FileEntry.of(tmp_path / "outside")}).write(tmp_path / "step-000003")
        assert read_checkpoint(tmp_path / "step-000003") is None
