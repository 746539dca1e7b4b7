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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.distributed.background import Outbox
from leaderless.environments.journal import text_of
from leaderless.observability.clock import State, Tracer
from leaderless.observability.events import GuardEvent
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan, PlannedNode, RunNode
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.context import ModelRole
from leaderless.stages.episode_rollout import play_of
from leaderless.stages.reward import inputs_of_group
from leaderless.stages.rollout import distributions_of
from leaderless.worker.agreement import LOG, Judge, ProcessGroups, StepEnd, agree
from leaderless.worker.asynchronous.async_grading import BackgroundGrader
from leaderless.worker.asynchronous.async_state import RolloutQuota, all_prompts
from leaderless.worker.asynchronous.episodes import EpisodesInFlight, LiveEpisodes
from leaderless.worker.asynchronous.generation import Generation, InFlight
from leaderless.worker.asynchronous.in_flight import EngineRequests, Events, ResponsesInFlight
from leaderless.worker.asynchronous.journal import JournaledEpisodes, PastEpisodes, journal_file, read_journal
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.checkpointer import Checkpointer
from leaderless.worker.supervision.guards import Guards


@dataclass(frozen=True)
class Duties:
    """Duties of a worker besides generating; some of it all ranks of the loop, or all ranks, do together.

    Attributes:
        last: Last iteration to hand over with this plan.
        evaluate: Function that answers held-out prompts where that is due.
        write: Function that logs the numbers of an iteration, on the loop's first rank.
        measure: Function that takes in the seconds of each entry in an iteration, and of the whole.
        may_switch: Function that says whether another plan may be in force from now on.
        find_better: Function that finds the plan to continue with, if it is another one.
    """

    last: int
    evaluate: Callable[[], dict[str, float]]
    write: Callable[[int, dict[str, float]], None]
    measure: Callable[[Mapping[str, float], float], None]
    may_switch: Callable[[], bool]
    find_better: Callable[[], Plan | None]


WAITS: tuple[State, ...] = ("wait_weights", "wait_credit", "wait_ranks", "evaluate", "checkpoint")
"""States that are no part of the seconds of an iteration."""


