"""What goes between ranks in one change of layout: the databuffer's own routes, and the bytes of what they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leaderless.data.routes import Routes as DatabufferRoutes
from leaderless.planner.costs.network import Network, Transfer
from leaderless.planner.costs.placement import Routes
from leaderless.planner.costs.rows import LENGTH_BYTES, Int


@dataclass(frozen=True)
class Parcels:
    """The messages of one change of layout, and what it leaves on each rank.

    Attributes:
        lengths: Lengths of ragged rows, which travel first: straight from their senders, then passed on by peers.
        values: Bytes of columns, passed on or not.
        largest_bytes: Values of the largest parcel.
        kept: [num_ranks] bytes of values that each rank has already and copies.
        arriving: [num_ranks] memory of each rank's rows under the target layout, those that it keeps included.
    """

    lengths: tuple[Transfer, Transfer]
    values: Transfer
    largest_bytes: int
    kept: Int
    arriving: Int

    @property
    def is_passed_on(self) -> bool:
        """Whether a peer passes on what it has received."""
        return self.lengths[1].sizes.size > 0

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All messages."""
        return (*self.lengths, self.values)

    def interface_bytes(self, network: Network) -> int:
        """Bytes through the busiest interface, in and out together.

        Args:
            network: Links between the ranks.
        """
        by_interface = [sum(network.interface_bytes(transfer)) for transfer in self.transfers]
        return int(np.max(sum(by_interface)))


def parcels_of(routes: Routes, columns: Sequence[str], network: Network) -> Parcels:
    """What every rank of the target layout gets, found as the ranks themselves find it.

    Args:
        routes: Routes of the rows.
        columns: Columns that travel.
        network: Network that places ranks on hosts.
    """
    rows, count = routes.rows, network.num_ranks
    of_rows, of_prompts = _deliveries(routes, network)
    # Rows of a group are neighbors: the first of them stands for its prompt.
    prompts = np.searchsorted(rows.groups, of_prompts[0])
    _, holders, origins, receivers = np.concatenate([of_rows, of_prompts], axis=1)
    values = np.concatenate([rows.row_bytes(columns)[of_rows[0]], rows.prompt_bytes(columns)[prompts]])
    held = np.concatenate([rows.held_bytes(columns)[of_rows[0]], rows.prompt_bytes(columns)[prompts]])
    lengths = LENGTH_BYTES * np.repeat(rows.num_lengths(columns), [len(of_rows[0]), len(prompts)])
    straight, is_here = origins == holders, holders == receivers
    first, second = (Transfer.of(origins[leg], receivers[leg], lengths[leg]) for leg in (straight, ~straight))
    return Parcels(
        lengths=(first, second),
        values=Transfer.of(origins, receivers, values),
        largest_bytes=int(Transfer.of(holders, receivers, values).sizes.max(initial=0)),
        kept=np.bincount(receivers[is_here], weights=values[is_here], minlength=count).astype(np.int64),
        arriving=np.bincount(receivers, weights=held, minlength=count).astype(np.int64),
    )


def _deliveries(routes: Routes, network: Network) -> tuple[Int, Int]:
    """For rows and for prompts [4, k]: place, owner of the row, rank that it comes from, rank that gets it."""
    hosts = network.hosts(np.arange(network.num_ranks)).tolist()
    real = DatabufferRoutes(
        ids=np.arange(len(routes.rows)),
        group_ids=routes.rows.groups,
        holders=routes.holders,
        owners=routes.owners,
        source=routes.source,
        target=routes.target,
        hosts=dict(enumerate(hosts)),
        spares=routes.spares,
    )
    found: tuple[list[Int], list[Int]] = ([], [])
    for receiver in routes.target.ranks:
        delivery = real.delivery(receiver)
        for parts, ids, holders in zip(
            found, delivery.tables, (delivery.senders, delivery.prompt_senders), strict=True
        ):
            ranks, place = np.unique(holders, return_inverse=True)
            origins = np.array([real.relay(rank, receiver) for rank in ranks.tolist()], dtype=np.int64)[place]
            parts.append(np.stack([ids, holders, origins, np.full_like(ids, receiver)]))
    of_rows, of_prompts = (np.concatenate(parts, axis=1) for parts in found)
    return of_rows, of_prompts
