"""Trackio: a store on this machine, a server, or a Space on the hub."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Logger, Numbers

if TYPE_CHECKING:
    import trackio


class TrackioLogger(Logger):
    """Writes a run to Trackio's store on this machine, where `trackio show` reads it, or to a server or a Space.

    Args:
        project: Name of the project.
        space: Space of the hub to write to, such as `team/runs`.
        server: Address of a Trackio server to write to.
    """

    _run: trackio.Run

    def __init__(self, project: str = "leaderless", space: str | None = None, server: str | None = None) -> None:
        self._project, self._space, self._server = project, space, server

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        """Give the run a name with a unique ending, since runs are found by name."""
        import trackio

        name = identity or f"{run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=self._project,
            name=name,
            space_id=self._space,
            server_url=self._server,
            config=dict(run.recipe),
            resume="allow" if identity else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        for _, step, values in numbers:
            self._run.log(dict(values), step=step)

    @override
    def write_table(self, table: LoggedTable) -> None:
        import trackio

        rows = trackio.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({table.name: rows}, step=table.step)

    @override
    def write_file(self, path: Path) -> None:
        self._run.log_artifact(path, name=f"{self._run.name}-{path.stem}", type="report")

    @override
    def close(self) -> None:
        self._run.finish()