class ContinuousLoop:
    """Generates on one rank until training has all rows, or stops. It is also what its generation takes weights from.

    Attributes:
        reports: Iterations whose numbers are being added up.
    """

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        chain: Chain,
        keeper: Checkpointer,
        guards: Guards,
        duties: Duties,
        tracer: Tracer,
    ) -> None:
        self._parts, self._progress, self._chain, self._keeper = parts, progress, chain, keeper
        self._guards, self._duties, self._tracer = guards, duties, tracer
        self._loop = parts.plan.loop_of(parts.transport.rank)
        self._node = next(parts.plan[name] for name in self._loop.nodes if parts.plan[name].spec.samples)
        (self._load,) = chain.loaders
        timeout_s = parts.recipe.run.timeout_s
        self.reports = Outbox(f"the log of {self._loop.name}", parts.recipe.steps, timeout_s, parts.transport.activity)
        self._journal: LineFile | None = None
        follow = parts.recipe.run.follow
        self._followed = None if follow is None else RunDirectory(parts.directory.path.parent / follow)

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
            stack.callback(self.reports.close)
            self._chain.generation = generation = self._begin(stack)
            begin = time.perf_counter()
            while progress.trained < steps:
                prompts = self._generate(generation) if progress.step < self._duties.last else None
                if prompts is not None:
                    self._finish(generation, prompts, begin)
                    begin = time.perf_counter()
                    continue
                is_stopping, plan = self._take_weights()
                if is_stopping or plan is not None:
                    self._abandon_reports()  # the share that is not complete is never handed over
                    break
                generation.weights_taken()
            if plan is not None:
                generation.leave()
            self.reports.finish()
        return plan

    def _generate(self, generation: Generation) -> Batch | None:
        """Let the node that samples work; see `Generation.next`."""
        with self._chain.entry(RunNode(self._node.name), self._progress.step + 1):
            return generation.next()

    def _take_weights(self) -> tuple[bool, Plan | None]:
        """Wait for the next weights and load them, then evaluate and save where that is due after a step of training.

        Returns:
            Whether training has stopped, and the plan to continue with, if it is another one.
        """
        progress, channels = self._progress, self._chain.channels
        note = channels.take_weights()
        goes_on = progress.trained < self._parts.recipe.steps and not note.is_stopping
        may_switch = goes_on and self._duties.may_switch()
        if goes_on and not may_switch:  # while a plan is looked for, nothing else may be on its way
            channels.weights.begin(progress.trained + 1)
        numbers = self._duties.evaluate()
        numbers = numbers if self._parts.transport.rank == self._loop.ranks[0] else {}
        self._keeper.save(numbers, StepEnd(note.is_stopping, note.is_checkpoint_due, progress.data_position))
        plan = self._duties.find_better() if may_switch else None
        if may_switch and plan is None:
            channels.weights.begin(progress.trained + 1)
        return note.is_stopping, plan

    def _finish(self, generation: Generation, prompts: Batch, begin: float) -> None:
        """Hand over a share that is complete, and report.

        Args:
            generation: Generation that has completed it.
            prompts: Prompts of its groups.
            begin: Time at which work on it began.
        """
        progress, chain = self._progress, self._chain
        progress.step += 1
        chain.walk(prompts)
        seconds = time.perf_counter() - begin
        with self._parts.clock.doing("log"):
            generation.report(chain.metrics.of(self._load.layout.ranks))
            chain.report()
        self._duties.measure(*self._measured())
        assert self._journal is not None
        if self._parts.recipe.environment is not None:
            facts = generation.facts
            self._parts.episodes.write("step", progress.step, "asked", lambda: map(text_of, facts))
        self._journal.append(cast("Mapping[str, Json]", generation.line))
        report = partial(self._report, progress.step, seconds, chain.metrics.take(), tuple(chain.events))
        self.reports.post(progress.step, report)

    def _report(
        self,
        step: int,
        seconds: float,
        reduce: Callable[[Judge, ProcessGroups], dict[str, float]],
        events: Sequence[GuardEvent],
    ) -> None:
        """Add up what the ranks report of an iteration, and log it; the thread does it."""
        lane, found = partial(self._parts.transport.lane, LOG), list(events)
        if self._is_abandoned(made=True):
            return

        def judge(numbers: Mapping[str, float], nodes: Sequence[PlannedNode]) -> None:
            found.extend(self._guards.judge_rewards(step, numbers, nodes))

        numbers = reduce(judge, lane)
        numbers.pop("data/position", None)
        end = agree(StepEnd(False, False, 0, tuple(found)), lane(self._loop.ranks))
        self._duties.write(step, numbers | {"time/step": seconds})
        self._guards.must_roll_back(step, end, self._keeper.newest)

    def _measured(self) -> tuple[Mapping[str, float], float]:
        """Seconds of entries in an iteration, and of all that was no wait for other ranks.

        Generation meanwhile counts as seconds of the node that samples, for whatever iteration it was.
        """
        states = self._chain.states
        waited = sum(states.get(state, 0.0) for state in WAITS)
        return {**self._chain.spent, self._node.name: states.get("generate", 0.0)}, sum(states.values()) - waited

    def _is_abandoned(self, *, made: bool) -> bool:
        """Whether some rank has not made an iteration, since the run stops; all of them call it together."""
        group = self._parts.transport.lane(LOG, self._loop.ranks)
        return bool(group.max(torch.tensor([int(not made)]), f"the log of '{self._loop.name}'"))

    def _abandon_reports(self) -> None:
        """Let ranks that are further ahead know that this one has nothing to report of their last iterations."""
        ahead = min(self._progress.trained + self._loop.lag + 1, self._parts.recipe.steps)
        for step in range(self._progress.step + 1, ahead + 1):
            self.reports.post(step, self._abandon_report)

    def _abandon_report(self) -> None:
        self._is_abandoned(made=False)

    def _begin(self, stack: ExitStack) -> Generation:
        """Prepare what generates, with an engine that is awake."""
        parts, chain, loop = self._parts, self._chain, self._loop
        recipe, plan, rank = parts.recipe, parts.plan, parts.transport.rank
        node, load = self._node, self._load
        model = parts.roles.of(node.node.role or "", node.layout)
        assert isinstance(model, ModelRole), "only language models generate"
        engine = stack.enter_context(model.generating())
        assert isinstance(engine, SharedEngine), "ranks that generate continuously share it with evaluations"
        channel = next(one for one in plan.channels if one.kind == "rows" and one.source == loop.name)
        shard, num_shards, size = node.layout.shard_of(rank), node.layout.dp, recipe.batch.prompts_per_step
        remaining = self._progress.remaining or all_prompts(chain.loaders[load].num_mine, size, recipe.steps, 0)
        self._journal = LineFile(
            journal_file(parts.directory.journal, loop.name, shard), "iteration", parts.directory.may_fail
        )
        self._journal.cut_after(self._progress.step)  # nothing is left of a start that has come to no checkpoint
        quota = RolloutQuota(
            chain.loaders[load].num_mine,
            recipe.steps,
            depth=loop.lag,
            bound=channel.max_staleness // recipe.batch.updates_per_step,
            stragglers=loop.stragglers,
            num_made=self._progress.step,
        )
        events = Events()

        def beat() -> None:
            parts.progress(node.name)
            self.reports.check()
            chain.channels.check()

        in_flight = self._in_flight(engine.view(), events)
        stack.callback(in_flight.close)
        loader, load_next = chain.loaders[load], partial(chain.load, load)
        generation = Generation(loader, load_next, in_flight, quota, self, remaining, events, beat)
        if self._followed is not None and self._progress.step < self._duties.last:
            first = self._progress.step + 1
            generation.script = read_journal(self._followed.journal, loop.name, shard, num_shards, first)
        generation.grading = self._grading(stack)
        return generation

    def _grading(self, stack: ExitStack) -> BackgroundGrader | None:
        """Grader of responses in a thread; None where this rank grades none, or in its own process."""
        parts, recipe = self._parts, self._parts.recipe
        here = (parts.plan[name] for name in self._loop.nodes if parts.transport.rank in parts.plan[name].layout)
        node = next((node for node in here if node.is_graded_ahead(recipe)), None)
        if node is None:
            return None
        asked_of = partial(inputs_of_group, recipe=node.settings_of(recipe), tokenizer=parts.tokenizer)
        grading = BackgroundGrader(parts.judging.grader(node), asked_of, parts.clock)
        stack.callback(grading.close)
        return grading

    def _in_flight(self, engine: SharedEngine, events: Events) -> InFlight:
        """Groups in flight in an engine, none yet."""
        parts, node = self._parts, self._node
        own, role = node.settings_of(parts.recipe), node.node.role or ""
        if own.product == "text":
            distributions = distributions_of(own, has_greedy="is_greedy" in node.writes)
            return ResponsesInFlight(engine, own, distributions, events)
        play = play_of(node, own)
        requests, source = EngineRequests(engine, events, play.distributions), None
        if self._followed is not None and self._progress.step < self._duties.last:
            past = PastEpisodes(self._followed.episodes, parts.transport.rank, first=self._progress.step + 1)
            source = JournaledEpisodes(requests, past, parts.tokenizer, own.seed)
        return EpisodesInFlight(requests, source or LiveEpisodes(own, parts.tokenizer, parts.clock), own, play, role)
