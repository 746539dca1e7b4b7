"""Tasks with a tool, whose calls are counted in a state that the reward reads."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class SumState(vf.State):
    num_calls: int = 0


class Sums(vf.Toolset[vf.ToolsetConfig, SumState]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.num_calls += 1
        if a == 13:
            raise ValueError("unlucky")
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, SumState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Sums(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(task.answer))

    @vf.reward(weight=0.5)
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.num_calls)


class SumTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for number in range(4):
            yield SumTask(SumData(prompt=f"What is {number} + 2?", answer=str(number + 2)), self.config.task)


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    Sums.run()
