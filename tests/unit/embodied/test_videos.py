"""Demonstrations whose images are videos, in the format of LeRobot."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import parquet

from leaderless.config import RecipeError
from leaderless.embodied.data import video_frames
from leaderless.embodied.data.lerobot import Demonstration, Demonstrations, DemonstrationWriter
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.stages.demonstrations import open_demonstrations

av = pytest.importorskip("av", reason="av is not installed")
FPS, SIZE = 30, (16, 24)
NAME = "observation.images.top"
KEY_FRAMES = 4
"""Distance of key frames."""


def episode(number: int, length: int) -> Demonstration:
    rng = np.random.default_rng(number)
    images = rng.integers(0, 256, (length, *SIZE, 3), dtype=np.uint8)
    numbers = np.arange(length, dtype=np.float32)[:, None] + number
    return Demonstration({"top": images}, numbers, numbers, f"push block {number}")


EPISODES = [episode(number, length) for number, length in enumerate((5, 9, 3))]


def write_video(file: Path, frames: Sequence[NDArray[np.uint8]], *, is_open: bool = False) -> None:
    """Write a video with frames that are stored in another order than they are shown.

    It has no losses, except with open groups: there, frames after a key frame are shown before it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    kind, pixels, options = "libx264rgb", "rgb24", {"qp": "0", "g": str(KEY_FRAMES), "bf": "2", "b_strategy": "0"}
    if is_open:
        kind, pixels, options = "libx264", "yuv420p", {"g": "12", "bf": "3", "x264-params": "open-gop=1"}
    with av.open(str(file), "w") as container:
        stream = container.add_stream(kind, rate=FPS, options=options)
        stream.height, stream.width, stream.pix_fmt, stream.time_base = *frames[0].shape[:2], pixels, Fraction(1, FPS)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def recorded(folder: Path, version: str) -> Path:
    """A folder with the episodes, whose images are videos: one for each, or in version 3 one for all."""
    with DemonstrationWriter(folder, steps_per_s=FPS) as recorder:
        for one in EPISODES:
            recorder.add(one)
    files = sorted((folder / "data/chunk-000").glob("*.parquet"))
    tables = [parquet.read_table(file).drop_columns([NAME]) for file in files]
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][NAME]["dtype"] = "video"
    info["codebase_version"] = version
    if version == "v3.0":
        info |= {
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        }
        _join(folder, tables, files)
    else:
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        for number, (file, table) in enumerate(zip(files, tables, strict=True)):
            parquet.write_table(table, file)
            write_video(folder / f"videos/chunk-000/{NAME}/episode_{number:06d}.mp4", EPISODES[number].images["top"])
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def _join(folder: Path, tables: list[pa.Table], files: list[Path]) -> None:
    for file in files:
        file.unlink()
    parquet.write_table(pa.concat_tables(tables), folder / "data/chunk-000/file-000.parquet")
    write_video(
        folder / f"videos/{NAME}/chunk-000/file-000.mp4", [frame for one in EPISODES for frame in one.images["top"]]
    )
    rows, before = [], 0
    for number, one in enumerate(EPISODES):
        length = len(one.actions)
        rows.append(
            {
                "episode_index": number,
                "tasks": [one.instruction],
                "length": length,
                "data/chunk_index": 0,
                "data/file_index": 0,
                f"videos/{NAME}/chunk_index": 0,
                f"videos/{NAME}/file_index": 0,
                f"videos/{NAME}/from_timestamp": before / FPS,
                f"videos/{NAME}/to_timestamp": (before + length) / FPS,
                f"stats/{NAME}/mean": [[[0.5]]] * 3,
            }
        )
        before += length
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    (folder / "meta/episodes.jsonl").unlink()
    parquet.write_table(pa.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_frames_of_videos_belong_to_their_steps(tmp_path: Path, version: str) -> None:
    folder = Demonstrations(recorded(tmp_path / "demos", version))
    assert dict(folder.cameras) == {"top": SIZE}
    for number in (1, 2, 0):
        found, expected = folder.read(number), EPISODES[number]
        np.testing.assert_array_equal(found.images["top"], expected.images["top"])
        np.testing.assert_array_equal(found.actions, expected.actions)
        assert found.instruction == expected.instruction


def test_an_episode_is_decoded_once_from_the_key_frame_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen, decoded = Demonstrations(recorded(tmp_path / "demos", "v3.0")), [], video_frames._decoded
    monkeypatch.setattr(
        video_frames, "_decoded", lambda *given: (seen.append(one[0]) or one for one in decoded(*given))
    )
    folder.read(2)
    assert len(seen) == len(set(seen))
    assert seen[-1] == pytest.approx(16 / FPS)
    assert len(seen) <= 3 + KEY_FRAMES


@pytest.mark.parametrize("is_open", [False, True])
def test_each_frame_of_a_video_is_found(tmp_path: Path, is_open: bool) -> None:
    frames = [np.full((64, 64, 3), 20 + 4 * number, np.uint8) for number in range(48)]
    write_video(tmp_path / "one.mp4", frames, is_open=is_open)
    for number, frame in enumerate(frames):
        late = number / FPS + 0.9 * video_frames.TOLERANCE_S
        found = video_frames.read_frames(tmp_path / "one.mp4", [late], (64, 64))[0]
        assert abs(found.astype(int) - frame).max() <= is_open, f"frame {number}"


def test_videos_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = recorded(tmp_path / "demos", "v2.1") / f"videos/chunk-000/{NAME}/episode_000000.mp4"
    frames = EPISODES[0].images["top"]

    def reason() -> str:
        with pytest.raises(ValueError, match=r"demonstration 0 of .* cannot be read") as caught:
            Demonstrations(tmp_path / "demos").read(0)
        return str(caught.value)

    write_video(file, frames[:-1])
    assert "no frame at 0.1333 s, the time of step 4: one is at 0.1000 s" in reason()
    file.write_bytes(b"torn")
    assert "cannot be decoded" in reason()
    file.unlink()
    assert "episode_000000.mp4 is missing: copy the folder with its videos" in reason()
    write_video(file, frames)
    about = tmp_path / "demos/meta/info.json"
    info = json.loads(about.read_text())
    info["features"][NAME]["shape"] = [24, 16, 3]
    about.write_text(json.dumps(info))
    assert "frames of 16 x 24 pixels (height x width), but meta/info.json says 24 x 16" in reason()
    info["features"][NAME] |= {"shape": [3, 16, 24], "names": ["channels", "height", "width"]}
    about.write_text(json.dumps(info))
    np.testing.assert_array_equal(Demonstrations(tmp_path / "demos").read(0).images["top"], frames)


@pytest.mark.parametrize("shift", [-0.5, 0.01, 0.5])
def test_times_between_frames_are_refused(tmp_path: Path, shift: float) -> None:
    write_video(tmp_path / "one.mp4", EPISODES[1].images["top"])
    with pytest.raises(ValueError, match="the time of step 0"):
        video_frames.read_frames(tmp_path / "one.mp4", [(step + 3 + shift) / FPS for step in range(3)], SIZE)


def test_without_its_package_a_folder_with_videos_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path / "demos", "v2.1")
    monkeypatch.setitem(sys.modules, "av", None)
    spaces = Spaces({"top": SIZE}, 1, Continuous((-1.0,), (1.0,)), 4)
    with pytest.raises(RecipeError, match=r"no package 'av', which decodes videos: .* '\.\[lerobot\]'"):
        open_demonstrations(str(folder), spaces)


def test_depth_is_refused(tmp_path: Path) -> None:
    about = recorded(tmp_path / "demos", "v2.1") / "meta/info.json"
    info = json.loads(about.read_text())
    for change in ({"shape": [*SIZE, 1]}, {"info": {"video.is_depth_map": True}}):
        changed = {**info, "features": {**info["features"], NAME: info["features"][NAME] | change}}
        about.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"holds observation\.images\.top, and only images of three colors"):
            Demonstrations(tmp_path / "demos")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_folder_with_videos_is_not_continued(tmp_path: Path, version: str) -> None:
    folder = recorded(tmp_path / "demos", version)
    before = (folder / "meta/info.json").read_bytes()
    with pytest.raises(ValueError, match="is not continued: name another folder"):
        DemonstrationWriter(folder)
    assert (folder / "meta/info.json").read_bytes() == before
