"""The groups of ranks that generate continuously: those that may be begun, are handed over, or are begun again.

A group is trained in the iteration into whose share it comes. Iteration k trains weights that iteration k - 1 has left,
so that a group whose oldest token was sampled with the weights of iteration v is k - 1 - v iterations old then. Which
groups are begun and handed over, no other rank is asked: the same events in the same order give the same shares. What
is to be begun again after a checkpoint, the ranks agree on, as they may be more or fewer than before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.layout import Stragglers
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner.layout import in_proportion, places_of_shard

STATE_FILE = "ahead-{}-{}.json"
"""Name of the file of a checkpoint about a rank that generates, by its loop and its shard."""


@dataclass
class _Group:
    """A group that has been begun; `oldest` is the iteration whose weights sampled its oldest token."""

    oldest: int | None = None
    is_finished: bool = False


class RolloutQuota:
    """The groups of a rank that are in no share yet.

    Attributes:
        num_made: Number of shares that have been handed over.
    """

    def __init__(
        self, size: int, last: int, *, depth: int, bound: int, stragglers: Stragglers = "wait", num_made: int = 0
    ) -> None:
        """Begin after `num_made` shares.

        Args:
            size: Number of groups of a share.
            last: Last iteration of the run; there are `size` groups for each.
            depth: Iterations that the rank may be ahead.
            bound: Largest age of a group when it is trained, in iterations; at least `depth`.
            stragglers: Treatment of groups that are not finished when training needs rows.
            num_made: Shares that were handed over before.
        """
        assert bound >= depth, "a bound below the depth cannot be kept"
        self._size, self._last, self._depth, self._bound, self._stragglers = size, last, depth, bound, stragglers
        self.num_made = num_made
        self._groups: dict[int, _Group] = {}

    @property
    def open(self) -> list[int]:
        """The groups that have been begun, and neither handed over nor canceled."""
        return sorted(self._groups)

    def room(self, trained: int) -> int:
        """Number of further groups that may be begun when the weights of an iteration have come."""
        ahead = min(trained + self._depth + 1, self._last)
        return max(0, self._size * (ahead - self.num_made) - len(self._groups))

    def begin(self, groups: Iterable[int]) -> None:
        """Note that groups have been begun."""
        self._groups |= {group: _Group() for group in groups}

    def forget(self) -> list[int]:
        """Forget and return all groups that are in no share, ascending."""
        forgotten = self.open
        self._groups.clear()
        return forgotten

    def sampled(self, group: int, trained: int) -> None:
        """Note that tokens of a group have been sampled with the weights of an iteration."""
        one = self._groups[group]
        one.oldest = trained if one.oldest is None else min(one.oldest, trained)

    def finish(self, group: int) -> None:
        """Note that a group is finished."""
        self._groups[group].is_finished = True

    def overdue(self, trained: int) -> list[int]:
        """Drop groups that would become too old, if training waits and other groups can take their places.

        They must be begun again, after all other groups.
        """
        if self._stragglers != "cancel" or trained < self.num_made:
            return []
        chosen = self._finished(trained)
        late = self._too_many(chosen, trained) if len(chosen) == self._size else []
        for group in late:
            del self._groups[group]
        return late

    def take(self, trained: int) -> list[int] | None:
        """The groups of the next share, ascending; None if it is not complete."""
        chosen = self._in_order(trained)[: self._size]
        if len(chosen) < self._size:
            return None
        if not all(self._groups[group].is_finished for group in chosen):
            # Finished groups take the places of others only when training is about to wait.
            if self._stragglers == "wait" or trained < self.num_made - 1:
                return None
            chosen = self._finished(trained)
            if len(chosen) < self._size or self._too_many(chosen, trained):
                return None
        self.num_made += 1
        for group in chosen:
            del self._groups[group]
        return sorted(chosen)

    def _in_order(self, trained: int) -> list[int]:
        """The groups in the order in which they are trained if all are finished.

        In the order of their beginning none becomes too old. If some have overtaken others, the oldest come first.
        """
        if self._stragglers == "wait":
            return self.open
        return sorted(self.open, key=lambda group: (self._deadline(group, trained), group))

    def _finished(self, trained: int) -> list[int]:
        """The groups of a share without those that are not finished, if there are enough."""
        return [group for group in self._in_order(trained) if self._groups[group].is_finished][: self._size]

    def _deadline(self, group: int, trained: int) -> int:
        """The last iteration in which a group is not too old, or one that comes no later."""
        oldest = self._groups[group].oldest
        return (trained if oldest is None else oldest) + 1 + self._bound

    def _too_many(self, chosen: Sequence[int], trained: int) -> list[int]:
        """The groups for which no place is left within the bound if others make up the next share.

        There are places for all groups, since a rank begins no more than that; so these have been overtaken.
        """
        too_many, num_kept = list[int](), 0
        for group in (group for group in self._in_order(trained) if group not in chosen):
            if num_kept < self._size * (self._deadline(group, trained) - self.num_made - 1):
                num_kept += 1
            else:
                too_many.append(group)
        return too_many


@dataclass(frozen=True)
class AsyncState:
    """Work of a rank beyond the last training iteration.

    Attributes:
        iteration: Shares that it has handed over.
        loaded: Iterations whose prompts it has loaded.
        shard: Its place among the ranks that generate.
        portions: Relative shares of the prompts of an iteration of these ranks.
        open: Groups that are in no share yet.
        shares: Groups of the shares that have not been trained, by iteration.
    """

    iteration: int
    loaded: int
    shard: int
    portions: Sequence[int]
    open: Sequence[int]
    shares: Mapping[str, Sequence[int]]

    def to_json(self) -> str:
        """The state as JSON."""
        return json.dumps(asdict(self))

    def owed(self, made: int, loaded: int, prompts_per_step: int) -> list[int]:
        """Groups of this rank's shard that are to be begun again, if all ranks continue at the same place.

        All have handed over the shares of `made` iterations, and some rank has loaded the prompts of `loaded`.
        """
        lost = [group for iteration, groups in self.shares.items() if int(iteration) > made for group in groups]
        places = places_of_shard(self.shard, self.portions, prompts_per_step)
        unread = [load * prompts_per_step + place for load in range(self.loaded, loaded) for place in places]
        return [*self.open, *lost, *unread]


@dataclass(frozen=True)
class RemainingPrompts:
    """The prompts that a rank has yet to begin.

    Attributes:
        first: Iteration of the oldest of them.
        until: Last iteration of which some prompts may have been trained.
        groups: Those up to that iteration, of this rank's shard.
        num_left: Number of groups that the rank begins until the end of the run.
        start: Number of earlier starts of the run.
    """

    first: int
    until: int
    groups: frozenset[int]
    num_left: int
    start: int

    def wants(self, iteration: int, groups: Tensor) -> Tensor:
        """Which of the prompts of an iteration are to be begun, [n] bool; `groups` are their ids [n] int64."""
        if iteration > self.until:
            return torch.ones(len(groups), dtype=torch.bool)
        return torch.tensor([group in self.groups for group in groups.tolist()], dtype=torch.bool)


def all_prompts(size: int, steps: int) -> RemainingPrompts:
    """Prompts of a rank at the beginning of a run that gives it `size` of each iteration."""
    return RemainingPrompts(1, 0, frozenset(), size * steps, 0)


@dataclass(frozen=True)
class GroupDivision:
    """How the ranks of a loop divide the prompts of the iterations of a run, in proportion."""

    portions: Sequence[int]
    prompts_per_step: int
    steps: int


def read_async_state(
    checkpoint: Path, loop: str, ranks: ProcessGroup, division: GroupDivision, *, start: int, logged: int
) -> tuple[int, RemainingPrompts]:
    """Find what a rank owes after a checkpoint. All ranks of the loop call it together.

    Groups belong to shards by their places in an iteration, so that the ranks may be more or fewer than before. For the
    arguments and the result see `remaining_after`.

    Raises:
        RecipeError: The checkpoint does not say so, or the ranks cannot divide what is owed.
    """
    shard, num_shards = ranks.ranks.index(ranks.rank), ranks.size
    before = _read(checkpoint, loop, 0).portions
    read = [_read(checkpoint, loop, place) for place in range(shard, len(before), num_shards)]
    made, owed, differs = remaining_after(read, ranks, shard, division, start=start, logged=logged)
    if differs and num_shards > 1 and not in_proportion(division.portions, before):
        raise RecipeError.at(
            f"channels.{loop}",
            f"{checkpoint} was written by {len(before)} ranks that generate, with groups in another order than "
            f"that of the prompts, which {num_shards} cannot divide as they should: go on with the same, and portions",
        )
    return made, owed


def remaining_after(
    known: Sequence[AsyncState],
    ranks: ProcessGroup,
    shard: int | None,
    division: GroupDivision,
    *,
    start: int,
    logged: int,
) -> tuple[int, RemainingPrompts, bool]:
    """Share out what is to be begun again. All of some ranks call it together.

    Args:
        known: Earlier work of ranks, each known to one of these ranks.
        ranks: These ranks, with all that generate from now on.
        shard: Place of this rank among those that generate; None if it does not generate.
        division: Division of the prompts among the generating ranks.
        start: Number of earlier starts of the run.
        logged: Last iteration that this rank has logged, if it does; what is behind it is made again.

    Returns:
        Number of iterations that all ranks had handed over, what this rank owes, and whether that is more or less than
        what some rank hands over until the end.
    """
    what, prompts, steps = "what ranks that generate have begun", division.prompts_per_step, division.steps
    numbers = torch.tensor([[-one.iteration, one.loaded] for one in known] + [[-logged, 0]]).amax(0)
    made, loaded = (int(number) for number in ranks.max(numbers, what))
    made = -made
    own = torch.tensor([group for one in known for group in one.owed(made, loaded, prompts)])
    owed = torch.cat(ranks.gather(own.to(torch.int64), what)).tolist()
    places = range(0) if shard is None else places_of_shard(shard, division.portions, prompts)
    mine = [group for group in owed if group % prompts in places]
    needed, there = len(places) * (steps - made), len(mine) + len(places) * max(0, steps - loaded)
    differs = bool(ranks.max(torch.tensor([abs(needed - there)]), what))
    oldest = min(owed, default=loaded * prompts) // prompts
    return made, RemainingPrompts(oldest + 1, loaded, frozenset(mine), needed, start), differs


def _read(checkpoint: Path, loop: str, shard: int) -> AsyncState:
    file = checkpoint / STATE_FILE.format(loop, shard)
    try:
        return AsyncState(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RecipeError.at(
            f"channels.{loop}.mode",
            f"is continuous, but {checkpoint} is of a run that did not generate '{loop}' so: leave the mode as it was, "
            "or pass --fresh to begin anew",
        ) from None
