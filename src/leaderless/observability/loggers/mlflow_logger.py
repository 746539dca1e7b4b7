"""MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Logger, Numbers

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRICS_PER_REQUEST = 1000
"""Largest number of metrics that a server takes at a time."""
MAX_VALUE = 500
"""Length at which the value of a parameter is cut."""
PARAMETERS_PER_REQUEST = 100


class MlflowLogger(Logger):
    """Sends a run to an MLflow server, or to the files or the database of `uri`.

    Args:
        uri: Address, such as `http://tracking:5000`; by default MLFLOW_TRACKING_URI.
        experiment: Name of the experiment, which is created where it does not exist.
    """

    _client: MlflowClient

    def __init__(self, uri: str | None = None, experiment: str = "leaderless") -> None:
        self._uri, self._experiment = uri, experiment
        self._identity = ""
        self._known: dict[str, int] = {}

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        """Send the recipe as parameters and as the file `config.yaml`, and each tag with the value `true`."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient(self._uri)
        if identity:
            self._identity = identity
            client.update_run(identity, "RUNNING")
            return identity
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        started = client.create_run(experiment, run_name=run.name, tags={key_of(tag): "true" for tag in run.tags})
        self._identity = started.info.run_id
        parameters = [Param(key, text[:MAX_VALUE]) for key, text in _leaves("", run.recipe)]
        for first in range(0, len(parameters), PARAMETERS_PER_REQUEST):
            some = parameters[first : first + PARAMETERS_PER_REQUEST]
            client.log_batch(self._identity, params=some, synchronous=True)
        client.log_artifact(self._identity, str(run.directory / "config.yaml"))
        return self._identity

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        """Skip values that the server already has from an attempt whose reply was lost."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now, step)
            for _, step, values in numbers
            for name, value in ((key_of(name), value) for name, value in values.items())
            if step > self._known.get(name, -1)
        ]
        for first in range(0, len(metrics), METRICS_PER_REQUEST):
            some = metrics[first : first + METRICS_PER_REQUEST]
            self._client.log_batch(self._identity, metrics=some, synchronous=True)
            self._known |= {metric.key: metric.step for metric in some}

    @override
    def write_table(self, table: LoggedTable) -> None:
        columns = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
        self._client.log_table(self._identity, columns, f"{table.name}/step-{table.step:06d}.json")

    @override
    def write_file(self, path: Path) -> None:
        self._client.log_artifact(self._identity, str(path))

    @override
    def close(self) -> None:
        self._client.set_terminated(self._identity)


def key_of(name: str) -> str:
    """The name under which MLflow takes a metric: it allows letters, digits and a few signs."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_").replace("->", "-to-"))


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Settings by dotted key, without empty ones."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    elif value not in (None, [], ()):
        yield key_of(path), str(value)
