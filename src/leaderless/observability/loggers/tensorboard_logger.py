"""TensorBoard: event files in the folder of the run, written without torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from typing_extensions import override

from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Logger, Numbers

MAX_TEXTS = 8
"""Number of rows of a table that are written, as texts."""


class TensorBoardLogger(Logger):
    """Writes event files to the folder `tensorboard`; a log with a name has a folder of that name in it."""

    def __init__(self) -> None:
        self._folder = Path()
        self._writers: dict[str, EventFileWriter] = {}

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        self._folder = run.directory / "tensorboard"
        if not identity:
            recipe = (run.directory / "config.yaml").read_text(encoding="utf-8")
            self._add("", 0, _text("recipe", [f"```yaml\n{recipe}\n```"]))
        return "tensorboard"

    @override
    def rewind(self, log: str, step: int) -> bool:
        """Write an event because of which readers ignore earlier events of this step and later ones."""
        self._writer(log).add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=1)))
        return True

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        for log, step, values in numbers:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._add(log, step, summary)
        for writer in self._writers.values():
            writer.flush()

    @override
    def write_table(self, table: LoggedTable) -> None:
        """Write each row as a text in Markdown."""
        rows = table.rows[:MAX_TEXTS]
        texts = [
            "\n\n".join(f"**{name}**\n\n{_fenced(value)}" for name, value in zip(table.columns, row, strict=True))
            for row in rows
        ]
        self._add("", table.step, _text(table.name, texts))
        self._writer("").flush()

    @override
    def write_file(self, path: Path) -> None:
        """Write a text with the path of the file, which stays where it is."""
        self._add("", 0, _text(path.name, [f"`{path}`"]))

    @override
    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _add(self, log: str, step: int, summary: Summary) -> None:
        self._writer(log).add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _writer(self, log: str) -> EventFileWriter:
        if log not in self._writers:
            folder = self._folder / log
            folder.mkdir(parents=True, exist_ok=True)
            self._writers[log] = EventFileWriter(str(folder))
        return self._writers[log]


def _text(tag: str, texts: Sequence[str]) -> Summary:
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode(errors="replace") for text in texts],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))]),
    )
    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _fenced(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    text = str(value)
    fence = "`" * (3 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return f"{fence}\n{text}\n{fence}" if isinstance(value, str) else text
