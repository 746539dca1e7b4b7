"""The ends that a rank has of the channels between its loop and another one.

A rank posts the output of an iteration and continues. A thread of the channel, the lane, sends the posts in order, each
when the ranks at the other end receive it. The lane and the receivers have process groups to themselves.

    loop that generates                                 loop that trains
    push -> outbox, lane     === note k, rows k ===>      pull_rows
    take_weights <- inbox    <=== weights k, note k ===   lane, outbox <- push, end_iteration

Each loop does this in its iteration k, whenever it gets there. Only where === is drawn, ranks of both ends meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.data.buffer.databuffer import Databuffer
from leaderless.data.buffer.reshard import reshard
from leaderless.data.buffer.row_agreement import Span, span_of
from leaderless.distributed.background import Inbox, Outbox
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.observability.clock import State, Tracer
from leaderless.observability.line_file import LineFile
from leaderless.planner import Channel, Plan, Reshard, format_ranks
from leaderless.planner.plan import metric_pools
from leaderless.worker.agreement import LOG, StepEnd
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.checkpoint.channel_rows import load_rows, save_rows

LANE = 2
"""Lane of the first channel in the trace of a rank."""
MEETING = "meeting"
"""Name of the lane in which the ranks of the loop that trains wait until the other loop is where they are."""
Held = Mapping[Reshard, Batch]
"""Input of a rank to a channel in one iteration: its rows for each reshard that it is a source of."""
Flight = dict[tuple[str, int], dict[Reshard, Batch]]
"""Rows that a rank has put into channels and that are not trained yet, by channel and iteration."""


@dataclass(frozen=True)
class Note:
    """The note that goes with each iteration through a channel: a few bytes from every rank to every other.

    Attributes:
        iteration: Iteration of the source.
        is_asked_to_stop: A signal has asked some rank of either end to stop.
        is_stopping: The run stops after the training iteration of this number.
        is_checkpoint_due: A checkpoint is due after the training iteration of this number.
        is_abandoned: Some rank has not made its output, since the run stops.
    """

    iteration: int
    is_asked_to_stop: bool = False
    is_stopping: bool = False
    is_checkpoint_due: bool = False
    is_abandoned: bool = False

    def exchange(self, process_group: ProcessGroup, channel: str) -> Note:
        """Combine the notes of all ranks; a flag of one rank holds for all. All ranks of both ends call it together.

        Raises:
            RuntimeError: The ranks are not at the same iteration.
        """
        # The negated iteration gives the lowest one, so that a single maximum compares all ranks.
        numbers = torch.tensor([-self.iteration, *map(int, astuple(self))])
        lowest, highest, *flags = process_group.max(numbers, f"channel {channel}").tolist()
        if -lowest != highest:
            raise RuntimeError(
                f"rank {process_group.rank}: channel {channel} is at iteration {-lowest} on some rank, and at "
                f"{highest} on another"
            )
        return Note(highest, *map(bool, flags))


class Channels:
    """Puts what an iteration has made into channels, and takes out what one needs.

    Whether some rank is asked to stop goes with everything that is sent, to both ends; what the training loop decides
    goes with its weights. So loops agree without waiting for each other in every iteration.

    Attributes:
        is_asked_to_stop: Function that says whether a signal has asked this rank to stop.
        weights: Weights that arrive while this rank generates.
    """

    def __init__(self, parts: Parts, progress: Progress, buffer: Databuffer, tracer: Tracer) -> None:
        self._parts, self._progress, self._buffer, self._tracer = parts, progress, buffer, tracer
        rank, timeout_s = parts.transport.rank, parts.recipe.run.timeout_s
        continuous = {loop.name for loop in parts.plan.continuous_loops}
        self.is_asked_to_stop: Callable[[], bool] = lambda: False
        self._is_other_asked_to_stop = False
        ends = [channel for channel in between_loops(parts.plan) if rank in ranks_of(channel)]
        self._lanes = {channel.name: LANE + place for place, channel in enumerate(ends)}
        self._from_here = [channel for channel in ends if rank in channel.source_ranks]
        self._to_here = [channel for channel in ends if rank in channel.target_ranks]
        # Ranks that generate continuously go through iterations on their own, and meet where they send and receive.
        self._unpaced_sources = {channel.name for channel in ends if channel.source in continuous}
        self._unpaced_targets = {channel.name for channel in ends if channel.target in continuous}
        self._outboxes = {
            channel.name: Outbox(
                channel.name, channel.capacity, patience(channel) * timeout_s, parts.transport.activity
            )
            for channel in self._from_here
        }
        longest_s = max((patience(channel) for channel in ends), default=1) * timeout_s
        self.weights = Inbox("the weights", self._fetch_weights, longest_s, parts.transport.activity)
        # Rows stay here until they are trained, as a checkpoint holds those that were in flight after its step.
        self._rows: dict[tuple[str, int], Held] = {}
        self._journals = {
            channel.name: LineFile(parts.directory.journal_of(channel.name), "iteration", parts.directory.may_fail)
            for channel in parts.plan.channels
            if rank == _journaling_rank(parts.plan, channel)
        }

    @property
    def is_stop_wanted(self) -> bool:
        """Whether a signal has asked this rank to stop, or a rank at the other end of a channel."""
        return self._is_other_asked_to_stop or self.is_asked_to_stop()

    def open_journals(self) -> None:
        """Continue the journals after what has been trained: what is in flight is sent, and written down, anew."""
        for journal in self._journals.values():
            journal.cut_after(self._progress.trained)

    def note_surplus(self, carried: Span) -> None:
        """Write down how many groups wait for the next iteration of the same loop, the first and the last."""
        for channel in self._parts.plan.channels:
            if not channel.transfers:
                self._note(channel, self._progress.step, carried._asdict())

    def make_room(self) -> None:
        """Wait until another iteration may be begun, whose output will be in flight too."""
        for channel in self._from_here:
            with self._waiting("wait_credit", channel, self._progress.step - channel.capacity):
                self._outboxes[channel.name].make_room()

    def check(self) -> None:
        """Raise what a lane has failed at, if one has."""
        for outbox in self._outboxes.values():
            outbox.check()

    def push(self, channel: Channel) -> None:
        """Put what the iteration has made into a channel, which sends it at once, before `end_iteration`."""
        iteration = self._progress.step
        if channel.sync is None:
            self._post_rows(channel, iteration, self._buffer.outgoing(channel))
            return
        # A copy is begun now, as training changes the weights while the lane waits to send them.
        send = partial(self._send_weights, channel, iteration, self._parts.roles.copy_weights(channel.sync))
        self._outboxes[channel.name].post(iteration, send)

    def pull_rows(self, channel: Channel) -> None:
        """Take the rows that the iteration works on out of a channel."""
        iteration = self._progress.step
        with self._waiting("wait_rows", channel, iteration):
            # The same order as in `_send_rows`: first the note, which says whether rows follow.
            note = self._exchange(channel, Note(iteration))
        if not note.is_abandoned:
            self._buffer.incoming(channel)

    def take_weights(self) -> Note:
        """Load the weights that the next training iteration leaves, after waiting for them; returns what is noted.

        They arrive while this rank does something else, from `weights.begin` on.
        """
        iteration = self._progress.trained + 1
        with self._parts.clock.doing("wait_weights"), self._tracer.span("wait(weights)", iteration):
            loads, note = self.weights.take()
        with self._parts.clock.doing("weights"), self._tracer.span("weights", iteration):
            # In this thread, which also steps the engine; the inbox only fills memory.
            for load in loads:
                load()
        self._progress.trained = iteration
        self._rows = {key: held for key, held in self._rows.items() if key[1] > iteration}
        return note

    def _fetch_weights(self, iteration: int) -> tuple[Sequence[Callable[[], None]], Note]:
        """Receive the weights that a training iteration has left, and what is noted with them; the inbox does it.

        What is noted comes at the end of the iteration, so that the weights of all roles are received before.
        """
        note, loads = Note(iteration), list[Callable[[], None]]()
        arriving = [(channel, channel.sync) for channel in self._to_here if channel.sync is not None]
        for channel, sync in arriving:
            with self._tracer.span(f"receive({channel.name})", iteration, self._lanes[channel.name]):
                loads.append(self._parts.roles.fetch(sync, partial(self._parts.transport.lane, channel.name)))
        # The loop that trains puts the same note behind the weights of each role.
        for channel, _ in arriving:
            note = self._exchange(channel, Note(iteration))
        return loads, note

    def end_iteration(self, end: StepEnd) -> None:
        """Send what the loop has agreed on after a training iteration, behind its weights."""
        for channel in self._from_here:
            if channel.sync is None:
                continue
            iteration = self._progress.step
            version = self._parts.roles.trained()[channel.sync.role].policy_version
            self._note(channel, iteration, {"policy_version": version})
            note = Note(iteration, is_stopping=end.is_stopping, is_checkpoint_due=end.is_checkpoint_due)
            # Behind the weights, which the same outbox sends in order.
            self._outboxes[channel.name].post(iteration, partial(self._exchange, channel, note))

    def meet(self) -> None:
        """Wait until both loops are behind the last training iteration. The ranks of both call it together.

        The loop that generates may be iterations away, and what follows waits no longer than for an iteration. With a
        fixed lag, weights are often received long before its ranks come to them, so that these report it. Ranks that
        generate continuously come soon, and may be receiving the next weights already.
        """
        place = Note(self._progress.trained)
        channels = [channel for channel in self._from_here if channel.sync is not None]
        for channel in channels:
            if channel.name not in self._unpaced_targets:
                self._outboxes[channel.name].post(place.iteration, partial(self._exchange, channel, place))
        for channel in channels:
            self._outboxes[channel.name].finish()
        for channel in self._to_here:
            if channel.sync is not None and channel.name not in self._unpaced_targets:
                self._exchange(channel, place)
        ranks = _meeting_ranks(self._parts.plan)
        if self._parts.transport.rank in ranks:
            self._parts.transport.lane(MEETING, ranks).max(torch.zeros(1), "the loop that generates")

    def finish(self) -> None:
        """Leave nothing in flight: rows that will not be trained are taken out by the loop that they were for."""
        # The lane at the other end waits until this end receives, and the run could not end.
        for channel in self._to_here:
            if channel.kind == "rows":
                for iteration in self._left(channel):
                    if not self._exchange(channel, Note(iteration)).is_abandoned:
                        self._buffer.incoming(channel)
                    self._buffer.clear()
        for channel in self._from_here:
            if channel.kind == "rows" and channel.name in self._unpaced_sources:
                # Ranks may stop in different iterations: those that have not made one say so, or others would wait for
                # their notes.
                self._abandon_later(channel, self._left(channel))
        for outbox in self._outboxes.values():
            outbox.finish()

    def drain(self, iterations: range) -> None:
        """End the lanes' waiting to send rows of these iterations, which stay where they were made.

        All ranks call it together, with the loops at the place of a checkpoint. Some may not have made the last ones.
        """
        for channel in self._to_here:
            if channel.kind == "rows":
                for iteration in iterations:
                    self._exchange(channel, Note(iteration, is_abandoned=True))
        for channel in self._from_here:
            if channel.kind == "rows":
                self._abandon_later(channel, iterations)
        for outbox in self._outboxes.values():
            outbox.finish()

    def flight(self) -> Flight:
        """The rows of this rank that are in flight, at the place of a checkpoint."""
        return {key: dict(held) for key, held in self._rows.items()}

    def refill(self, flight: Flight) -> None:
        """Put rows into their channels again."""
        for (name, iteration), held in sorted(flight.items(), key=lambda one: one[0]):
            self._post_rows(self._parts.plan.channel(name), iteration, held)

    def _abandon_later(self, channel: Channel, iterations: range) -> None:
        """Let a lane say, behind what it has to send, that this rank has not made some iterations."""
        for iteration in iterations:
            if iteration > self._progress.step:
                note = Note(iteration, is_abandoned=True)
                self._outboxes[channel.name].post(iteration, partial(self._exchange, channel, note))

    def _left(self, channel: Channel) -> range:
        """Iterations whose rows may be in flight when the run stops."""
        first = self._progress.trained + 1
        # A rank that generates continuously may complete one more share before it has to wait for weights.
        num_ahead = channel.capacity + (channel.name in self._unpaced_sources)
        return range(first, min(first + num_ahead, self._parts.recipe.steps + 1))

    def close(self) -> None:
        """End the lanes."""
        for outbox in self._outboxes.values():
            outbox.close()
        self.weights.close()

    def contents(self) -> list[Callable[[Path], None]]:
        """Functions that write this rank's share of the rows in flight into the folder of a checkpoint."""
        rank, saves = self._parts.transport.rank, list[Callable[[Path], None]]()
        for channel in self._from_here:
            for iteration in self._in_flight():
                for action, batch in self._rows.get((channel.name, iteration), {}).items():
                    layout, name = action.source_layout, _file_of(channel, iteration, action)
                    if layout.represents(rank):
                        saves.append(
                            partial(save_rows, batch, name=name, shard=layout.shard_of(rank), num_shards=layout.dp)
                        )
        return saves

    def resume(self, checkpoint: Path) -> None:
        """Put the rows of a checkpoint into their channels again.

        Raises:
            RuntimeError: The checkpoint does not hold them.
        """
        rank = self._parts.transport.rank
        for channel in self._from_here:
            for iteration in self._in_flight() if channel.kind == "rows" else ():
                held: dict[Reshard, Batch] = {}
                for action in channel.reshards:
                    layout = action.source_layout
                    if rank not in layout:
                        continue
                    rows = load_rows(checkpoint, _file_of(channel, iteration, action), layout.shard_of(rank), layout.dp)
                    if rows is None:
                        raise RuntimeError(f"{checkpoint} has no rows of iteration {iteration} of {channel.name}")
                    held[action] = rows
                self._post_rows(channel, iteration, held)

    def _in_flight(self) -> range:
        return range(self._progress.trained + 1, self._progress.step + 1)

    def _send_weights(self, channel: Channel, iteration: int, send: Callable[[ProcessGroup], None]) -> None:
        """Send the weights of an iteration; the lane does it."""
        assert channel.sync is not None, "only a channel that carries weights sends some"
        with self._tracer.span(f"send({channel.name})", iteration, self._lanes[channel.name]):
            send(self._parts.transport.lane(channel.name, channel.sync.ranks))

    def _post_rows(self, channel: Channel, iteration: int, held: Held) -> None:
        # Batches are never changed, so that the lane can send them later without a copy.
        self._rows[channel.name, iteration] = held
        self._outboxes[channel.name].post(iteration, partial(self._send_rows, channel, iteration, held))

    def _send_rows(self, channel: Channel, iteration: int, held: Held) -> None:
        """Send the rows of an iteration; the lane does it."""
        with self._tracer.span(f"send({channel.name})", iteration, self._lanes[channel.name]):
            # A rank has not made its part, so that nothing is sent: what others have made would be no whole iteration.
            if self._exchange(channel, Note(iteration)).is_abandoned:
                return
            self._note_rows(channel, iteration, held)
            # Ranks that only meet here could not compare when they made the rows.
            if channel.name in self._unpaced_sources:
                for action, batch in held.items():
                    self._buffer.compare(
                        action.source, batch, self._parts.transport.lane(channel.name, channel.source_ranks)
                    )
            for action, batch in held.items():
                reshard(action, self._parts.transport.lane(channel.name, action.ranks), batch, None)

    @contextmanager
    def _waiting(self, state: State, channel: Channel, iteration: int) -> Iterator[None]:
        """A wait for the other end of a channel; the trace shows which iteration and which ranks it is for."""
        ranks = channel.target_ranks if channel in self._from_here else channel.source_ranks
        with self._parts.clock.doing(state), self._tracer.span(wait_for(channel), self._progress.step) as facts:
            facts.update(state=state, iteration=iteration, ranks=format_ranks(ranks))
            yield

    def _exchange(self, channel: Channel, note: Note) -> Note:
        """Combine what the ranks of both ends note; all of them call it together."""
        # Read here and not where the note is made, which may have waited in the lane for iterations.
        mine = replace(note, is_asked_to_stop=self.is_asked_to_stop())
        agreed = mine.exchange(self._parts.transport.lane(channel.name, ranks_of(channel)), channel.name)
        if agreed.is_asked_to_stop:
            self._is_other_asked_to_stop = True
        return agreed

    def _note_rows(self, channel: Channel, iteration: int, held: Held) -> None:
        """Write down which rows go into a channel. The lanes of all ranks that put some in call it together."""
        process_group = self._parts.transport.lane(channel.name, channel.source_ranks)
        groups, versions, num_rows = _NOTHING, _NO_VERSION, 0
        for action, batch in held.items():
            if not action.source_layout.represents(process_group.rank):
                continue
            groups, num_rows = batch.group_ids, len(batch)
            if "policy_versions" in batch.columns and len(values := batch.jagged("policy_versions").values):
                # The oldest is negated too, so that one maximum finds both ends.
                versions = torch.stack([values.max(), -values.min()]).long()
        what = f"the rows of channel {channel.name}"
        span = span_of(process_group, groups.numpy(), what)
        newest, oldest = process_group.max(versions, what).tolist()
        facts: dict[str, Json] = {
            "groups": span.groups,
            "rows": int(process_group.sum(torch.tensor([num_rows]), what)),
            "first_group": span.first_group,
            "last_group": span.last_group,
            "policy_versions": [-oldest, newest] if newest >= 0 else None,
        }
        self._note(channel, iteration, facts)

    def _note(self, channel: Channel, iteration: int, facts: Mapping[str, Json]) -> None:
        if channel.name in self._journals:
            self._journals[channel.name].append({"iteration": iteration, **facts})


