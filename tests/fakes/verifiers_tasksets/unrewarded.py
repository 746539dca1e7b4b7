"""Tasks without a reward."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class UnrewardedTask(vf.Task[vf.TaskData]): ...


class UnrewardedTaskset(vf.Taskset[UnrewardedTask]):
    def load(self) -> Iterable[UnrewardedTask]:
        yield UnrewardedTask(vf.TaskData(prompt="say a"), self.config.task)


__all__ = ["UnrewardedTaskset"]
