"""Transitions of bodies on disk: appended, drawn at random, and not lost with the process that wrote them."""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.embodied.simulators.protocol import Continuous, Observations, Spaces, Steps


@dataclass(frozen=True)
class Transitions:
    """Transitions of n decisions, each for a chunk of steps.

    Attributes:
        images: Pictures before, uint8 [n, height, width, 3] of each camera.
        state: State before, float32 [n, state_size].
        next_images: Pictures after; where an episode has ended, its last ones.
        next_state: State after.
        actions: Actions that were taken, float32 [n, chunk, dim]: the person's where one intervened; 0 for steps
            that were not executed.
        rewards: Rewards, float32 [n, chunk].
        num_steps: Number of steps that were executed, int64 [n].
        terminated: Whether the task has come to its end, bool [n]. Only then is the value after it 0.
        truncated: Whether the episode was cut, bool [n].
        intervened: Steps in which a person acted, bool [n, chunk].
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    next_images: Mapping[str, NDArray[np.uint8]]
    next_state: NDArray[np.float32]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]
    num_steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    intervened: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of transitions."""
        return len(self.num_steps)

    def take(self, rows: NDArray[np.generic]) -> Transitions:
        """Some of the transitions, by a mask, bool [n], or by numbers of rows."""

        def of(value: object) -> object:
            if isinstance(value, Mapping):
                return {name: array[rows] for name, array in value.items()}
            return cast("NDArray[np.generic]", value)[rows]

        return Transitions(**{one.name: of(getattr(self, one.name)) for one in fields(self)})  # type: ignore[arg-type]

    def demonstrations(self) -> Transitions:
        """Those in which a person acted."""
        return self.take(np.asarray(self.intervened.any(axis=1)))


def executed(
    wanted: NDArray[np.generic], num_steps: int, info: Mapping[str, Json]
) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
    """The actions of a decision, [chunk, ...], that were executed, 0 after them, and in which steps a person acted.

    `actions` and `intervened` of the further facts, if there are any, say what was done in place of what was wanted.
    """
    taken, intervened = np.array(wanted), np.zeros(len(wanted), np.bool_)
    if info.get("actions"):
        taken[:num_steps] = np.array(info["actions"], taken.dtype)
        intervened[:num_steps] = np.array(info["intervened"], np.bool_)
    taken[num_steps:] = 0
    return taken, intervened


def transitions_of(before: Observations, actions: NDArray[np.float32], steps: Steps) -> Transitions:
    """The transitions of one `VectorEnvironment.step`; failed episodes are left out.

    Args:
        before: Observations before the step.
        actions: Actions of the policy, [n, chunk, dim].
        steps: Results from the environment. If its infos have `actions` and `intervened`, as in
            `RobotEnvironment`, these are the executed actions, which may differ from the policy's.
    """
    infos: Sequence[Mapping[str, Json]] = steps.infos or ({},) * len(actions)
    rows = zip(np.array(actions, np.float32), steps.num_steps.tolist(), infos, strict=True)
    taken, intervened = (np.stack(parts) for parts in zip(*(executed(*row) for row in rows), strict=True))
    found = Transitions(
        images=before.images,
        state=before.state,
        next_images=steps.observations.images,
        next_state=steps.observations.state,
        actions=taken,
        rewards=steps.rewards,
        num_steps=steps.num_steps,
        terminated=steps.terminated,
        truncated=steps.truncated,
        intervened=intervened,
    )
    return found.take(np.array(["failed" not in info for info in infos]))


class TransitionSink(Protocol):
    """Receiver of transitions, such as a replay buffer."""

    def append(self, transitions: Transitions) -> None:
        """Keep transitions."""


class TransitionRecorder:
    """Puts all transitions into a memory, and those in which a person acted also into the one of demonstrations."""

    def __init__(self, online: TransitionSink, demonstrations: TransitionSink) -> None:
        self._online, self._demonstrations = online, demonstrations

    def record(self, before: Observations, actions: NDArray[np.float32], steps: Steps) -> Transitions:
        """Record one `VectorEnvironment.step`, and return its transitions."""
        transitions = transitions_of(before, actions, steps)
        for memory, found in ((self._online, transitions), (self._demonstrations, transitions.demonstrations())):
            if len(found):
                memory.append(found)
        return transitions


ABOUT_FILE, RECORDS_FILE = "about.json", "transitions.bin"
VERSION = 2
FLAGS = ("terminated", "truncated")
PLACES = ("step", "episode")
"""Values stored with a transition: the step of a run, and the number of the episode."""


