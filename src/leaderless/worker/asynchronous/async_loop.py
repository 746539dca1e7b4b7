"""A loop that generates continuously: each of its ranks goes through iterations on its own.

    engine      step step step step step step step step step    groups of several iterations are in flight
                         |              ^              |
    this loop         share k       weights k      share k+1    handed over and taken between two steps
                         v              |              v
    training             [   step k     ]              [   step k+1

The ranks meet where an evaluation or a checkpoint is due: each comes there when it takes the weights of that step. What
they report of an iteration is added up by a thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.distributed.background import Outbox
from leaderless.environments.journal import text_of
from leaderless.observability.clock import State
from leaderless.observability.events import GuardEvent
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan, RunNode
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.context import ModelRole
from leaderless.stages.episode_rollout import play_of
from leaderless.stages.reward import inputs_of_group
from leaderless.stages.rollout import distributions_of
from leaderless.worker.agreement import LOG, StepEnd, StepMetrics, agree
from leaderless.worker.asynchronous.async_grading import BackgroundGrader
from leaderless.worker.asynchronous.async_state import RolloutQuota, all_prompts
from leaderless.worker.asynchronous.episodes import EpisodesInFlight, LiveEpisodes
from leaderless.worker.asynchronous.generation import Generation
from leaderless.worker.asynchronous.in_flight import EngineRequests, Events, ResponsesInFlight
from leaderless.worker.asynchronous.journal import JournaledEpisodes, PastEpisodes, journal_file, read_journal

if TYPE_CHECKING:
    from leaderless.worker.worker import Worker


WAITS: tuple[State, ...] = ("wait_weights", "wait_credit", "wait_ranks", "evaluate", "checkpoint")
"""States that are no part of the seconds of an iteration."""


class ContinuousLoop:
    """Generates on one rank until training has all rows, or stops. It is also what its generation takes weights from.

    Args:
        worker: Worker of the rank, which evaluates, logs, saves and changes the plan.
        last: Last iteration to hand over with this plan.
    """

    def __init__(self, worker: Worker, last: int) -> None:
        self._worker, self._last = worker, last
        parts, progress, chain = worker.parts, worker.progress, worker.chain
        self._parts, self._progress, self._chain = parts, progress, chain
        self._loop = parts.plan.loop_of(parts.transport.rank)
        self._node = next(parts.plan[name] for name in self._loop.nodes if parts.plan[name].spec.samples)
        (self._load,) = chain.loaders
        self._has_episodes = False
        timeout_s = parts.recipe.run.timeout_s
        self._reports = Outbox(f"the log of {self._loop.name}", parts.recipe.steps, timeout_s, parts.transport.activity)
        shard = self._node.layout.shard_of(parts.transport.rank)
        file = journal_file(parts.directory.journal, self._loop.name, shard)
        self._journal = LineFile(file, "iteration", parts.directory.may_fail)
        self._followed: RunDirectory | None = None
        if parts.recipe.run.follow is not None and progress.step < last:
            self._followed = RunDirectory(parts.directory.path.parent / parts.recipe.run.follow)

    @property
    def trained(self) -> int:
        """The iteration whose weights the engine has."""
        return self._progress.trained

    def is_there(self) -> bool:
        """Whether the channel of weights has the next ones."""
        return self._chain.channels.weights.is_there()

    def run(self) -> Plan | None:
        """Generate until the run has ended, or stops, or another plan is in force, which is returned."""
        progress, steps, plan = self._progress, self._parts.recipe.steps, None
        if progress.trained < steps:
            self._chain.channels.weights.begin(progress.trained + 1)
        with ExitStack() as stack:
            stack.callback(self._reports.close)
            self._chain.generation = generation = self._begin(stack)
            begin, prompts = time.perf_counter(), None
            while progress.trained < steps:
                if progress.step < self._last:
                    with self._chain.entry(RunNode(self._node.name), progress.step + 1):
                        prompts = generation.next()
                if prompts is not None:
                    self._finish(generation, prompts, begin)
                    begin, prompts = time.perf_counter(), None
                    continue
                is_stopping, plan = self._take_weights()
                if is_stopping or plan is not None:
                    # The share that is not complete is never handed over. Ranks that are further ahead have to know
                    # that this one has nothing to report of their last iterations.
                    ahead = min(progress.trained + self._loop.lag + 1, steps)
                    for step in range(progress.step + 1, ahead + 1):
                        self._reports.post(step, partial(self._is_abandoned, made=False))
                    break
                generation.weights_taken()
            if plan is not None:
                generation.leave()
            self._reports.finish()
        return plan

    def _take_weights(self) -> tuple[bool, Plan | None]:
        """Wait for the next weights and load them, then evaluate and save where that is due after a step of training.

        Returns:
            Whether training has stopped, and the plan to continue with, if it is another one.
        """
        progress, channels = self._progress, self._chain.channels
        note = channels.take_weights()
        goes_on = progress.trained < self._parts.recipe.steps and not note.is_stopping
        may_switch = goes_on and self._worker.may_switch()
        if goes_on and not may_switch:  # while a plan is looked for, nothing else may be on its way
            channels.weights.begin(progress.trained + 1)
        numbers = self._worker.evaluate()
        numbers = numbers if self._parts.transport.rank == self._loop.ranks[0] else {}
        self._worker.checkpointer.save(
            numbers, StepEnd(note.is_stopping, note.is_checkpoint_due, progress.data_position)
        )
        plan = self._worker.find_better() if may_switch else None
        if may_switch and plan is None:
            channels.weights.begin(progress.trained + 1)
        return note.is_stopping, plan

    def _finish(self, generation: Generation, prompts: Batch, begin: float) -> None:
        """Hand over a share that is complete, with prompts of its groups, and report; work on it began at `begin`."""
        progress, chain = self._progress, self._chain
        progress.step += 1
        chain.walk(prompts)
        seconds = time.perf_counter() - begin
        with self._parts.clock.doing("log"):
            generation.report(chain.metrics.of(self._load.layout.ranks))
            chain.report()
        # Generation meanwhile counts as seconds of the node that samples, for whatever iteration it was.
        states = chain.states
        waited = sum(states.get(state, 0.0) for state in WAITS)
        spent = {**chain.spent, self._node.name: states.get("generate", 0.0)}
        self._worker.measure(spent, sum(states.values()) - waited)
        if self._has_episodes:
            facts = generation.facts
            self._parts.episodes.write("step", progress.step, "asked", lambda: map(text_of, facts))
        self._journal.append(cast("Mapping[str, Json]", generation.line))
        report = partial(self._report, progress.step, seconds, chain.metrics.take(), tuple(chain.events))
        self._reports.post(progress.step, report)

    def _report(self, step: int, seconds: float, metrics: StepMetrics, events: Sequence[GuardEvent]) -> None:
        """Add up what the ranks report of an iteration, and log it; the thread does it."""
        lane = partial(self._parts.transport.lane, LOG)
        if self._is_abandoned(made=True):
            return
        numbers, found = metrics.reduce(partial(self._worker.guards.judge, step), lane)
        numbers.pop("data/position", None)
        end = agree(StepEnd(False, False, 0, (*events, *found)), lane(self._loop.ranks))
        self._worker.write(step, numbers | {"time/step": seconds})
        self._worker.guards.must_roll_back(step, end, self._worker.checkpointer.newest)

    def _is_abandoned(self, *, made: bool) -> bool:
        """Whether some rank has not made an iteration, since the run stops; all of them call it together."""
        group = self._parts.transport.lane(LOG, self._loop.ranks)
        return bool(group.max(torch.tensor([int(not made)]), f"the log of '{self._loop.name}'"))

    def _begin(self, stack: ExitStack) -> Generation:
        parts, chain, loop = self._parts, self._chain, self._loop
        recipe, plan, rank = parts.recipe, parts.plan, parts.transport.rank
        node, load = self._node, self._load
        model = parts.roles.of(node.node.role or "", node.layout)
        assert isinstance(model, ModelRole), "only language models generate"
        engine = stack.enter_context(model.generating())
        assert isinstance(engine, SharedEngine), "ranks that generate continuously share it with evaluations"
        channel = next(one for one in plan.channels if one.kind == "rows" and one.source == loop.name)
        shard, num_shards, size = node.layout.shard_of(rank), node.layout.dp, chain.loaders[load].num_mine
        remaining = self._progress.remaining or all_prompts(size, recipe.steps)
        self._journal.cut_after(self._progress.step)  # nothing is left of a start that has come to no checkpoint
        quota = RolloutQuota(
            size,
            recipe.steps,
            depth=loop.lag,
            bound=channel.max_staleness // recipe.batch.updates_per_step,
            stragglers=loop.stragglers,
            num_made=self._progress.step,
        )
        events = Events()

        def beat() -> None:
            parts.progress(node.name)
            self._reports.check()
            chain.channels.check()

        in_flight = self._in_flight(engine.view(), events)
        self._has_episodes = isinstance(in_flight, EpisodesInFlight)
        stack.callback(in_flight.close)
        loader, load_next = chain.loaders[load], partial(chain.load, load)
        generation = Generation(loader, load_next, in_flight, quota, self, remaining, events, beat)
        if self._followed is not None:
            first = self._progress.step + 1
            generation.script = read_journal(self._followed.journal, loop.name, shard, num_shards, first)
        # None where this rank grades none, or in its own process.
        here = (plan[name] for name in loop.nodes if rank in plan[name].layout)
        if graded := next((node for node in here if node.is_graded_ahead(recipe)), None):
            asked_of = partial(inputs_of_group, recipe=graded.settings_of(recipe), tokenizer=parts.roles.tokenizer)
            generation.grading = BackgroundGrader(parts.judging.grader(graded), asked_of, parts.clock)
            stack.callback(generation.grading.close)
        return generation

    def _in_flight(self, engine: SharedEngine, events: Events) -> ResponsesInFlight | EpisodesInFlight:
        parts, node = self._parts, self._node
        own, role = node.settings_of(parts.recipe), node.node.role or ""
        if own.product == "text":
            distributions = distributions_of(own, has_greedy="is_greedy" in node.writes)
            return ResponsesInFlight(engine, own, distributions, events)
        play = play_of(node, own)
        requests, source = EngineRequests(engine, events, play.distributions), None
        if self._followed is not None:
            past = PastEpisodes(self._followed.episodes, parts.transport.rank, first=self._progress.step + 1)
            source = JournaledEpisodes(requests, past, parts.roles.tokenizer, own.seed)
        return EpisodesInFlight(
            requests, source or LiveEpisodes(own, parts.roles.tokenizer, parts.clock), own, play, role
        )
