"""Which groups a rank that generates continuously may begin, and which of them it hands over in an iteration.

A group is trained in the iteration into whose share it comes. Iteration k trains weights that iteration k - 1 has left,
so that a group whose oldest token was sampled with the weights of iteration v is k - 1 - v iterations old then. Nothing
here asks another rank: the same events in the same order give the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable
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
            last: Last iteration of the run, whose share takes all that is left.
            depth: Iterations that the rank may be ahead.
            bound: Largest age of a group when it is trained, in iterations; at least `depth`.
            stragglers: What happens to groups that are not finished when training needs rows.
            num_made: Shares that were handed over before.
        """
        assert bound >= depth, "a bound below the depth cannot be kept"
        self._size, self._last, self._depth, self._bound, self._stragglers = size, last, depth, bound, stragglers
        self.num_made = num_made
        self._groups: dict[int, _Group] = {}
        self._has_more = True

    @property
    def open(self) -> list[int]:
        """The groups that have been begun, and neither handed over nor given up."""
        return sorted(self._groups)

    def room(self, trained: int) -> float:
        """Number of further groups that may be begun when the weights of an iteration have come."""
        ahead = trained + self._depth + 1
        if ahead >= self._last:
            return float("inf")  # whatever is left is trained within the bound
        return max(0, self._size * ahead - self._size * self.num_made - len(self._groups))

    def begin(self, groups: Iterable[int]) -> None:
        """Note that groups have been begun."""
        self._groups |= {group: _Group() for group in groups}

    def forget(self) -> list[int]:
        """Forget all groups that are in no share; returns them, ascending."""
        forgotten = self.open
        self._groups.clear()
        self._has_more = True
        return forgotten

    def end_of_data(self) -> None:
        """Note that there are no more groups to begin."""
        self._has_more = False

    def sampled(self, group: int, trained: int) -> None:
        """Note that tokens of a group have been sampled with the weights of an iteration."""
        one = self._groups[group]
        one.oldest = trained if one.oldest is None else min(one.oldest, trained)

    def finish(self, group: int) -> None:
        """Note that a group is finished."""
        self._groups[group].is_finished = True

    def overdue(self, trained: int) -> list[int]:
        """Give up groups that would become too old, if training waits and others can take their places."""
        if self._stragglers != "cancel" or trained < self.num_made or self.num_made + 1 >= self._last:
            return []
        finished = sum(one.is_finished for one in self._groups.values())
        late = [group for group in self._due() if not self._groups[group].is_finished]
        if finished < self._size:
            return []
        for group in late:
            del self._groups[group]
        return late

    def take(self, trained: int) -> list[int] | None:
        """The groups of the next share, ascending; None if it is not complete."""
        due, is_last = self._due(), self.num_made + 1 == self._last
        order = [*due, *(group for group in self.open if group not in due)]
        wanted = len(order) if is_last else max(self._size, len(due))
        if self._has_more and (is_last or len(order) < wanted):
            return None
        chosen = order[:wanted]
        if not all(self._groups[group].is_finished for group in chosen):
            # Finished groups take the places of others only when training is about to wait.
            if self._stragglers == "wait" or is_last or trained < self.num_made - 1:
                return None
            if not all(self._groups[group].is_finished for group in due):
                return None
            chosen = [group for group in order if self._groups[group].is_finished][:wanted]
            if len(chosen) < wanted:
                return None
        self.num_made += 1
        for group in chosen:
            del self._groups[group]
        return sorted(chosen)

    def _due(self) -> list[int]:
        """The groups that would be too old in the iteration after the next share, ascending."""
        oldest = self.num_made + 1 - self._bound
        return [group for group in self.open if (age := self._groups[group].oldest) is not None and age < oldest]
