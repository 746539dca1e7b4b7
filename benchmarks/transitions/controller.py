"""A controller that moves padded rows by Ray: it gets them from an actor on each host and puts the shares of hosts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import ray
import torch
from benchmarks.transitions.case import Case, Order
from benchmarks.transitions.channel import Channel
from benchmarks.transitions.contents import Contents
from benchmarks.transitions.padded import Padded, contents, pad, share_out
from benchmarks.transitions.watch import Observation, Observations, Watch
from numpy.typing import NDArray
from ray.actor import ActorHandle

Arrays = dict[str, NDArray[np.generic]]
"""Padded rows, which Ray passes between processes of one host without a copy."""


class HostActor:
    """The worker of one host."""

    def __init__(self, host: int) -> None:
        torch.set_num_threads(1)
        self._host = host
        self._held: Padded | None = None
        self._got: Padded | None = None
        self._watch = Watch()

    def prepare(self, case: str) -> None:
        """Make the rows that the host has before, and start the clock."""
        described = Case.model_validate_json(case)
        rows = described.make_rows(self._host)
        self._held = None if rows is None else pad(described, rows)
        del rows
        self._watch = Watch()
        self._watch.__enter__()

    def give(self) -> Arrays:
        """The rows of the host."""
        assert self._held is not None
        return {name: table.numpy() for name, table in self._held.items()}

    def take(self, share: Arrays) -> None:
        """Keep the rows that the host receives."""
        self._got = {name: torch.from_numpy(table) for name, table in share.items()}

    def observe(self) -> str:
        """The measurements of the transition on this host; its rows are dropped."""
        self._watch.__exit__(None, None, None)
        observation = self._watch.observation(self._host, contents(self._held), contents(self._got))
        self._held = self._got = None
        return observation.model_dump_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="address of Ray's head, HOST:PORT")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    own_address = options.address.rpartition(":")[0]
    ray.init(options.address, _node_ip_address=own_address, log_to_driver=False)
    make = ray.remote(HostActor)
    made = [make.options(num_cpus=0, resources={f"host{h}": 1}).remote(h) for h in range(options.hosts)]
    actors = cast("list[ActorHandle[HostActor]]", made)
    channel = Channel.connect(options.socket, "controller")
    for line in channel:
        case = Order.model_validate_json(line).case
        channel.send(Observations(observe(case, actors)).model_dump_json())
    ray.shutdown()


def observe(case: Case, actors: Sequence[ActorHandle[HostActor]]) -> list[Observation]:
    """One transition: the controller first, then every host."""
    ray.get([actor.prepare.remote(case.model_dump_json()) for actor in actors])
    with Watch() as watch:
        through_controller(case, actors)
    # Only the controller's clock counts; those of the actors began when they had their rows.
    observations = [watch.observation(0, Contents(), Contents())]
    texts: list[str] = ray.get([actor.observe.remote() for actor in actors])
    for text in texts:
        seen = Observation.model_validate_json(text)
        observations.append(seen.model_copy(update={"started": watch.started, "ended": watch.ended}))
    return observations


def through_controller(case: Case, actors: Sequence[ActorHandle[HostActor]]) -> None:
    """Take rows from one layout to the other."""
    parts: list[Arrays] = ray.get([actors[rank].give.remote() for rank in case.action.source_layout.ranks])
    everything = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
    del parts  # so that the object store can free them
    ranks = case.action.target_layout.ranks
    members = share_out(everything["prompt_lengths"], everything["response_lengths"], len(ranks))
    taken: list[ray.ObjectRef[None]] = []
    for rank, index in zip(ranks, members, strict=True):
        share = ray.put({name: table[index].numpy() for name, table in everything.items()})
        taken.append(actors[rank].take.remote(share))
    ray.get(taken)


if __name__ == "__main__":
    main()