class ReplayBuffer:
    """Transitions in a folder, the newest at the end; none is ever changed.

    Each is a record of fixed size with a checksum. A process that is killed while it writes leaves a record
    that is incomplete, which is cut off when the folder is opened again. One process writes; others may read.
    """

    def __init__(self, folder: Path, spaces: Spaces, chunk: int, *, is_reader: bool = False) -> None:
        """Open the transitions of a folder, which is made if it does not exist.

        Args:
            folder: Folder of the transitions.
            spaces: Observations and actions of the environment.
            chunk: Steps of a decision.
            is_reader: Whether another process may be writing, so that nothing is cut off or appended here.

        Raises:
            ValueError: The folder has transitions of another body, or the actions are choices.
        """
        self._dtype = record_type(spaces, chunk)
        self._cameras = tuple(spaces.images)
        self._names = [name for name in (self._dtype.names or ())[1:] if name not in PLACES]
        self._path = folder / RECORDS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        about = {"version": VERSION, "chunk": chunk, "fields": json.loads(json.dumps(self._dtype.descr))}
        self._check(folder / ABOUT_FILE, about)
        self._path.touch()
        if is_reader:
            self.refresh()
        else:
            self._cut_torn_tail()
        self._file = self._path.open("rb" if is_reader else "ab", buffering=0)
        self._records: NDArray[np.void] = np.zeros(0, self._dtype)

    def _check(self, path: Path, about: Mapping[str, object]) -> None:
        if not path.exists():
            waiting = path.with_suffix(".new")
            waiting.write_text(json.dumps(about))
            waiting.replace(path)
            return
        found = json.loads(path.read_text())
        if differing := [key for key, value in about.items() if found.get(key) != value]:
            raise ValueError(
                f"{path} is of another body: {', '.join(f'{key}={found.get(key)}' for key in differing)}, and not "
                f"{', '.join(str(about[key]) for key in differing)}: use another folder"
            )

    def _cut_torn_tail(self) -> None:
        size = self._dtype.itemsize
        num = self._path.stat().st_size // size
        with self._path.open("r+b") as file:
            while num:
                file.seek((num - 1) * size)
                record = file.read(size)
                if _checksum(record) == int(np.frombuffer(record, self._dtype)["checksum"][0]):
                    break
                num -= 1
            file.truncate(num * size)
        self._num = num

    def __len__(self) -> int:
        """Number of transitions."""
        return self._num

    def append(self, transitions: Transitions, step: int = 0, episodes: NDArray[np.int64] | int = 0) -> None:
        """Store transitions. Once this returns, killing the process does not lose them; see `sync`.

        Args:
            transitions: Transitions.
            step: Step of the run that made them, never before the step of earlier ones.
            episodes: Number of the episode of each, int64 [n].
        """
        records = np.zeros(len(transitions), self._dtype)
        records["step"], records["episode"] = step, episodes
        for name in self._names:
            kind, _, camera = name.partition("/")
            values = getattr(transitions, kind)
            records[name] = values[camera] if camera else values
        for row in range(len(records)):
            records["checksum"][row] = _checksum(records[row].tobytes())
        rest = memoryview(records.tobytes())
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num += len(records)

    def sync(self) -> None:
        """Wait until all transitions are on disk, where they survive a loss of power too."""
        os.fsync(self._file.fileno())

    def truncate(self, num: int) -> None:
        """Drop all but the `num` oldest, to continue from a checkpoint written when there were that many.

        Raises:
            ValueError: There are fewer.
        """
        if not 0 <= num <= self._num:
            raise ValueError(f"num={num}: {self._path} has only {self._num} transitions; is it another run's?")
        self._records = np.zeros(0, self._dtype)
        self._file.truncate(num * self._dtype.itemsize)
        self._num = num

    def sample(self, num: int, *, seed: int, step: int) -> Transitions:
        """Draw transitions with replacement; the same ones for the same seed, step and number in the buffer.

        Raises:
            ValueError: There is none.
        """
        if not self._num:
            raise ValueError(f"{self._path} is empty: append transitions before drawing some")
        chance = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step])))
        return self.take(chance.integers(self._num, size=num))

    def take(self, rows: NDArray[np.int64]) -> Transitions:
        """The transitions of some rows, from 0 for the oldest."""
        found = self._mapped()[rows]
        images, next_images = (
            {camera: found[f"{kind}/{camera}"] for camera in self._cameras} for kind in ("images", "next_images")
        )
        names = [name for name in self._names if "/" not in name]
        return Transitions(images=images, next_images=next_images, **{name: np.array(found[name]) for name in names})

    def places(self, first: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Step, episode, and whether a person acted, of the transitions from `first`, each [n]."""
        found = self._mapped()[first:]
        step, episode = (np.array(found[name]) for name in PLACES)
        return step, episode, np.array(found["intervened"].any(axis=1))

    def cut(self, step: int) -> None:
        """Drop the transitions of a step of the run, and of later ones."""
        self.truncate(self.first_of(step))

    def first_of(self, step: int) -> int:
        """The row of the first transition of a step of the run, or of a later one."""
        records = self._mapped()  # of which only a few are read from the disk
        return bisect_left(range(len(records)), step, key=lambda row: int(records["step"][row]))

    def refresh(self) -> None:
        """Include transitions that another process has appended since."""
        self._num = self._path.stat().st_size // self._dtype.itemsize

    def _mapped(self) -> NDArray[np.void]:
        if len(self._records) != self._num:
            self._records = np.memmap(self._path, self._dtype, "r", shape=(self._num,))
        return self._records

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._records = np.zeros(0, self._dtype)
        self._file.close()


def record_type(spaces: Spaces, chunk: int) -> np.dtype[np.void]:
    """The record of a transition; see `Transitions`.

    Raises:
        ValueError: Actions are choices.
    """
    if not isinstance(spaces.actions, Continuous):
        raise ValueError(
            "actions are choices, but transitions hold real numbers: use an algorithm without a replay buffer"
        )
    fields: list[tuple[str, str, tuple[int, ...]]] = [("checksum", "<u4", ()), *((name, "<i8", ()) for name in PLACES)]
    for kind, state in (("images", "state"), ("next_images", "next_state")):
        fields += [(f"{kind}/{camera}", "|u1", (*size, 3)) for camera, size in spaces.images.items()]
        fields.append((state, "<f4", (spaces.state_size,)))
    fields += [("actions", "<f4", (chunk, spaces.actions.dim)), ("rewards", "<f4", (chunk,)), ("num_steps", "<i8", ())]
    fields += [*((name, "|b1", ()) for name in FLAGS), ("intervened", "|b1", (chunk,))]
    return np.dtype(fields)


def _checksum(record: bytes) -> int:
    """Checksum of a record without its first field; never the checksum of zeros, which a loss of power may leave."""
    return zlib.crc32(record[4:]) ^ 0xFFFFFFFF
