"""A small environment of a body, as a user would write it. Imports no torch."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.simulators.protocol import Continuous, Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.protocol import Task


class Line(VectorEnvironment):
    """A point on a line that has to come to 0; the picture is one row of pixels, white where it is."""

    def __init__(self, num: int, *, max_steps: int = 6, fails_at: float | None = None) -> None:
        self.spaces = Spaces({"top": (1, 8)}, 2, Continuous((-1.0,), (1.0,)), max_steps, has_instructions=True)
        self.fails_at = fails_at
        self.place, self.steps = np.zeros(num, np.float32), np.zeros(num, np.int64)

    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:  # noqa: ARG002
        for row, seed in zip(which, seeds, strict=True):
            self.place[row] = np.random.default_rng(seed).uniform(-2, 2)
            if self.fails_at is not None and self.place[row] > self.fails_at:
                raise RuntimeError("the line is broken there")
            self.steps[row] = 0
        return self._seen(which)

    def _seen(self, which: Sequence[int]) -> Observations:
        image = np.zeros((len(which), 1, 8, 3), np.uint8)
        image[np.arange(len(which)), 0, np.clip((self.place[list(which)] + 2) * 2, 0, 7).astype(int)] = 255
        state = np.stack([self.place[list(which)], self.steps[list(which)] / 10], axis=1).astype(np.float32)
        return Observations({"top": image}, state, ("go to the middle",) * len(which))

    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        n, chunk = actions.shape[:2]
        rewards, count = np.zeros((n, chunk), np.float32), np.zeros(n, np.int64)
        done, cut = np.zeros(n, bool), np.zeros(n, bool)
        for row, number in enumerate(which):
            for place in range(chunk):
                self.place[number] += np.float32(np.clip(actions[row, place, 0], -1, 1))
                self.steps[number] += 1
                count[row] += 1
                done[row] = abs(self.place[number]) < 0.3
                rewards[row, place] = float(done[row])
                cut[row] = not done[row] and self.steps[number] >= self.spaces.max_steps
                if done[row] or cut[row]:
                    break
        return Steps(self._seen(which), rewards, count, done, cut, done.copy())

    def save(self, which: Sequence[int]) -> list[bytes]:
        return [struct.pack("<fq", self.place[one], self.steps[one]) for one in which]

    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        for one, state in zip(which, states, strict=True):
            self.place[one], self.steps[one] = struct.unpack("<fq", state)
        return self._seen(which)

    def expert(self, which: Sequence[int]) -> NDArray[np.generic]:
        return np.clip(-self.place[list(which)], -1, 1)[:, None].astype(np.float32)


class Broken(Line):
    """A line on which nothing begins on some ranks."""

    def __init__(self, num: int, *, ranks: Sequence[int] = (0,)) -> None:
        super().__init__(num)
        self.ranks = ranks

    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        if int(os.environ.get("RANK", "0")) in self.ranks:
            raise RuntimeError("the arm has no power")
        return super().reset(which, tasks, seeds)


class Faulty(Line):
    """A line on which episodes that begin near its end fail, in some way."""

    def __init__(self, num: int, *, fault: str = "", beyond: float = 1.6) -> None:
        super().__init__(num)
        self.fault, self.beyond = fault, beyond

    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        if any(self.place[one] > self.beyond and self.steps[one] == 0 for one in which):
            if self.fault == "crash":
                os._exit(7)
            if self.fault == "hang":
                time.sleep(60)
            if self.fault == "raise":
                raise RuntimeError("it is broken there")
        return super().step(which, actions)


class Wrong(Line):
    """A line that shows something wrong: always, in episodes that begin beyond a place, or in every other slot."""

    def __init__(self, num: int, *, fault: str = "", beyond: float = 1.0) -> None:
        super().__init__(num)
        self.fault, self.beyond, self.is_beyond = fault, beyond, np.zeros(num, np.bool_)

    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        super().reset(which, tasks, seeds)
        rows = np.array(which, np.int64)
        self.is_beyond[rows] = self.place[rows] > self.beyond
        if self.fault == "start":
            self.place[rows] += np.float32(0.25) * (rows % 2)
        return self._seen(which)

    def _seen(self, which: Sequence[int]) -> Observations:
        seen, rows = super()._seen(which), np.array(which, np.int64)
        image, state, words = seen.images["top"], seen.state, list(seen.instructions)
        if self.fault in {"nan state", "nan later"}:
            state[self.is_beyond[rows] & ((self.fault == "nan state") | (self.steps[rows] > 0)), 1] = np.nan
        if self.fault == "picture":
            image[rows % 2 == 1] = 255 - image[rows % 2 == 1]
        if self.fault == "dither":
            image[rows % 2 == 1] ^= 7
        if self.fault == "words":
            words = [f"{text}, {row % 2}" for text, row in zip(words, rows.tolist(), strict=True)]
        shown: dict[str, NDArray[np.generic]] = {
            "gray": image[..., 0],
            "floats": image / np.float32(255),
        }
        state = np.concatenate([state, state], axis=1) if self.fault == "long state" else state
        state = state.astype(np.float64) if self.fault == "double" else state
        return Observations({"top": shown.get(self.fault, image)}, state, tuple(words))  # type: ignore[dict-item]

    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        steps = super().step(which, actions)
        if self.fault == "nan reward":
            steps.rewards[self.is_beyond[list(which)], 0] = np.nan
        if self.fault == "short":
            steps.num_steps[:] = 0
        return steps


class Unsaved(Wrong):
    """The same, which cannot be saved."""

    save = VectorEnvironment.save


class Meeting(Line):
    """A line whose episodes begin only once environments in other processes begin theirs."""

    def __init__(self, num: int, *, folder: str, num_processes: int) -> None:
        super().__init__(num)
        self._folder, self._num_processes = Path(folder), num_processes

    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        (self._folder / str(os.getpid())).touch()
        until_s = time.monotonic() + 20
        while len(list(self._folder.iterdir())) < self._num_processes:
            if time.monotonic() > until_s:
                raise RuntimeError("no other environment has begun")
            time.sleep(0.01)
        return super().reset(which, tasks, seeds)
