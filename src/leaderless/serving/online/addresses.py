"""The addresses at which clients of an online run reach its replicas."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from leaderless.config import Recipe
from leaderless.data.prompts.encode import Tokenizer
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Plan, PlannedNode
from leaderless.serving.listen import TOKEN_VARIABLE, take_port
from leaderless.serving.online.server import OnlineService
from leaderless.stages.play_episodes import writer_of


@dataclass
class Replica:
    """The address of a replica.

    Attributes:
        number: Number of the replica within the rollout.
        node: Node that samples.
        listener: Socket with the address.
        token: Key that clients send; None if they need none.
        desk: Server that answers; None before it is opened.
    """

    number: int
    node: PlannedNode
    listener: socket.socket
    token: str | None
    desk: OnlineService | None = None


class OnlineEntrance:
    """The address of a rank that samples; other ranks have none."""

    def __init__(self, replica: Replica | None) -> None:
        """Take an address at which nobody is answered yet, or none."""
        self._replica = replica

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> OnlineService | None:
        """Answer clients as soon as the first step begins."""
        replica = self._replica
        if replica is None:
            return None
        (data,) = recipe.data.train_sets().values()
        writer = writer_of(copy.deepcopy(tokenizer), data)  # no two threads may use one
        replica.desk = OnlineService(replica.node.settings_of(recipe), writer, replica.listener, replica.token)
        return replica.desk

    def say(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """Write the addresses of all replicas into the folder of the run."""
        folder, replica = directory.doors, self._replica
        if replica is None or replica.desk is None:
            say(f"clients: the addresses are in {folder}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / str(replica.number), f"{replica.desk.address}\n")
        replicas = f", replica {replica.number} of {replica.node.layout.dp}" if replica.node.layout.dp > 1 else ""
        others = f"; all addresses are in {folder}" if replicas else ""
        say(f"clients: {replica.desk.address}{replicas}{others}")


def make_entrance(recipe: Recipe, plan: Plan, rank: int) -> OnlineEntrance:
    """Reserve the address of a rank's replica, if it has one.

    Raises:
        RecipeError: It is taken, or other machines reach it and there is no token.
    """
    node = next(node for node in plan.nodes if node.spec.samples)
    if recipe.online is None or rank not in node.layout:
        return OnlineEntrance(None)
    token, number = os.environ.get(TOKEN_VARIABLE) or None, node.layout.shard_of(rank)
    port = recipe.online.port and recipe.online.port + number
    return OnlineEntrance(Replica(number, node, take_port(recipe.online.host, port, token, "online"), token))
