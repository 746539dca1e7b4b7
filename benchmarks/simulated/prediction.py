"""The model against a measurement: its prediction for one transition whose rows are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from benchmarks.simulated.controllers import OURS, ComparedCluster, Controller, controller_cost

from leaderless.planner import Reshard
from leaderless.planner.simulate.network import Network
from leaderless.planner.simulate.rows import Int, SimulatedRoutes, SimulatedRows, owners_of
from leaderless.planner.simulate.transfers import Cost, peer_cost


@dataclass(frozen=True)
class Errors:
    """Errors of a prediction, each as a share of the measurement: 0.1 is a tenth too much.

    Attributes:
        seconds: Error of the duration.
        interface_bytes: Error for the busiest interface.
        process_bytes: Error for the busiest process.
    """

    seconds: float
    interface_bytes: float
    process_bytes: float


def predict(action: Reshard, rows: SimulatedRows, holders: Int, cluster: ComparedCluster, way: str) -> Cost:
    """The cost of one transition.

    Args:
        action: Columns and layouts; the ranks are those of the first hosts of the cluster.
        rows: Rows that are sent.
        holders: [n] rank that holds each row.
        cluster: Constants of the cost model.
        way: `ours`, or a controller of the cluster file.

    Raises:
        ValueError: The cluster file has no such controller.
    """
    ranks = action.ranks
    network = Network(cluster, ranks[-1] + 1)
    owners = owners_of(action, rows, holders, {})
    routes = SimulatedRoutes(rows, holders, owners, action.source_layout, action.target_layout, is_agreed=False)
    if way == OURS:
        return peer_cost(routes, action.columns, np.array(ranks), network)
    if way not in cluster.controllers:
        known = ", ".join([OURS, *cluster.controllers])
        raise ValueError(
            f"way '{way}' is not in the cluster file '{cluster.name}': use one of {known}, or add it there"
        )
    return controller_cost(routes, action.columns, Controller(cluster.controllers[way], network))


def errors_of(predicted: Cost, measured: Cost) -> Errors:
    """The difference between a prediction and a measurement.

    Args:
        predicted: Result of `predict`.
        measured: Measured costs, each above 0.
    """
    return Errors(
        seconds=predicted.seconds / measured.seconds - 1,
        interface_bytes=predicted.interface_bytes / measured.interface_bytes - 1,
        process_bytes=predicted.process_bytes / measured.process_bytes - 1,
    )
