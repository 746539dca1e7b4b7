"""Real arms as an environment of episodes: one server for each."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.tokens import TOKEN_VARIABLE
from leaderless.base.values import Json
from leaderless.embodied.robots.arm import CommandOutcome, Reading, Refused
from leaderless.embodied.robots.client import Address, RobotClient
from leaderless.embodied.simulators.protocol import Continuous, Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.protocol import Task
from leaderless.observability.console import print_line

ASK_S = 0.5
"""Time between two questions whether a person has released an arm."""
HELPED = "a person acted, and these actions were not the policy's: give `allows_help` where it may learn from them"
TAKEN_S = 1.0
"""Time for which arms are waited for that other clients have."""
MAX_ATTEMPTS = 3
"""Number of times that a late command, or an episode whose begin was cut, is asked for."""


class RobotEnvironment(VectorEnvironment):
    """Episodes on n arms, each behind a server of its own. Actions are from -1 to 1 for each axis.

    The seed of an episode is given to the arm's driver; the task has no meaning to it. An arm cannot be saved or
    restored. `infos` say for each step what was executed, and where a person has intervened. Where an arm was stopped,
    the episode is truncated, and `failed` in its info says why; its next reset waits for a person.

    The token of the servers is in the environment variable `LEADERLESS_TOKEN`.

    Args:
        num: Number of episodes at a time, each on an arm of its own.
        addresses: Addresses of servers, as host:port, of all arms that may be used. The first `num` are taken that no
            other client has, so that several ranks share the list.
        begin_within_s: Time within which a command must begin at the server; later it is refused as out of date.
        reset_within_s: Time within which an arm must be at the start of an episode.
        reconnect_s: Time for which a lost server is looked for.
        release_within_s: Time for which a person is waited for who releases a stopped arm.
        allows_help: Whether episodes count in which a person acts. Else they are marked as failed: PPO, GRPO and their
            like learn from what the policy did, and the person's actions were not its own. Learners such as RLPD want
            them.

    Raises:
        ValueError: The number of addresses is wrong, or the arms differ.
        Refused: A server does not let this client in.
        ConnectionError: There is no server.
    """

    def __init__(
        self,
        num: int,
        addresses: Sequence[str] = (),
        *,
        begin_within_s: float = 1.0,
        reset_within_s: float = 60.0,
        reconnect_s: float = 30.0,
        release_within_s: float = 600.0,
        allows_help: bool = False,
    ) -> None:
        if num > len(addresses):
            raise ValueError(f"{num} episodes at a time need as many arms, not {len(addresses)}: give `addresses`")
        self._begin_within_s, self._reset_within_s = begin_within_s, reset_within_s
        self._release_within_s, self._allows_help = release_within_s, allows_help
        self._clients: list[RobotClient] = []
        self._seen: dict[int, Reading] = {}
        token = os.environ.get(TOKEN_VARIABLE)
        try:
            self._take_arms(num, [Address.of(address) for address in addresses], token, reconnect_s)
            first = self._clients[0].description
            for client in self._clients:
                if client.description != first:
                    both = f"{client.address} differs from that at {self._clients[0].address}"
                    raise ValueError(f"the arm at {both}: use equal ones")
        except BaseException:
            self.close()
            raise
        self.description = first
        dim = len(first.arm.axes)
        self.spaces = Spaces(
            images=dict(first.arm.cameras),
            state_size=first.arm.state_size,
            actions=Continuous((-1.0,) * dim, (1.0,) * dim),
            max_steps=first.max_steps,
            has_instructions=bool(first.instruction),
        )

    @override
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        """Move all arms to their starts at the same time."""
        for index, seed in zip(which, seeds, strict=True):
            self._clients[index].begin_reset(seed, self._reset_within_s)
        found = [self._finish_reset(self._clients[index], seed) for index, seed in zip(which, seeds, strict=True)]
        self._seen |= {index: one.reading for index, one in zip(which, found, strict=True)}
        return self._observations(which)

    @override
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        """Move all arms at the same time."""
        num, chunk, _ = actions.shape
        left = {row: np.asarray(actions[row], np.float32) for row in range(num)}
        found: list[list[CommandOutcome]] = [[] for _ in range(num)]
        failed: dict[int, str] = {}
        num_late = 0
        while left:
            for row, rest in left.items():
                self._clients[which[row]].begin_step(rest[: self.description.max_chunk], self._begin_within_s)
            refusals: list[Refused] = []
            for row in list(left):
                try:
                    outcome = self._clients[which[row]].finish()
                except Refused as refused:
                    if refused.code == "stopped":
                        failed[row] = str(refused)
                        del left[row]
                    else:
                        refusals.append(refused)
                    continue
                found[row].append(outcome)
                left[row] = left[row][outcome.num_steps :]
                if outcome.is_terminated or outcome.is_truncated or not len(left[row]):
                    del left[row]
            num_late += any(one.code == "late" for one in refusals)
            # All answers are in before one is raised, so that the clients can be used again.
            for one in refusals:
                if one.code != "late" or num_late >= MAX_ATTEMPTS:
                    raise one
        for row, outcomes in enumerate(found):
            if not self._allows_help and any(one.intervened.any() for one in outcomes):
                failed.setdefault(row, HELPED)
        for row, index in enumerate(which):
            self._seen[index] = found[row][-1].reading if found[row] else self._seen[index]
        return self._steps(which, found, chunk, failed)

    @override
    def close(self) -> None:
        """Let the arms hold."""
        for client in self._clients:
            client.close()

    def _take_arms(self, num: int, addresses: Sequence[Address], token: str | None, reconnect_s: float) -> None:
        """Connect to the first arms that are free."""
        until_s, left = time.monotonic() + TAKEN_S, list(addresses)
        while len(self._clients) < num:
            taken: Refused | None = None
            for address in tuple(left):
                try:
                    client = RobotClient(address, token, reconnect_s=reconnect_s, taken_s=0.0)
                except Refused as refused:
                    if refused.code != "taken":
                        raise
                    taken = refused
                    continue
                self._clients.append(client)
                left.remove(address)
                if len(self._clients) == num:
                    return
            if taken is not None and time.monotonic() > until_s:
                raise taken
            time.sleep(TAKEN_S / 10)

    def _finish_reset(self, client: RobotClient, seed: int) -> CommandOutcome:
        until_s, num_cut, is_told = time.monotonic() + self._release_within_s, 0, False
        while True:
            try:
                return client.finish()
            except Refused as refused:
                if refused.code == "stopped" and time.monotonic() < until_s:
                    if not is_told:
                        print_line(f"{refused}; waiting for up to {self._release_within_s:g} s")
                    is_told = True
                elif refused.code in {"cut", "busy"} and num_cut + 1 < MAX_ATTEMPTS:
                    num_cut += 1
                else:
                    raise
            time.sleep(ASK_S)
            client.begin_reset(seed, self._reset_within_s)

    def _observations(self, which: Sequence[int]) -> Observations:
        seen = [self._seen[index] for index in which]
        images = {name: np.stack([one.images[name] for one in seen]) for name in self.spaces.images}
        state = np.stack([one.state for one in seen])
        return Observations(images, state, (self.description.instruction,) * len(seen))

    def _steps(
        self, which: Sequence[int], found: Sequence[Sequence[CommandOutcome]], chunk: int, failed: Mapping[int, str]
    ) -> Steps:
        num = len(found)
        rewards, num_steps = np.zeros((num, chunk), np.float32), np.ones(num, np.int64)
        for row, outcomes in enumerate(found):
            earned = np.concatenate([np.zeros(0, np.float32), *(one.rewards for one in outcomes)])
            rewards[row, : len(earned)] = earned
            num_steps[row] = max(1, len(earned))
        terminated = np.array([any(one.is_terminated for one in outcomes) for outcomes in found])
        truncated = [
            row in failed or any(one.is_truncated for one in outcomes) for row, outcomes in enumerate(found)
        ] & ~terminated
        return Steps(
            observations=self._observations(which),
            rewards=rewards,
            num_steps=num_steps,
            terminated=terminated,
            truncated=np.array(truncated),
            success=terminated.copy(),
            infos=tuple(_info(outcomes, failed.get(row, "")) for row, outcomes in enumerate(found)),
        )


def _info(outcomes: Sequence[CommandOutcome], failed: str) -> dict[str, Json]:
    """Further facts about the steps of one arm, as JSON."""
    if not outcomes:
        return {"failed": failed}
    names = ("actions", "executed", "intervened", "clipped", "limited")
    steps = {name: np.concatenate([getattr(one, name) for one in outcomes]).tolist() for name in names}
    last = outcomes[-1]
    cuts = [one.cut for one in outcomes if one.cut]
    facts: dict[str, Json] = {"num_idle": sum(one.num_idle for one in outcomes), "time_s": last.time_s, **last.facts}
    facts |= {"is_fresh": last.reading.is_fresh, **({"cuts": cuts} if cuts else {})}
    return {**steps, **facts, **({"failed": failed} if failed else {})}
