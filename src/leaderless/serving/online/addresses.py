"""The addresses at which clients of an online run reach its replicas."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

from leaderless.config import Recipe
from leaderless.data.prompts.encode import Tokenizer
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Plan
from leaderless.serving.listen import TOKEN_VARIABLE, take_port
from leaderless.serving.online.server import OnlineService
from leaderless.stages.play_episodes import writer_of


class OnlineEntrance:
    """The address of the replica of a rank; ranks that do not sample have none."""

    def __init__(self, recipe: Recipe, plan: Plan, rank: int) -> None:
        """Take the address, at which nobody is answered yet.

        Raises:
            RecipeError: It is taken, or other machines reach it and there is no token.
        """
        config, self._node = recipe.online, next(node for node in plan.nodes if node.spec.samples)
        assert config is not None, "only online runs have clients"
        self._replica = self._node.layout.shard_of(rank) if rank in self._node.layout else None
        self._service: OnlineService | None = None
        if self._replica is not None:
            port = config.port and config.port + self._replica
            self._token = os.environ.get(TOKEN_VARIABLE) or None
            self._listener = take_port(config.host, port, self._token, "online")

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> OnlineService | None:
        """Answer clients as soon as the first step begins."""
        if self._replica is not None:
            (data,) = recipe.data.train_sets().values()
            writer = writer_of(copy.deepcopy(tokenizer), data)  # no two threads may use one
            self._service = OnlineService(self._node.settings_of(recipe), writer, self._listener, self._token)
        return self._service

    def say(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """Write the addresses of all replicas into the folder of the run."""
        folder, service, size = directory.doors, self._service, self._node.layout.dp
        if service is None:
            say(f"clients: the addresses are in {folder}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / str(self._replica), f"{service.address}\n")
        others = f", replica {self._replica} of {size}; all addresses are in {folder}" if size > 1 else ""
        say(f"clients: {service.address}{others}")
