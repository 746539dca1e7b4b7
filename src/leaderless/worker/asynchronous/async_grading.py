"""Grades responses while their rank generates others: a thread does it, group by group as they are finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from leaderless.data.batch import Batch
from leaderless.observability.clock import Clock
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import Completion
from leaderless.stages.context import Grader

Asked = tuple[RewardInput, str | None]
"""A response, and the source of its row."""
WAIT_S = 0.05
"""Longest time until a rank without other work looks for new weights again."""


END_S = 5.0
"""Time that the thread has to end."""


@dataclass(eq=False)
class _Work:
    """The responses of a group, what they are worth, once that is there, and whether the rank's own thread knows."""

    group: int
    asked: Sequence[Asked]
    graded: list[Graded] = field(default_factory=list)
    is_known: bool = False


class BackgroundGrader:
    """Grades of groups that are in no share yet or in the last share."""

    def __init__(
        self, grade: Grader, asked_of: Callable[[Batch, Sequence[Completion]], Sequence[Asked]], clock: Clock
    ) -> None:
        """Grade nothing yet.

        `grade` is called in a thread, and here for what is not graded ahead. `asked_of` says what to grade, from a
        batch of one prompt and the responses to it.
        """
        self._grade, self._asked_of, self._clock = grade, asked_of, clock
        self._open: dict[int, _Work] = {}
        self._ready: list[tuple[Asked, Graded]] = []
        self._wanted: SimpleQueue[_Work | None] = SimpleQueue()
        self._come: SimpleQueue[_Work | Exception] = SimpleQueue()
        self._has_come = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether something is being graded, or `finished` has not said yet that it is."""
        return any(not work.is_known for work in self._open.values())

    def begin(self, prompt: Batch, responses: Sequence[Completion]) -> None:
        """Have the responses to a prompt graded."""
        group = int(prompt.ids)
        self._open[group] = work = _Work(group, self._asked_of(prompt, responses))
        self._wanted.put(work)

    def finished(self) -> list[int]:
        """Groups that have been graded since this was last asked.

        Raises:
            Exception: They cannot be graded.
        """
        self._has_come.clear()
        found: list[int] = []
        while not self._come.empty():
            work = self._come.get()
            if isinstance(work, Exception):
                raise work
            work.is_known = True
            if self._open.get(work.group) is work:
                found.append(work.group)
        return found

    def wait(self) -> None:
        """Wait until something has been graded, but not for long."""
        with self._clock.doing("grade"):
            self._has_come.wait(WAIT_S)

    def await_group(self, group: int, beat: Callable[[], None]) -> bool:
        """Wait until a group has been graded, if it has been begun; a function is called as a sign of life."""
        if group not in self._open:
            return False
        while not self._open[group].graded:
            self.finished()
            self.wait()
            beat()
        return True

    def hand_over(self, groups: Sequence[int]) -> None:
        """Let `grade` know the grades of a share."""
        works = [self._open.pop(group) for group in groups]
        self._ready = [pair for work in works for pair in zip(work.asked, work.graded, strict=True)]

    def forget(self, group: int) -> None:
        """Forget a group that is canceled; perhaps it has not been begun."""
        self._open.pop(group, None)

    def reset(self) -> None:
        """Forget all groups."""
        self._open.clear()

    def grade(self, samples: Sequence[RewardInput], sources: Sequence[str | None]) -> list[Graded]:
        """Grade samples, except those that were graded ahead."""
        known: dict[tuple[str, str | None], list[tuple[Asked, Graded]]] = {}
        for asked, graded in self._ready:
            known.setdefault((asked[0].response, asked[1]), []).append((asked, graded))
        found: list[Graded | None] = []
        for asked in zip(samples, sources, strict=True):
            some = known.get((asked[0].response, asked[1]), [])
            place = next((place for place, one in enumerate(some) if one[0] == asked), None)
            found.append(None if place is None else some.pop(place)[1])
        left = [place for place, graded in enumerate(found) if graded is None]
        if left:
            new = iter(self._grade([samples[place] for place in left], [sources[place] for place in left]))
            return [next(new) if graded is None else graded for graded in found]
        return [graded for graded in found if graded is not None]

    def close(self) -> None:
        """End the thread, after what it is grading."""
        self._wanted.put(None)
        self._thread.join(END_S)

    def _run(self) -> None:
        """Grade all that is wanted, as much at a time as there is; None comes last."""
        while True:
            works = [self._wanted.get()]
            while works[-1] is not None and not self._wanted.empty():
                works.append(self._wanted.get())
            if works[-1] is None:
                return
            asked = [one for work in works if work is not None for one in work.asked]
            try:
                graded = iter(self._grade([sample for sample, _ in asked], [source for _, source in asked]))
                for work in filter(None, works):
                    work.graded = [next(graded) for _ in work.asked]
                    self._come.put(work)
            except Exception as error:  # noqa: BLE001 - the rank's own thread raises it
                self._come.put(error)
            self._has_come.set()
