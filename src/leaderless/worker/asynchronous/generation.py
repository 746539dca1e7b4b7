"""Continuous generation: a rank works on groups of several iterations at once, and asks no other rank what to do.

All that happens is a step of the engine, or happens between two steps. So the number of steps is a clock, and a journal
of what happened at which step is enough to do it all again.

    weights?    yes: stop here; the loop takes them, calls `weights_taken`, and then `next` again
       | no
    grades      groups whose responses are graded are finished
    share?      yes: hand over its prompts
       | no
    cancel      groups that nobody would train
    begin       as many groups as may be
    step        of the engine, or a short wait for grades; with nothing to do, stop here for weights

`Generation.next` goes through this again and again, from the top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.data.dataloader import Dataloader
from leaderless.observability.metrics import Metrics
from leaderless.stages.context import StageContext
from leaderless.worker.asynchronous.async_grading import BackgroundGrader
from leaderless.worker.asynchronous.async_state import AsyncState, RemainingPrompts, RolloutQuota
from leaderless.worker.asynchronous.episodes import EpisodesInFlight
from leaderless.worker.asynchronous.in_flight import Advance, Events, ResponsesInFlight, Tally
from leaderless.worker.asynchronous.journal import JournalLine

if TYPE_CHECKING:
    from leaderless.worker.asynchronous.async_loop import ContinuousLoop


def rollout(batch: Batch, context: StageContext) -> Batch:
    """The stage that samples: the samples of prompts whose groups are finished, many of them begun earlier."""
    assert isinstance(context.source, Generation), "this stage is chosen where ranks generate continuously"
    return context.source.samples(batch, context)


class Generation:
    """The groups of a rank from when their prompts are loaded until they are handed over.

    Attributes:
        line: Line of the journal about the last share.
        facts: Further facts about some of its events.
        seconds: Time between the last two shares.
        grading: Grader of finished groups; None if later nodes grade them.
        script: Lines of the journal that is followed; without one, time decides when weights are taken.
        start: Number of earlier starts of the run, or changes of its plan.
    """

    line: JournalLine
    facts: Sequence[Mapping[str, Json]]

    def __init__(
        self,
        loader: Dataloader,
        load: Callable[[], Batch],
        in_flight: ResponsesInFlight | EpisodesInFlight,
        quota: RolloutQuota,
        arrivals: ContinuousLoop,
        remaining: RemainingPrompts,
        events: Events,
        beat: Callable[[], None],
    ) -> None:
        """Begin nothing yet.

        Args:
            loader: Loader of this rank's prompts.
            load: Function that lets it load the prompts of one more iteration.
            in_flight: Groups in flight in the engine.
            quota: Rule that decides which groups are begun and handed over.
            arrivals: Loop of this rank, which takes the weights that training sends.
            remaining: Prompts that this rank has yet to begin.
            events: Record of events between the steps of the engine, shared with `in_flight`.
            beat: Function that is called as a sign of life.
        """
        self._loader, self._load_next, self._in_flight = loader, load, in_flight
        self._quota, self._arrivals = quota, arrivals
        self._remaining, self._events, self._beat = remaining, events, beat
        self.grading: BackgroundGrader | None = None
        self.script: Iterator[JournalLine] | None = None
        self._pending: list[Batch] = []  # prompts that are loaded and not begun, one each
        self._again: list[Batch] = []  # prompts of canceled groups; they come after all others
        self._prompts: dict[int, Batch] = {}  # of groups that are open
        self._handed: dict[int, list[int]] = {}  # groups of shares that are not trained
        self._canceled: list[int] = []
        # What comes before `first` has been trained: the loader begins behind it.
        self._num_loaded = remaining.first - 1
        loader.position = self._num_loaded * loader.recipe.batch.prompts_per_step
        self._num_left = remaining.num_left
        self.start, self._trained_before = remaining.start, arrivals.trained
        self._expected: JournalLine | None = None
        self._has_line = False  # of the share of the next iteration
        self._begin_s, self.seconds = time.perf_counter(), 0.0

    def next(self) -> Batch | None:
        """Work until the share of the next iteration is complete; returns its prompts.

        None if weights are to be taken before: whoever takes them calls `weights_taken`, and then this again.
        """
        # Weights may interrupt a share, and this is called again: its line of the journal is begun once.
        if not self._has_line:
            self._open_line()
        while not self._is_time_for_weights():  # as early as possible: every token sampled before is one update older
            # Grades first, as they finish groups; then a share, so that no group is canceled that could be handed over;
            # then room for others, which canceled groups leave.
            self._take_grades()
            share = self._quota.take(self._arrivals.trained)
            if share is not None:
                return self._hand_over(share)
            self._cancel()
            self._begin()
            if self._in_flight.is_busy:
                self._note(self._in_flight.step())
            elif self._waits_for_weights():
                return None
            self._beat()
        return None

    def weights_taken(self) -> None:
        """Go on with the weights of one more iteration, which the engine has now."""
        trained = self._arrivals.trained
        # Weights that had come before a start of the run that is followed are taken without an event.
        if trained > self._trained_before:
            self._events.note("weights", trained)
        # An evaluation may have sampled tokens of groups with these weights: that must be noted before others come.
        self._note(self._in_flight.collect())
        # What is trained need not be handed over again after a checkpoint.
        self._handed = {made: groups for made, groups in self._handed.items() if made > trained}

    def samples(self, prompts: Batch, context: StageContext) -> Batch:
        """The samples of a share, which leave the engine."""
        return self._in_flight.samples(prompts, context, self.seconds)

    def report(self, metrics: Metrics) -> None:
        """Report what has been generated since the last report."""
        tally, self._in_flight.tally = self._in_flight.tally, Tally()
        metrics.mean("generation/response_tokens", tally.tokens, tally.responses)
        metrics.total("generation/voided_tokens", tally.voided)
        metrics.total("generation/canceled", len(self.line["canceled"]))
        first = 1 + (self.line["iteration"] - 1) * self._loader.recipe.batch.prompts_per_step
        deferred = sum(group + 1 < first for group in self.line["groups"])
        metrics.total("generation/deferred", deferred)
        metrics.total("generation/open", len(self._quota.open))

    def snapshot(self) -> AsyncState:
        """Work to be done again if the run continues from now."""
        trained = self._arrivals.trained
        waiting = [int(prompt.ids) for prompt in (*self._pending, *self._again)]
        # Those up to `until` that come with iterations that are not loaded.
        unread = self._num_loaded * self._loader.recipe.batch.prompts_per_step
        waiting += [group for group in self._remaining.groups if group >= unread]
        return AsyncState(
            iteration=self._quota.num_made,
            loaded=self._num_loaded,
            shard=self._loader.shard,
            portions=self._loader.portions,
            open=sorted({*self._quota.open, *waiting}),
            shares={str(made): groups for made, groups in self._handed.items() if made > trained},
        )

    def leave(self) -> None:
        """Let the engine forget all that is in flight, as it is used otherwise from now on."""
        self._in_flight.reset()

    def _note(self, advances: Sequence[Advance]) -> None:
        for advance in advances:
            if advance.has_begun:
                self._quota.sampled(advance.group, self._arrivals.trained)
            if advance.is_finished and self.grading is not None:
                # Not finished yet: a share is handed over with its grades.
                assert isinstance(self._in_flight, ResponsesInFlight), "episodes are graded with their share"
                self.grading.begin(self._prompts[advance.group], self._in_flight.responses_of(advance.group))
            elif advance.is_finished:
                self._quota.finish(advance.group)

    def _begin(self) -> None:
        room = min(self._quota.room(self._arrivals.trained), self._num_left)
        # Prompts of canceled groups are loaded already.
        while len(self._pending) < min(room, self._num_left - len(self._again)):
            self._load()
        chosen, self._pending = self._pending[:room], self._pending[room:]
        if len(chosen) < room:
            first = room - len(chosen)
            chosen, self._again = [*chosen, *self._again[:first]], self._again[first:]
        if chosen:
            self._in_flight.begin(Batch.concat(chosen))
            groups = [int(prompt.ids) for prompt in chosen]
            self._prompts |= zip(groups, chosen, strict=True)
            self._quota.begin(groups)
            self._num_left -= len(chosen)

    def _load(self) -> None:
        """Load the prompts of one more iteration, but for those that are trained already."""
        self._num_loaded += 1
        prompts = self._load_next()
        is_wanted = self._remaining.wants(self._num_loaded, prompts.ids)
        self._pending += [prompts.select(torch.tensor([row])) for row in is_wanted.nonzero().squeeze(1).tolist()]

    def _cancel(self) -> None:
        """Cancel groups that nobody would train; of a journal, those that were canceled at this step."""
        if self._expected is not None and not self._events.is_due("cancel"):
            return
        for group in self._quota.overdue(self._arrivals.trained):
            self._events.note("cancel", group)
            self._in_flight.cancel(group)
            if self.grading is not None:
                self.grading.forget(group)
            self._again.append(self._prompts.pop(group))
            self._canceled.append(group)
            self._num_left += 1

    def _take_grades(self) -> None:
        """Finish the groups that have been graded; of a journal, those that had been at this step of the engine."""
        if self.grading is None:
            return
        if self._expected is None:
            for group in self.grading.finished():
                self._finish(group)
            return
        # The thread that grades is faster or slower than it was: what counts is the step at which grades were taken.
        while (due := self._events.due()) is not None and due[0] == "graded":
            if not self.grading.await_group(due[1], self._beat):
                raise self._unlike(f"has not finished group {due[1]}")
            self._finish(due[1])

    def _finish(self, group: int) -> None:
        self._events.note("graded", group)
        self._quota.finish(group)

    def _is_time_for_weights(self) -> bool:
        """Whether weights have come; of a journal, whether they had come at this step of the engine."""
        if self._expected is None:
            return self._arrivals.is_there()
        return self._arrivals.trained < self._trained_before or self._events.is_due("weights")

    def _waits_for_weights(self) -> bool:
        """Whether nothing goes on without new weights, as there is nothing to generate; else wait for grades."""
        if self._expected is not None:
            # Nothing can be done, and the journal has no event here: this run has gone another way.
            if not (self._events.is_due("graded") or self._events.is_due("weights")):
                raise self._unlike("waits for weights")
        elif self.grading is not None and self.grading.is_busy:
            self.grading.wait()
        else:
            return True
        return False

    def _hand_over(self, share: list[int]) -> Batch:
        iteration, now = self._quota.num_made, time.perf_counter()
        self.seconds, self._begin_s = now - self._begin_s, now
        self.line = JournalLine(
            iteration=iteration,
            start=self.start,
            trained=self._trained_before,
            steps=self._events.steps,
            events=self._events.happened,
            groups=share,
            canceled=self._canceled,
        )
        # The whole line is compared: a difference that shows only later could not be explained.
        if self._expected is not None and self._expected != self.line:
            raise self._unlike(f"has handed over groups {_some(share)}")
        if self.grading is not None:
            self.grading.hand_over(share)
        self._handed[iteration] = share
        self._has_line = False
        self.facts, self._events.facts = self._events.facts, []
        self._events.happened, self._canceled = [], []
        return Batch.concat([self._prompts.pop(group) for group in share])

    # Following a journal

    def _open_line(self) -> None:
        self._has_line = True
        if self.script is not None:
            self._expected = next(self.script, None)
            if self._expected is None:
                iteration = self._quota.num_made + 1
                raise RuntimeError(f"the journal that is followed ends before iteration {iteration}: set `steps` lower")
            self._events.expected = self._expected["events"]
            if self._expected["start"] != self.start:
                self._start_anew(self._expected)
                return
        self._trained_before = self._arrivals.trained

    def _start_anew(self, line: JournalLine) -> None:
        """Do what the run that is followed did when it was started again: everything that was in flight is lost."""
        self.start = line["start"]
        self._in_flight.reset()
        if self.grading is not None:
            self.grading.reset()
        # A process counts from its own start, and the other one has begun again here.
        self._events.steps = 0
        lost = self._quota.forget()
        # They are begun once more, in the order of the data, as a start from a checkpoint does it.
        self._num_left += len(lost)
        waiting = [*(self._prompts.pop(group) for group in lost), *self._pending, *self._again]
        self._pending, self._again = sorted(waiting, key=lambda prompt: int(prompt.ids)), []
        self._trained_before = max(self._arrivals.trained, line["trained"])  # up to there, weights are no events

    def _unlike(self, what: str) -> RuntimeError:
        assert self._expected is not None
        steps, groups = self._expected["steps"], _some(self._expected["groups"])
        return RuntimeError(
            f"iteration {self._expected['iteration']}: this rank {what} at step {self._events.steps} of its engine, "
            f"but the run that is followed has handed over groups {groups} after {steps} steps: it must have the same "
            "recipe, engine and number of threads"
        )


def _some(groups: Sequence[int]) -> str:
    return ", ".join(map(str, groups[:5])) + (", ..." if len(groups) > 5 else "")
