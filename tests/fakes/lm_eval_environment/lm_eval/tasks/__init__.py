"""Tasks that it knows."""

from __future__ import annotations

from pathlib import Path


class TaskManager:
    """Its own tasks, and those of a folder."""

    def __init__(self, include_path: str | None = None) -> None:
        found = [] if include_path is None else [path.stem for path in Path(include_path).glob("*.yaml")]
        self.all_tasks = sorted(["sums", "slow_sums", "failing_sums", *found])

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.all_tasks]