_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_VERSION = torch.tensor([-1, torch.iinfo(torch.int64).min])
"""The newest of no versions, and the oldest, negated."""


def between_loops(plan: Plan) -> list[Channel]:
    """The channels that join two loops; surplus stays on its ranks."""
    return [channel for channel in plan.channels if channel.transfers]


def ranks_of(channel: Channel) -> tuple[int, ...]:
    """The ranks of both ends of a channel, ascending."""
    return tuple(sorted({*channel.source_ranks, *channel.target_ranks}))


def wait_for(channel: Channel) -> str:
    """Name of the spans in which a rank waits for the other end of a channel."""
    return f"wait({channel.name})"


def patience(channel: Channel) -> int:
    """Iterations that one end of a channel may have to wait for: weights for all that the other loop is ahead."""
    return 1 if channel.kind == "rows" else channel.capacity + 1


def add_process_groups(plan: Plan, transport: Transport) -> None:
    """Make the process groups of all channels. All ranks of the world call it together."""
    for channel in between_loops(plan):
        ends = channel.source_ranks, channel.target_ranks, ranks_of(channel)
        for ranks in (*ends, *(transfer.ranks for transfer in channel.transfers)):
            transport.add_lane(channel.name, ranks, patience(channel))
    for loop in plan.continuous_loops:
        for ranks in (loop.ranks, *metric_pools(plan, loop)):
            transport.add_lane(LOG, ranks)
    if ranks := _meeting_ranks(plan):
        transport.add_lane(MEETING, ranks, max(map(patience, between_loops(plan))))


def _meeting_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks of the loop that trains, where some of them send no weights to another loop and hear of it from others."""
    sources = {rank for channel in between_loops(plan) if channel.sync is not None for rank in channel.source_ranks}
    return plan.leading.ranks if sources and not sources.issuperset(plan.leading.ranks) else ()


def _journaling_rank(plan: Plan, channel: Channel) -> int:
    if channel.transfers:
        return channel.source_ranks[0]
    assert plan.repeat is not None, "what stays on its ranks is the surplus of repeated nodes"
    return plan.repeat.layout.ranks[0]


def _file_of(channel: Channel, iteration: int, action: Reshard) -> str:
    """Name of the files of a checkpoint with what a channel holds of an iteration for one of its reshards."""
    return f"rows-{iteration:06d}-{channel.reshards.index(action)}"
