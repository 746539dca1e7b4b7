"""Folders of demonstrations in the format of LeRobot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from leaderless.config import RecipeError
from leaderless.embodied.data.lerobot import Demonstration, Demonstrations, DemonstrationWriter
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.embodied.stages.demonstrations import open_demonstrations


def demonstration(number: int, *, length: int = 4, size: int = 8) -> Demonstration:
    rng = np.random.default_rng(number)
    return Demonstration(
        {"top": rng.integers(0, 256, (length, size, size, 3), dtype=np.uint8)},
        rng.normal(size=(length, 3)).astype(np.float32),
        rng.normal(size=(length, 2)).astype(np.float32),
        f"reach block {number % 2}",
    )


def assert_same(one: Demonstration, other: Demonstration) -> None:
    assert one.instruction == other.instruction
    assert one.images.keys() == other.images.keys()
    for name, image in one.images.items():
        np.testing.assert_array_equal(image, other.images[name])
    np.testing.assert_array_equal(one.states, other.states)
    np.testing.assert_array_equal(one.actions, other.actions)


def test_what_is_recorded_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    with DemonstrationWriter(tmp_path / "demos", robot="table") as recorder:
        for number in range(3):
            recorder.add(demonstration(number, length=2 + number))
    with DemonstrationWriter(tmp_path / "demos") as recorder:
        recorder.add(demonstration(3))
    folder = Demonstrations(tmp_path / "demos")
    assert len(folder) == 4
    assert dict(folder.cameras) == {"top": (8, 8)}
    for number in range(3):
        assert_same(folder.read(number), demonstration(number, length=2 + number))
    assert_same(folder.read(3), demonstration(3))
    info = json.loads((tmp_path / "demos/meta/info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == ("v2.1", 4, 2 + 3 + 4 + 4)
    assert info["total_tasks"] == 2


def test_an_episode_that_was_not_finished_is_as_if_it_had_never_begun(tmp_path: Path) -> None:
    with DemonstrationWriter(tmp_path) as recorder:
        recorder.add(demonstration(0))
        (tmp_path / "data/chunk-000/episode_000001.part").write_bytes(b"torn")  # killed while it was written
    folder = Demonstrations(tmp_path)
    assert len(folder) == 1
    assert_same(folder.read(0), demonstration(0))


def test_files_of_many_episodes_are_read(tmp_path: Path) -> None:
    first, second = demonstration(0), demonstration(1, length=2)
    with DemonstrationWriter(tmp_path / "two") as recorder:
        recorder.add(first)
        recorder.add(second)
    tables = [parquet.read_table(file) for file in sorted((tmp_path / "two/data/chunk-000").glob("*.parquet"))]
    for name in ("data/chunk-000", "meta/episodes/chunk-000"):
        (tmp_path / "three" / name).mkdir(parents=True)
    parquet.write_table(pa.concat_tables(tables), tmp_path / "three/data/chunk-000/file-000.parquet")
    rows = [
        {"episode_index": n, "tasks": [one.instruction], "length": len(one.actions)}
        | {"data/chunk_index": 0, "data/file_index": 0}
        for n, one in enumerate((first, second))
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "three/meta/episodes/chunk-000/file-000.parquet")
    info = json.loads((tmp_path / "two/meta/info.json").read_text())
    info |= {
        "codebase_version": "v3.0",
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }
    (tmp_path / "three/meta/info.json").write_text(json.dumps(info))
    folder = Demonstrations(tmp_path / "three")
    assert_same(folder.read(0), first)
    assert_same(folder.read(1), second)


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"info\.json is missing"):
        Demonstrations(tmp_path)
    with DemonstrationWriter(tmp_path / "demos") as recorder:
        recorder.add(demonstration(0))
        with pytest.raises(ValueError, match="must be alike"):
            recorder.add(demonstration(1, size=4))
    with pytest.raises(ValueError, match="none with the number 7"):
        Demonstrations(tmp_path / "demos").read(7)
    (tmp_path / "demos/data/chunk-000/episode_000000.parquet").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"demonstration 0 .* cannot be read"):
        Demonstrations(tmp_path / "demos").read(0)
    about = tmp_path / "demos/meta/info.json"
    info = json.loads(about.read_text())
    about.write_text(json.dumps(info | {"codebase_version": "v1.6"}))
    with pytest.raises(ValueError, match=r"version v1\.6"):
        Demonstrations(tmp_path / "demos")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        DemonstrationWriter(tmp_path / "other")
    with pytest.raises(ValueError, match="as many states"):
        Demonstration({}, np.zeros((2, 1), np.float32), np.zeros((3, 1), np.float32))


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        (Spaces({"top": (8, 8)}, 3, Continuous((-1.0,) * 2, (1.0,) * 2), 4), ""),
        (Spaces({"top": (8, 8)}, 4, Continuous((-1.0,) * 2, (1.0,) * 2), 4), "but the environment 4 and 2"),
        (Spaces({"top": (8, 8)}, 3, Continuous((-1.0,) * 7, (1.0,) * 7), 4), "but the environment 3 and 7"),
        (Spaces({"top": (8, 8)}, 3, Discrete(4), 4), "has 3 numbers in a state and 2 in an action"),
        (Spaces({"top": (8, 9)}, 3, Continuous((-1.0,) * 2, (1.0,) * 2), 4), "has the cameras"),
    ],
)
def test_demonstrations_of_another_body_are_refused(tmp_path: Path, spaces: Spaces, message: str) -> None:
    with DemonstrationWriter(tmp_path / "demos") as recorder:
        recorder.add(demonstration(0))
    if not message:
        assert len(open_demonstrations(str(tmp_path / "demos"), spaces)) == 1
        return
    with pytest.raises(RecipeError, match=message) as caught:
        open_demonstrations(str(tmp_path / "demos"), spaces)
    assert "body.demonstrations" in str(caught.value)


def test_choices_are_demonstrated(tmp_path: Path) -> None:
    with DemonstrationWriter(tmp_path / "demos") as recorder:
        recorder.add(Demonstration({}, np.zeros((3, 2), np.float32), np.array([0, 1, 3])))
    assert len(open_demonstrations(str(tmp_path / "demos"), Spaces({}, 2, Discrete(4), 4))) == 1


def test_demonstrations_with_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with DemonstrationWriter(tmp_path / "demos") as recorder:
        recorder.add(demonstration(0))
    file = tmp_path / "demos/data/chunk-000/episode_000000.parquet"
    table = parquet.read_table(file)
    place = table.column_names.index("observation.state")
    states = table.column("observation.state").to_pylist()
    states[2][1] = float("nan")
    parquet.write_table(table.set_column(place, "observation.state", pa.array(states, pa.list_(pa.float32()))), file)
    with pytest.raises(ValueError, match=r"demonstration 0 of .* its states at step 2 are \[.*nan.*\], but must be"):
        Demonstrations(tmp_path / "demos").read(0)
    states, rewards = np.zeros((2, 1), np.float32), np.array([0.0, np.inf], np.float32)
    with pytest.raises(ValueError, match=r"its rewards at step 1 are inf"):
        Demonstration({}, states, np.zeros((2, 1), np.float32), rewards=rewards)
