"""Supervision of a rank during its steps: a watchdog, signs of presence, and requests to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.markup import escape

from leaderless.base.devices import device_use
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.supervision.heartbeat import Stall, Watchdog, end_stalled
from leaderless.worker.supervision.presence import Presence
from leaderless.worker.supervision.stop import StopRequest


@contextmanager
def supervised(parts: Parts, progress: Progress, *, is_guest: bool) -> Iterator[StopRequest]:
    """Watch over the steps of a rank; yields the request to stop, which signals and the run's folder can make.

    Args:
        parts: Parts of the worker; another plan may take the place of theirs meanwhile.
        progress: Position of its loop.
        is_guest: Whether the process belongs to a program that continues after the run, so that nothing may end it.
    """
    messages = _Messages(parts, progress)
    stop = StopRequest(parts.recipe.run.grace_s, messages.stopping, messages.abandoned, is_guest=is_guest)
    with _watchdog(parts, messages, is_guest=is_guest), _presence(parts, stop), stop:
        yield stop


def _watchdog(parts: Parts, messages: _Messages, *, is_guest: bool) -> Watchdog:
    run, directory, transport = parts.recipe.run, parts.directory, parts.transport
    # A wait for a peer must not time out before the peer's stall is seen.
    timeout_s = min(run.stall_timeout_s, run.timeout_s / 2)
    end = partial(end_stalled, directory=directory, rank=transport.rank)
    stacks = directory.errors / f"stacks-rank-{transport.rank}.txt"
    return Watchdog(transport.activity, transport, timeout_s, stacks, messages.stalled if is_guest else end)


def _presence(parts: Parts, stop: StopRequest) -> Presence:
    transport, every_s = parts.transport, parts.recipe.run.status_every_s
    place, use = (transport.rank, transport.world.size), partial(device_use, parts.turns.device)
    return Presence(parts.directory, place, transport.activity, every_s, use, stop.ask)


class _Messages:
    """Messages for the console when a run stalls or stops."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self._parts, self._progress = parts, progress

    def stalled(self, stall: Stall, is_reporter: bool) -> None:
        if is_reporter:
            where = escape(str(self._parts.directory.errors))
            self._parts.display.say(f"[bold red]no progress[/]: {escape(stall.cause)}; the stacks are in {where}")

    def stopping(self) -> None:
        self._parts.display.say(
            "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one"
        )

    def abandoned(self) -> None:
        done = self._parts.directory.last_step()
        resume = f"; the same command continues from step {done}" if done else ""
        grace = f"run.grace_s={self._parts.recipe.run.grace_s:g} s"
        self._parts.display.say(f"step {self._progress.step} is abandoned after {grace}{resume}")
        if self._parts.desk is not None:
            self._parts.desk.close()  # so that those who wait for an answer get an error
