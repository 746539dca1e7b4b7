"""Drives an arm, period by period, and keeps it within its limits whatever it is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.robots.arm import CommandOutcome, Reading, Record, Refused, Station
from leaderless.embodied.robots.safety_limits import Limiter, Vector

WATCHDOG_PERIODS = 2
"""Number of periods without a command after which the arm holds. Until then it continues with its last velocity."""
THINKING_SHARE = 0.5
"""Share of a period for which a command is waited for after the reading that it answers."""
LOST_PERIODS, LOST_S = 10, 0.5
"""Periods, and seconds at least, without a reading of the sensors after which the arm is stopped from outside."""


@dataclass
class _Chunk:
    """A command that is executed."""

    record: Record
    deadline_s: float
    future: Future[CommandOutcome]


@dataclass
class _Approach:
    """A way to where an episode begins."""

    start: Vector
    deadline_s: float
    future: Future[CommandOutcome]


class Controller:
    """The only one that moves an arm. Its methods may be called from any thread; `run` is a thread of its own.

    In each period it reads the sensors, gives the step that has ended its reward, waits a moment for a command, and
    moves by what policy or person ask for, within the limits. Without a command the arm soon brakes and holds. Once it
    is stopped, only `release` lets it move again.
    """

    def __init__(self, station: Station, clock: Callable[[], float] = time.monotonic) -> None:
        self.station, self._arm, self._clock = station, station.arm, clock
        self._spec = station.arm.spec
        self._limiter = Limiter(self._spec.axes, self._spec.period_s)
        self._max_error = np.array([axis.max_error for axis in self._spec.axes])
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._reason = "it has just been started"
        self._release: Future[None] | None = None
        self._chunk: _Chunk | None = None
        self._approach: _Approach | None = None
        self._is_preparing = self._is_in_episode = self._is_closed = False
        self._abandoned = ""
        self._is_unstoppable = False
        self._is_holding = True
        self._num_steps = self._num_done = self._num_idle = 0
        self._wish = np.zeros(len(self._spec.axes))
        self._covered_until_s = -np.inf
        self._reading, self._read_at_s = self._arm.read(), clock()
        self._stopped.set()

    # What clients ask for

    def step(self, actions: NDArray[np.float64], deadline_s: float = np.inf) -> Future[CommandOutcome]:
        """Execute a chunk of actions.

        Args:
            actions: Velocities as shares of the largest, [chunk, axes]; what is beyond -1 and 1 is clipped.
            deadline_s: Time by the controller's clock after which the chunk may no longer begin.

        Returns:
            The outcome, or a refusal.

        Raises:
            Refused: The actions have a wrong shape or are not finite, or the arm is not ready for them.
        """
        dim, most = len(self._spec.axes), self.station.max_chunk
        if actions.ndim != 2 or actions.shape[1] != dim or not 1 <= len(actions) <= most:
            rule = f"must be [1 to {most}, {dim}]: see the server's description"
            raise Refused("shape", f"actions of shape {list(actions.shape)} {rule}")
        if not np.isfinite(actions).all():
            row, axis = np.argwhere(~np.isfinite(actions))[0]
            name, value = self._spec.axes[axis].name, actions[row, axis]
            raise Refused("not_finite", f"action {row} asks axis '{name}' for {value}: send finite numbers")
        with self._changed:
            self._refuse_unless_free()
            if not self._is_in_episode:
                raise Refused("no_episode", "there is no episode, or it has ended: reset first")
            self._chunk = _Chunk(Record(actions, self._num_idle), deadline_s, Future())
            self._changed.notify_all()
            return self._chunk.future

    def reset(self, seed: int, deadline_s: float = np.inf) -> Future[CommandOutcome]:
        """Prepare an episode, and bring the arm to its start.

        Raises:
            Refused: The arm is stopped or busy.
        """
        with self._changed:
            self._refuse_unless_free()
            self._is_preparing, self._is_in_episode, self._is_holding = True, False, True
            self._abandoned = ""
            self._changed.notify_all()
        future: Future[CommandOutcome] = Future()
        threading.Thread(target=self._prepare, args=(seed, deadline_s, future), daemon=True).start()
        return future

    def hold(self, reason: str) -> None:
        """Brake within the limits, and hold until the next command. What is being executed is cut."""
        with self._changed:
            self._is_holding = True
            self._cut(reason)
            self._changed.notify_all()

    # What people, and this machine, may do

    def stop(self, reason: str) -> None:
        """Stop at once, and stay so until `release`. The first reason stays."""
        if not self._stopped.is_set():
            self._reason = reason
        self._stopped.set()  # before the lock, which `run` may hold: it looks again after each movement
        self._stop_arm()
        with self._changed:
            self._is_in_episode = False
            self._cut(f"stopped: {self._reason}")
            self._changed.notify_all()

    def release(self) -> Future[None]:
        """Let a stopped arm move again, as soon as it is seen to be within its box. Only a person may ask for it."""
        with self._changed:
            if self._release is None:
                self._release = Future()
            self._changed.notify_all()
            return self._release

    @property
    def stopped_because(self) -> str:
        """Reason why the arm is stopped; empty if it is not."""
        return self._reason if self._stopped.is_set() else ""

    @property
    def now_s(self) -> float:
        """Time by the clock of deadlines."""
        return self._clock()

    @property
    def is_holding(self) -> bool:
        """Whether the arm brakes, or stands still until the next command."""
        return self._is_holding or self._stopped.is_set()

    def stop_if_lost(self) -> None:
        """Stop an arm whose driver does not answer; to be called often from another thread."""
        silence_s = self._clock() - self._read_at_s
        if not self._spec.is_simulated and silence_s > max(LOST_PERIODS * self._spec.period_s, LOST_S):
            self.stop(f"its driver has not answered for {silence_s:.1f} s")

    # The thread of the arm

    def run(self) -> None:
        """Drive the arm until `close`."""
        due_s = self._clock()
        while not self._is_closed:
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001 - whatever a driver raises, the arm must stop, and it is reported
                self.stop(f"its driver has failed: {type(error).__name__}: {error}")
            if not self._spec.is_simulated:
                due_s = max(due_s + self._spec.period_s, self._clock())
                time.sleep(max(0.0, due_s - self._clock()))

    def close(self) -> None:
        """End `run`; the arm is stopped."""
        self.stop("its server has ended")
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def tick(self) -> None:
        """Go through one period."""
        reading = self._arm.read()
        with self._changed:
            self._reading, self._read_at_s = reading, self._clock()
            self._check(reading)
            if self._release is not None:
                self._try_release(reading)
            self._end_step(reading)
            self._end_approach()
            waits_s = None if self._spec.is_simulated else THINKING_SHARE * self._spec.period_s
            self._changed.wait_for(self._has_work, waits_s)
            if self._stopped.is_set() or self._is_closed:
                if self._is_unstoppable:
                    self._stop_arm()
                return
            self._move(reading)
        self._arm.move(self._limiter.target)  # without the lock: a driver that hangs must not keep others from `stop`
        if self._stopped.is_set():
            self._stop_arm()

    def _stop_arm(self) -> None:
        try:
            self._arm.stop()
            self._is_unstoppable = False
        except Exception as error:  # noqa: BLE001 - whatever a driver raises, this thread goes on and tries again
            if not self._is_unstoppable:
                self._reason += f"; its driver cannot stop it: {type(error).__name__}: {error}"
            self._is_unstoppable = True

    def _has_work(self) -> bool:
        if self._stopped.is_set():
            return self._is_closed or self._release is not None
        brakes = self._is_holding and not self._limiter.is_at_rest
        return self._is_closed or bool(self._chunk or self._approach or self._release) or brakes

    def _check(self, reading: Reading) -> None:
        """Stop an arm that is not where it should be."""
        if not np.isfinite(reading.position).all() or not np.isfinite(reading.state).all():
            self.stop("its sensors gave a number that is not finite")
        errors = np.abs(reading.position - self._limiter.target)
        if not self._stopped.is_set() and (errors > self._max_error).any():
            axis = int(np.argmax(errors / self._max_error))
            rule = f"max_error={self._max_error[axis]:g}"
            self.stop(f"axis '{self._spec.axes[axis].name}' is {errors[axis]:.3g} from its target, above {rule}")

    def _try_release(self, reading: Reading) -> None:
        future, self._release = self._release, None
        assert future is not None
        is_outside = ~((reading.position >= self._limiter.low) & (reading.position <= self._limiter.high))
        if is_outside.any():
            axis = self._spec.axes[int(np.argmax(is_outside))]
            where = f"outside {axis.low:g} to {axis.high:g}: move it inside by hand"
            future.set_exception(Refused("start", f"axis '{axis.name}' is {where}"))
            return
        if self._stopped.is_set():
            try:
                self._arm.release()
            except Exception as error:  # noqa: BLE001 - a driver's; the person sees it, and the arm stays stopped
                said = f"{type(error).__name__}: {error}"
                future.set_exception(Refused("driver", f"its driver cannot release it: {said}"))
                return
            self._limiter.start_at(reading.position)
            self._is_holding, self._wish = True, np.zeros_like(self._wish)
            self._stopped.clear()
        future.set_result(None)

    def _move(self, reading: Reading) -> None:
        """Decide on the movement of the period that begins."""
        now = self._clock()
        if self._chunk is not None and not self._chunk.record.num_begun and now > self._chunk.deadline_s:
            chunk, self._chunk, self._is_holding = self._chunk, None, True
            late = f"the command came {now - chunk.deadline_s:.3f} s too late, and was not executed"
            chunk.future.set_exception(Refused("late", late))
        if self._approach is not None:
            self._is_holding = False
            self._limiter.advance_towards(self._approach.start)
        elif self._chunk is not None:
            self._begin_step(reading, self._chunk)
            self._is_holding, self._num_idle = False, 0
            self._covered_until_s = now + self._spec.period_s
        else:
            self._num_idle += 1
            idle_periods = (now - self._covered_until_s) / self._spec.period_s
            self._is_holding = self._is_holding or max(self._num_idle - 1, idle_periods + 0.25) >= WATCHDOG_PERIODS
            self._limiter.advance(np.zeros_like(self._wish) if self._is_holding else self._wish)

    def _begin_step(self, reading: Reading, chunk: _Chunk) -> None:
        asked = np.clip(chunk.record.asked[chunk.record.num_begun], -1.0, 1.0)
        human = self.station.human.intervene(reading, asked) if self.station.human is not None else None
        self._wish = asked if human is None else np.clip(np.nan_to_num(human), -1.0, 1.0)
        limited = self._limiter.advance(self._wish)
        executed = self._limiter.velocity / np.array([axis.max_speed for axis in self._spec.axes])
        chunk.record.begin(self._wish, executed, intervened=human is not None, limited=limited)

    def _end_step(self, reading: Reading) -> None:
        """Give the step that was executed in the period before its reward."""
        chunk = self._chunk
        if chunk is None or not chunk.record.num_begun:
            return
        station = self.station
        self._num_steps += 1
        self._num_done = self._num_done + 1 if station.judge.is_done(reading) else 0
        is_success = self._num_done >= station.success_steps
        is_last = self._num_steps >= station.max_steps
        chunk.record.end(float(is_success))
        if not (is_success or is_last) and chunk.record.num_steps < len(chunk.record.asked):
            return
        self._chunk = None
        if is_success or is_last:
            self._is_in_episode, self._is_holding = False, True
        outcome = chunk.record.outcome(
            reading,
            self._read_at_s,
            facts=station.judge.facts(),
            is_terminated=is_success,
            is_truncated=is_last and not is_success,
        )
        chunk.future.set_result(outcome)

    def _prepare(self, seed: int, deadline_s: float, future: Future[CommandOutcome]) -> None:
        """Prepare the scene, in a thread of its own, since a person may do it."""
        start: Vector | None = None
        try:
            start = self._arm.prepare(seed)
            inside = (start >= self._limiter.low) & (start <= self._limiter.high)
            refused = None if inside.all() else Refused("start", f"the episode begins at {start}, outside the box")
        except Exception as error:  # noqa: BLE001 - a driver's; the client gets it
            refused = Refused("driver", f"the scene cannot be prepared: {type(error).__name__}: {error}")
        with self._changed:
            self._is_preparing = False
            if self._abandoned:
                refused = Refused("cut", f"the episode was not begun: {self._abandoned}")
            if refused is not None:
                future.set_exception(refused)
            else:
                assert start is not None
                self._approach = _Approach(start, deadline_s, future)
            self._changed.notify_all()

    def _end_approach(self) -> None:
        """Begin the episode if the arm is where it begins."""
        approach = self._approach
        if approach is None:
            return
        reading = self._arm.read()
        is_there = self._limiter.is_at_rest and (self._limiter.target == approach.start).all()
        if is_there and (np.abs(reading.position - approach.start) <= self._max_error / 2).all():
            for one in (self._arm, self.station.human, self.station.judge):
                if one is not None:
                    one.begin()
            self._approach, self._is_in_episode, self._is_holding = None, True, True
            self._num_steps = self._num_done = self._num_idle = 0
            record = Record(np.zeros((0, len(self._spec.axes))))
            approach.future.set_result(record.outcome(self._arm.read(), self._clock()))
        elif self._clock() > approach.deadline_s:
            self._approach, self._is_holding = None, True
            approach.future.set_exception(Refused("late", "the arm did not reach the start in time, and holds"))

    def _cut(self, reason: str) -> None:
        """Answer who waits for what is no longer executed."""
        self._abandoned = reason
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.future.set_result(chunk.record.outcome(self._reading, self._read_at_s, cut=reason))
        approach, self._approach = self._approach, None
        if approach is not None:
            approach.future.set_exception(Refused("cut", f"the way to the start was cut: {reason}"))

    def _refuse_unless_free(self) -> None:
        if self._stopped.is_set():
            raise Refused("stopped", f"the arm is stopped: {self._reason}; a person at its server has to release it")
        if self._chunk or self._approach or self._is_preparing:
            raise Refused("busy", "a command is still being executed: wait for its answer")
