"""Tasks of one message: the share of a letter in it is the reward."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from itertools import cycle

import verifiers.v1 as vf


class LetterData(vf.TaskData):
    letter: str
    accident: str = ""


class LetterTask(vf.Task[LetterData]):
    async def setup(self, runtime: vf.Runtime) -> None:
        if self.data.accident == "sandbox":
            await runtime.read("nothing", max_bytes=1)

    @vf.reward
    async def share(self, task: LetterData, trace: vf.Trace) -> float:
        if task.accident == "grader":
            raise ValueError("the grader is broken")
        if task.accident == "late":
            await asyncio.sleep(60)
        if task.accident == "die":
            os._exit(1)
        said = trace.last_reply
        return said.count(task.letter) / max(len(said), 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LetterTasksetConfig(vf.TasksetConfig):
    accident: str = ""


class LetterTaskset(vf.Taskset[LetterTask, LetterTasksetConfig]):
    INFINITE = True

    def load(self) -> Iterable[LetterTask]:
        for letter in cycle("abc"):
            data = LetterData(prompt=f"say {letter}", letter=letter, accident=self.config.accident)
            yield LetterTask(data, self.config.task)


__all__ = ["LetterTaskset"]
