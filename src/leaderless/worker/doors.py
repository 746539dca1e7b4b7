"""The addresses at which clients of an online run reach its replicas."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.config import Recipe
from leaderless.data.encode import Tokenizer
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Plan, PlannedNode
from leaderless.planner.doors import sampling_node
from leaderless.stages.play import writer_of

if TYPE_CHECKING:
    from leaderless.serve.desk import Desk


@dataclass(frozen=True)
class Door:
    """The address of a replica, at which nobody is answered yet.

    Attributes:
        replica: Number of the replica among those of the rollout.
        node: Node that samples.
        listener: Socket with the address.
        token: Key that clients send; None if they need none.
    """

    replica: int
    node: PlannedNode
    listener: socket.socket
    token: str | None

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> Desk:
        """Let clients in; they are answered as soon as the first step begins."""
        from leaderless.serve.desk import Desk  # only online runs need a server

        (data,) = recipe.data.train_sets().values()
        writer = writer_of(copy.deepcopy(tokenizer), data)  # no two threads may use one
        return Desk(self.node.settings_of(recipe), writer, self.listener, self.token)


def take_door(recipe: Recipe, plan: Plan, rank: int) -> Door | None:
    """Reserve the address of a rank's replica; None where clients ask nothing.

    Raises:
        RecipeError: It is taken, or other machines reach it and there is no token.
    """
    node = sampling_node(recipe, plan)
    if recipe.online is None or node is None or rank not in node.layout:
        return None
    from leaderless.serve.port import TOKEN_VARIABLE, take_port

    token, replica = os.environ.get(TOKEN_VARIABLE) or None, node.layout.shard_of(rank)
    port = recipe.online.port and recipe.online.port + replica
    return Door(replica, node, take_port(recipe.online.host, port, token, "online"), token)


def say_doors(door: Door | None, desk: Desk | None, directory: RunDirectory, say: Callable[[str], None]) -> None:
    """Say where clients ask, and write it into the folder of the run, which has the addresses of all replicas."""
    folder = directory.doors
    if door is None or desk is None:
        say(f"clients: the addresses are in {folder}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / str(door.replica), f"{desk.address}\n")
    replicas = f", replica {door.replica} of {door.node.layout.dp}" if door.node.layout.dp > 1 else ""
    others = f"; all addresses are in {folder}" if replicas else ""
    say(f"clients: {desk.address}{replicas}{others}")
