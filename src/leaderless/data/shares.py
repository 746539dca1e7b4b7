"""The groups that a rank with continuous generation may begin, and those that it hands over in an iteration.

A group is trained in the iteration into whose share it comes. Iteration k trains weights that iteration k - 1 has left,
so that a group whose oldest token was sampled with the weights of iteration v is k - 1 - v iterations old then. Nothing
here asks another rank: the same events in the same order give the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leaderless.config.channels import Stragglers


@dataclass
class _Group:
    """A group that has been begun; `oldest` is the iteration whose weights sampled its oldest token."""

    oldest: int | None = None
    is_finished: bool = False


class Shares:
    """The groups of a rank that are in no share yet.

    Attributes:
        num_made: Number of shares that have been handed over.
    """

    def __init__(
        self, size: int, last: int, *, depth: int, bound: int, stragglers: Stragglers = "wait", num_made: int = 0
    ) -> None:
        """Begin after some shares.

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
        """The groups that have been begun, and neither handed over nor given up."""
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
        """Give up groups that would become too old, if training waits and other groups can take their places.

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
