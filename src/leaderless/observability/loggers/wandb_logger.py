"""Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Logger, Numbers

if TYPE_CHECKING:
    import wandb

STEP = "step"
"""Name of the horizontal axis."""


class WandbLogger(Logger):
    """Sends a run to Weights & Biases, under an identity that stays the same when it continues.

    Args:
        project: Name of the project.
        entity: User or team; the user's own by default.
        group: Name shared by runs that belong together.
        tags: Further tags of the run, next to `run.tags`.
        mode: `offline` writes to the folder of the run, for `wandb sync`.
    """

    _run: wandb.Run

    def __init__(
        self,
        project: str = "leaderless",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        if mode not in {"online", "offline"}:
            raise ValueError(f"option mode='{mode}' of the logger wandb must be online or offline")
        self._project, self._entity, self._group, self._tags, self._mode = project, entity, group, tags, mode

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        """Plot numbers over `step`, as loops that run ahead are at other steps than training."""
        import wandb

        folder = run.directory / "loggers"
        folder.mkdir(exist_ok=True)
        settings = wandb.Settings(console="off", x_disable_stats=False, quiet=True)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=list(dict.fromkeys((*self._tags, *run.tags))),
            mode=self._mode,
            name=run.name,
            id=identity or secrets.token_hex(4),
            resume="allow",
            dir=folder,
            config=dict(run.recipe),
            settings=settings,
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        return str(self._run.id)

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        for _, step, values in numbers:
            self._run.log({STEP: step, **values})

    @override
    def write_table(self, table: LoggedTable) -> None:
        import wandb

        rows = wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows], allow_mixed_types=True)
        self._run.log({STEP: table.step, table.name: rows})

    @override
    def write_file(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    @override
    def close(self) -> None:
        self._run.finish()
