"""Brings several machines together at each start of a run. Imports torch only when there are several."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Self

import psutil

from leaderless.worker.supervision.failure import WorkerFailure, WorkersFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOOPBACK = ("localhost", "127.0.0.1")
KEEP_ALIVE_S = 2
LOST_AFTER = 3
"""Signs of life that a machine may miss before the run continues without it."""
LAST_CALL_S = 5
"""Time that machines wait for more machines once there are enough; later ones can still join."""
JOIN_S = 600
"""Longest wait until there are enough."""
FINISH_S = 300.0
"""Longest time that a machine whose workers are done waits for the other machines."""


@dataclass(frozen=True)
class Nodes:
    """Machines that may train together, and the place where they meet."""

    smallest: int  # number of machines that a run needs
    largest: int  # number of machines that it can use
    rendezvous: str  # `HOST:PORT`, reachable from all; the machine of that name holds the store there

    @property
    def is_loopback(self) -> bool:
        """Whether this machine is the only one."""
        return self.rendezvous.rpartition(":")[0] in LOOPBACK

    @property
    def is_own_address(self) -> bool:
        """Whether the rendezvous is an address of one of this machine's interfaces, other than the loopback."""
        host = self.rendezvous.rpartition(":")[0].strip("[]")
        own = {address.address.partition("%")[0] for all_of in psutil.net_if_addrs().values() for address in all_of}
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError:  # connecting raises the error
            return False
        return bool(found & own) and not any(ip_address(one).is_loopback for one in found)

    @classmethod
    def parse(cls, text: str, rendezvous: str) -> Self:
        """Read the options of a command line: `MIN:MAX`, or one number for both, and `HOST:PORT`.

        Raises:
            ValueError: One of them has another form.
        """
        smallest, colon, largest = text.partition(":")
        numbers = (smallest, largest if colon else smallest)
        if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
            raise ValueError(f"--nodes {text}: must be a number of machines, or MIN:MAX with 1 <= MIN <= MAX, as 2:4")
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(
                f"--rendezvous {rendezvous!r}: must be HOST:PORT, the same on all machines, as node0:29500: "
                "the machine named there holds the store at which all meet"
            )
        return cls(int(numbers[0]), int(numbers[1]), rendezvous)


@dataclass(frozen=True)
class RankSlots:
    """The ranks of one machine in one start."""

    first_rank: int  # rank of the first worker of this machine
    world_size: int  # number of workers of all machines
    variables: Mapping[str, str]  # environment in which workers find where to meet


class ManyMachines:
    """Machines that meet through torch elastic's rendezvous; they may join or be lost during the run."""

    def __init__(self, nodes: Nodes, name: str, num_workers: int) -> None:
        """Connect to the store, which the machine of its name opens. The run's name is the same on all machines.

        Raises:
            WorkersFailed: The store cannot be reached.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        # Workers meet at a new store after each restart; the launchers' store would remember the last start.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._nodes, self._num_workers = nodes, num_workers
        parameters = partial(
            RendezvousParameters,
            "c10d",
            nodes.rendezvous,
            name,
            nodes.smallest,
            nodes.largest,
            local_addr="127.0.0.1" if nodes.is_loopback else None,
            keep_alive_interval=KEEP_ALIVE_S,
            keep_alive_max_attempt=LOST_AFTER,
            last_call_timeout=LAST_CALL_S,
            join_timeout=JOIN_S,
        )
        with self._explained():
            # Torch asks only for addresses of the host's name, which may be a loopback address alone.
            is_host = nodes.is_own_address
            try:
                self._handler = get_rendezvous_handler(parameters(is_host=True) if is_host else parameters())
            except RendezvousConnectionError:
                if not is_host:
                    raise
                # Another launcher of this machine holds the store.
                self._handler = get_rendezvous_handler(parameters(is_host=False))
        self._store: Store | None = None
        self._num_machines = 0

    def next(self) -> RankSlots:
        """Wait for the machines of the next start; returns this machine's ranks."""
        with self._explained():
            info = self._handler.next_rendezvous()
        self._store, self._num_machines = info.store, info.world_size
        info.store.set(f"workers/{info.rank}", str(self._num_workers))
        counts = [int(info.store.get(f"workers/{rank}")) for rank in range(info.world_size)]
        assert info.bootstrap_store_info is not None, "each start has a store of its own"
        variables = {
            "MASTER_ADDR": info.bootstrap_store_info.master_addr,
            "MASTER_PORT": str(info.bootstrap_store_info.master_port),
            "GROUP_RANK": str(info.rank),
            **({"GLOO_SOCKET_IFNAME": "lo"} if self._nodes.is_loopback else {}),
        }
        return RankSlots(sum(counts[: info.rank]), sum(counts), variables)

    def is_awaited(self) -> bool:
        """Whether machines wait to be let in."""
        with self._explained():
            return self._handler.num_nodes_waiting() > 0

    def finish(self) -> None:
        """Wait until the workers of all machines are done."""
        assert self._store is not None
        end = time.monotonic() + FINISH_S
        with suppress(RuntimeError):  # the machine that holds the store has left
            self._store.add("done", 1)
            while self._store.add("done", 0) < self._num_machines and time.monotonic() < end:
                time.sleep(0.1)

    def close(self) -> None:
        """End the run on all machines."""
        self._handler.shutdown()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain the error when machines do not meet."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        try:
            yield
        except RendezvousError as error:
            messages = {
                "RendezvousClosedError": "another machine has ended the run; its terminal says why",
                "RendezvousTimeoutError": (
                    f"fewer than {self._nodes.smallest} machines have come together within {JOIN_S} s: give the same "
                    "--nodes, --rendezvous and run name on all of them, or lower the first number of --nodes"
                ),
                "RendezvousConnectionError": (
                    f"the store at {self._nodes.rendezvous} cannot be reached: the machine that holds it is lost, or "
                    "does not let others connect"
                ),
            }
            message = messages.get(type(error).__name__, f"the machines could not meet: {error}")
            raise WorkersFailed(WorkerFailure(0, "lost_peers", message)) from error
