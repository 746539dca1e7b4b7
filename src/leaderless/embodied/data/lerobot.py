"""Demonstrations of bodies: folders in the format of LeRobot, read and written. Imports no torch.

Version 2 has a Parquet file for each episode, version 3 files of many episodes. Images are columns of these files, or
frames of videos, which are divided likewise.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from leaderless.base.values import Json
from leaderless.embodied.data.video_frames import check_decoder, read_frames

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = "v2.1"
"""Version of the format that is written."""
IMAGES, STATE, ACTION = "observation.images.", "observation.state", "action"
REWARD, DONE = "next.reward", "next.done"
TIME = "timestamp"
"""Seconds from the beginning of the episode."""
EPISODES_PER_CHUNK = 1000
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
KEPT_BYTES = 1 << 28
"""Bytes of decoded episodes kept in memory; once they are used up, other episodes are decoded each time."""
EPISODES_FILE = Path("meta", "episodes.jsonl")
"""File of version 2 with a line for each episode, which a recipe names as its dataset."""
EPISODES_FOLDER = Path("meta", "episodes")
"""Folder of version 3 with a row for each episode in its Parquet files."""


@dataclass(frozen=True)
class Demonstration:
    """An episode of T steps.

    Attributes:
        images: [T, height, width, 3] uint8 of each camera, before each step.
        states: [T, state_size] float32, before each step.
        actions: [T, dim] float32, or [T] int64 choices.
        instruction: Instruction.
        rewards: [T] float32, reward of each step; None if they are not known.
        is_terminated: Whether the task ended with the last step; otherwise the episode was cut.
    """

    images: Mapping[str, NDArray[np.uint8]]
    states: NDArray[np.float32]
    actions: NDArray[np.generic]
    instruction: str = ""
    rewards: NDArray[np.float32] | None = None
    is_terminated: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.states), len(self.actions), *map(len, self.images.values())}
        if len(lengths) > 1 or not len(self.actions):
            raise ValueError(f"a demonstration needs as many states, images and actions, at least one, not {lengths}")
        for name, values in (("states", self.states), ("rewards", self.rewards)):
            if values is not None and not np.isfinite(values).all():
                step, *_ = np.argwhere(~np.isfinite(values))[0].tolist()
                raise ValueError(
                    f"its {name} at step {step} are {values[step].tolist()}, but must be finite: record it again, or "
                    "leave it out"
                )


class Demonstrations:
    """The episodes of a folder.

    Attributes:
        cameras: Height and width of each camera.
        state_size: Numbers of the state.
        action_size: Numbers of an action; 1 for choices.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder.

        Raises:
            ValueError: It does not hold demonstrations, or its version, what its cameras show, or their videos are not
                supported here.
        """
        self.folder, about = folder, folder / "meta" / "info.json"
        if not about.is_file():
            raise ValueError(f"{folder} holds no demonstrations: {about} is missing")
        try:
            self._info = json.loads(about.read_text(encoding="utf-8"))
            self._features = dict(self._info["features"])
            version = str(self._info["codebase_version"])
            strange = sorted(
                name for name, one in self._features.items() if name.startswith(IMAGES) and not _has_colors(one)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{about} does not describe demonstrations: {error!r}") from error
        self._is_joint = version.startswith("v3.")
        if not (version.startswith("v2.") or self._is_joint):
            raise ValueError(f"{folder} has version {version} of the format; v2 and v3 are read")
        if strange:
            raise ValueError(
                f"{folder} holds {', '.join(strange)}, and only images of three colors are read, not depth: leave them "
                f"out of the features in {about}"
            )
        if any(one.get("dtype") == "video" for one in self._features.values()):
            check_decoder()
        shapes = {name: _image_shape(one) for name, one in self._features.items() if name.startswith(IMAGES)}
        self.cameras = {name.removeprefix(IMAGES): (shape[0], shape[1]) for name, shape in shapes.items()}
        self.state_size, self.action_size = (
            int(np.prod(self._features[name]["shape"])) if name in self._features else 0 for name in (STATE, ACTION)
        )
        self._table = lru_cache(maxsize=8)(self._read)
        self._kept: dict[int, Demonstration] = {}
        self._room = KEPT_BYTES

    @property
    def list_path(self) -> str:
        """Path, or pattern of paths, that a recipe names as its dataset."""
        return str(self.folder / EPISODES_FOLDER / "*" / "*.parquet" if self._is_joint else self.folder / EPISODES_FILE)

    @cached_property
    def _episodes(self) -> list[dict[str, Json]]:
        if self._is_joint:
            from pyarrow import parquet

            rows: list[dict[str, Json]] = []
            for path in sorted((self.folder / EPISODES_FOLDER).glob("*/*.parquet")):
                file = parquet.ParquetFile(path)
                names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]  # most of a row
                rows += file.read(names).to_pylist()
            return rows
        lines = (self.folder / EPISODES_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._episodes)

    def _read(self, file: Path) -> pa.Table:
        from pyarrow import parquet

        return parquet.read_table(file)

    def read(self, number: int) -> Demonstration:
        """One episode.

        Raises:
            ValueError: No episode has this number, or it is damaged.
        """
        if number in self._kept:
            return self._kept[number]
        if not 0 <= number < len(self):
            raise ValueError(f"{self.folder} has {len(self)} demonstrations, and none with the number {number}")
        episode = self._episodes[number]
        try:
            table = self._rows(number, episode)
            columns = {name: table.column(name) for name in table.column_names}
            images = {camera: self._images(camera, number, columns) for camera in self.cameras}
            actions = np.array(columns[ACTION].to_pylist())
            if actions.dtype.kind == "f":
                actions = actions.astype(np.float32)
            states = np.zeros((len(actions), 0), dtype=np.float32)
            if STATE in columns:
                states = np.array(columns[STATE].to_pylist(), dtype=np.float32).reshape(len(actions), -1)
            tasks = episode.get("tasks")
            instruction = str(tasks[0]) if isinstance(tasks, list) and tasks else ""
            rewards = np.array(columns[REWARD].to_pylist(), np.float32).reshape(-1) if REWARD in columns else None
            is_terminated = bool(columns[DONE].to_pylist()[-1]) if DONE in columns else True
            found = Demonstration(images, states, actions, instruction, rewards, is_terminated)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"demonstration {number} of {self.folder} cannot be read: {error}") from error
        size = sum(image.nbytes for image in images.values()) + states.nbytes + actions.nbytes
        if size <= self._room:
            self._room -= size
            self._kept[number] = found
        return found

    def _images(self, camera: str, number: int, columns: Mapping[str, pa.ChunkedArray]) -> NDArray[np.uint8]:
        """Frames of a camera in an episode, [T, height, width, 3]."""
        name = f"{IMAGES}{camera}"
        if self._features[name]["dtype"] != "video":
            return np.stack([_decoded(cell.as_py()) for cell in columns[name]])
        place: dict[str, int] = {"episode_chunk": number // self._chunk_size, "episode_index": number}
        begin = 0.0
        if self._is_joint:
            episode = self._episodes[number]
            place = {f"{part}_index": int(str(episode[f"videos/{name}/{part}_index"])) for part in ("chunk", "file")}
            begin = float(str(episode[f"videos/{name}/from_timestamp"]))
        file = self.folder / str(self._info["video_path"]).format(video_key=name, **place)
        return read_frames(file, [begin + time for time in columns[TIME].to_pylist()], self.cameras[camera])

    @property
    def _chunk_size(self) -> int:
        return int(self._info.get("chunks_size", EPISODES_PER_CHUNK))

    def _rows(self, number: int, episode: Mapping[str, Json]) -> pa.Table:
        if not self._is_joint:
            chunk = number // self._chunk_size
            place = str(self._info["data_path"]).format(episode_chunk=chunk, episode_index=number)
            return self._table(self.folder / place)
        chunk, file = (int(str(episode[f"data/{name}_index"])) for name in ("chunk", "file"))
        table = self._table(self.folder / str(self._info["data_path"]).format(chunk_index=chunk, file_index=file))
        import pyarrow.compute as pc

        return table.filter(pc.equal(table.column("episode_index"), number))


class DemonstrationWriter:
    """Writes demonstrations into a new folder, episode by episode; the folder is readable at any time."""

    def __init__(self, folder: Path, *, steps_per_s: float = 10.0, robot: str = "") -> None:
        """Begin a folder, or continue one.

        Raises:
            ValueError: The folder holds something else, or demonstrations that are not continued.
        """
        self.folder, self._steps_per_s, self._robot = folder, steps_per_s, robot
        self._tasks: dict[str, int] = {}
        self._lengths: list[int] = []
        self._features: dict[str, Json] = {}
        if (folder / "meta" / "info.json").exists():
            earlier = Demonstrations(folder)
            kinds = {str(one.get("dtype")) for one in earlier._features.values()}  # noqa: SLF001
            if earlier._is_joint or "video" in kinds:  # noqa: SLF001
                raise ValueError(
                    f"{folder} was recorded elsewhere, with videos or with several episodes in a file, and is not "
                    "continued: name another folder"
                )
            self._features = dict(earlier._features)  # noqa: SLF001
            for episode in earlier._episodes:  # noqa: SLF001
                self._lengths.append(int(str(episode["length"])))
                for task in episode["tasks"] if isinstance(episode["tasks"], list) else ():
                    self._tasks.setdefault(str(task), len(self._tasks))
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty, and holds no demonstrations: name another folder")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lengths:
            self._describe()

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._lengths)

    def add(self, episode: Demonstration) -> None:
        """Write an episode.

        Raises:
            ValueError: It has other cameras, or other numbers in states or actions, than earlier ones.
        """
        import pyarrow as pa
        from pyarrow import parquet

        features = _features_of(episode)
        if self._features and features != self._features:
            raise ValueError(f"demonstrations of a folder must be alike: {features} is not {self._features}")
        self._features = features
        number, length = len(self._lengths), len(episode.actions)
        task = self._tasks.setdefault(episode.instruction, len(self._tasks))
        first = sum(self._lengths)
        columns: dict[str, object] = {
            f"{IMAGES}{camera}": pa.array(
                [{"bytes": _encoded(image), "path": None} for image in images],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            )
            for camera, images in episode.images.items()
        }
        columns |= {
            STATE: pa.array(episode.states.tolist(), pa.list_(pa.float32())),
            ACTION: pa.array(episode.actions.tolist()),
            TIME: pa.array([step / self._steps_per_s for step in range(length)], pa.float32()),
            "frame_index": pa.array(range(length), pa.int64()),
            "episode_index": pa.array([number] * length, pa.int64()),
            "index": pa.array(range(first, first + length), pa.int64()),
            "task_index": pa.array([task] * length, pa.int64()),
        }
        if episode.rewards is not None:
            done = [episode.is_terminated and step == length - 1 for step in range(length)]
            columns |= {REWARD: pa.array(episode.rewards.tolist(), pa.float32()), DONE: pa.array(done, pa.bool_())}
        file = self.folder / DATA_PATH.format(episode_chunk=number // EPISODES_PER_CHUNK, episode_index=number)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        parquet.write_table(pa.table(columns), part)
        part.replace(file)
        self._lengths.append(length)
        self._note(number, length, episode.instruction)

    def _note(self, number: int, length: int, instruction: str) -> None:
        """Add the line of an episode once its file is complete."""
        (self.folder / "meta").mkdir(exist_ok=True)
        line: dict[str, Json] = {"episode_index": number, "tasks": [instruction], "length": length}
        with (self.folder / EPISODES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if number == 0:
            self._describe()

    def _describe(self) -> None:
        meta, total = self.folder / "meta", sum(self._lengths)
        lines = (json.dumps({"task_index": n, "task": task}, ensure_ascii=False) for task, n in self._tasks.items())
        (meta / "tasks.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        info: dict[str, Json] = {
            "codebase_version": VERSION,
            "robot_type": self._robot,
            "total_episodes": len(self._lengths),
            "total_frames": total,
            "total_tasks": len(self._tasks),
            "total_videos": 0,
            "total_chunks": -(-len(self._lengths) // EPISODES_PER_CHUNK),
            "chunks_size": EPISODES_PER_CHUNK,
            "fps": self._steps_per_s,
            "splits": {"train": f"0:{len(self._lengths)}"},
            "data_path": DATA_PATH,
            "video_path": None,
            "features": self._features,
        }
        part = meta / "info.json.part"
        part.write_text(json.dumps(info, indent=2), encoding="utf-8")
        part.replace(meta / "info.json")


def _features_of(episode: Demonstration) -> dict[str, Json]:
    def numbers(values: NDArray[np.generic]) -> Json:
        return {"dtype": str(values.dtype), "shape": [*values.shape[1:]] or [1], "names": None}

    colors: Json = ["height", "width", "channels"]
    images: dict[str, Json] = {
        f"{IMAGES}{camera}": {"dtype": "image", "shape": [*values.shape[1:]], "names": colors}
        for camera, values in episode.images.items()
    }
    ends = {} if episode.rewards is None else {REWARD: "float32", DONE: "bool"}
    kinds = ends | {TIME: "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    single: dict[str, Json] = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in kinds.items()}
    return {**images, STATE: numbers(episode.states), ACTION: numbers(episode.actions), **single}


def _image_shape(feature: Mapping[str, Json]) -> tuple[int, ...]:
    """Height, width and colors of images, which come in another order where the names say so."""
    shape, names = cast("list[int]", feature["shape"]), feature.get("names")
    if isinstance(names, list) and names and str(names[0]).startswith("channel"):
        shape = [*shape[1:], shape[0]]
    return tuple(map(int, shape))


def _has_colors(feature: Mapping[str, Json]) -> bool:
    notes = [note for name in ("video_info", "info") if isinstance(note := feature.get(name), Mapping)]
    is_depth = any(note.get(name) for note in notes for name in ("is_depth_map", "video.is_depth_map"))
    return _image_shape(feature)[2:] == (3,) and not is_depth


def _encoded(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _decoded(cell: object) -> NDArray[np.uint8]:
    data = cell.get("bytes") if isinstance(cell, Mapping) else None
    if not isinstance(data, bytes):
        raise ValueError("an image has no bytes in the file, only a path: write images into the Parquet files")
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
