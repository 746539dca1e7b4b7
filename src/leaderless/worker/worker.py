"""One rank of a run: takes one step of its loop after the other, and writes the log of the loop."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from rich.markup import escape

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.observability.clock import Tracer
from leaderless.observability.console import FAILED
from leaderless.observability.line_file import StepLog
from leaderless.observability.proof_log import ProofLog, proof_key
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Loop, Plan, answering
from leaderless.worker.agreement import StepEnd, agree, to_first_rank
from leaderless.worker.asynchronous.async_loop import ContinuousLoop
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.checkpointer import Checkpointer
from leaderless.worker.device_sharing import device_trace
from leaderless.worker.evaluate.evaluator import EvaluationStep
from leaderless.worker.replan.active_plan import PastLayouts, note_layout, plan_in_force, write_description
from leaderless.worker.replan.adopt import adopt
from leaderless.worker.replan.replanner import Replanner
from leaderless.worker.step_proof import metrics_facts, run_facts
from leaderless.worker.supervision.guards import Guards
from leaderless.worker.supervision.stop import StopRequest
from leaderless.worker.supervision.supervised import supervised


class Worker:
    """Trains, evaluates, logs and saves on one rank.

    Attributes:
        parts: Models, data and the other parts of the worker.
        progress: Position of its loop.
        chain: Entries of the plan that this rank executes.
        checkpointer: Writer and reader of the checkpoints of the run.
        guards: Judge of the reports of the run's guards.
        tracer: Timer of all that the rank does.
    """

    def __init__(self, parts: Parts) -> None:
        recipe, directory, self._rank = parts.recipe, parts.directory, parts.transport.rank
        directory.say = lambda text: parts.display.say(f"[bold red]{escape(text)}[/]")
        self.progress = Progress({})
        trace = directory.traces / f"rank-{self._rank}.json" if recipe.run.trace_steps else None
        self.tracer = Tracer(trace, self._rank, directory.may_fail)
        self._follow(parts, Chain(parts, self.progress, self.tracer))
        self._past: PastLayouts | None = None
        if recipe.run.follow is not None:
            self._past = PastLayouts(RunDirectory(directory.path.parent / recipe.run.follow).journal, recipe)
        may_choose = recipe.schedule.replan_every_steps and self._past is None
        self._replanner = Replanner(parts) if may_choose else None
        self.guards = Guards(recipe.guards, directory, parts.display, is_first=self._rank == self._loop.ranks[0])
        self._is_log_open = False

    def _follow(self, parts: Parts, chain: Chain) -> None:
        """Take the steps that come with these parts, and this chain of their plan."""
        self.parts, self.chain = parts, chain
        self.checkpointer = Checkpointer(parts, self.progress, chain, self.tracer)
        self._loop = loop = parts.plan.loop_of(self._rank)
        self._ranks = parts.transport.process_group(loop.ranks)
        self._log = LoopLog(parts, loop) if self._rank == loop.ranks[0] else None

    def adopt(self, plan: Plan) -> float:
        """Continue under another plan, between two steps; returns the seconds. All ranks call it together.

        Raises:
            RecipeError: The plan of this run, or the new one, cannot be changed while the run goes on.
        """
        self.checkpointer.finish()
        self.parts.begin(self.progress.step, "adopt")
        with self.tracer.span("adopt", self.progress.step):
            self._follow(*adopt(plan, self.parts, self.progress, self.chain, self.tracer))
            self.guards.is_first = self._log is not None
            if self._log is not None and self._is_log_open:
                self._log.open_files(self.progress)
            if self._rank == 0:
                write_description(self.parts.directory, self.parts.recipe, plan, self.parts.display.say)
        return self.tracer.take("adopt")

    def run(self, *, is_guest: bool = False) -> int | None:
        """Train to the last step, or until a signal asks to stop; the last state is written as a checkpoint.

        Nothing may end a guest in a program that continues after the run.

        Returns:
            The signal that stopped the run before the last step, if one did; SIGTERM where another rank received it.
        """
        self._resume()
        with supervised(self.parts, self.progress, lambda: self.checkpointer.preemption, is_guest=is_guest) as stop:
            self._run_steps(stop)
        return (stop.signal or signal.SIGTERM) if self.progress.trained < self.parts.recipe.steps else None

    def _run_steps(self, stop: StopRequest) -> None:
        self.parts.clock.start()
        is_stopped = self.chain.channels.is_asked_to_stop = lambda: stop.signal is not None
        self.parts.rewards.failures.is_stopping = is_stopped
        recipe = self.parts.recipe
        self.parts.display.start(recipe.steps, self.progress.trained, recipe.evaluation.every_steps)
        is_stopping = False
        while not is_stopping:
            run = self._generate if self._loop.is_continuous else self._run_ahead if self._loop.lag else self._train
            is_stopping = run() or self.progress.trained == self.parts.recipe.steps
        self.chain.channels.finish()
        if self._log is not None:
            self._log.close(self.progress.step)
        self.parts.display.stop()
        self.tracer.close()

    def _train(self) -> bool:
        """Take the steps of the run, until they stop or another plan is in force; returns whether they stop."""
        loop, num_steps, is_stopping = self._loop, self.parts.recipe.steps, False
        if self.progress.step == 0:
            self.write(0, self.evaluate())
        while self.progress.step < num_steps and not is_stopping and self._loop is loop:
            numbers = self.run_step()
            if self._replanner is not None:
                numbers |= self._replanner.numbers()
                self._replanner.measure(self.chain.spent, numbers["time/step"])
            numbers |= self.evaluate()
            self.write(self.progress.step, numbers)
            end = self._agree()
            self.chain.channels.end_iteration(end)
            is_stopping = end.is_stopping
            if self.guards.must_roll_back(self.progress.step, end, self.checkpointer.newest):
                # From the newest checkpoint, but with the next data and the clock of the run.
                now = self.progress.seconds
                self._resume()
                self.progress.seconds_before += now - self.progress.seconds
                continue
            self._end_step(numbers, end)
        return is_stopping

    def _end_step(self, numbers: dict[str, float], end: StepEnd) -> None:
        """Change the plan, and save, where that is due after a step of training. All ranks call it together.

        Unfinished work of ranks that generate continuously is saved before, as it is dropped then.
        """
        numbers, is_continuous = numbers if self._log is not None else {}, self.parts.plan.is_continuous
        if is_continuous:
            self.checkpointer.save(numbers, end)
        if not end.is_stopping and self.may_switch():
            plan = self.find_better()
            if plan is not None:
                self._switch(plan)
        if not is_continuous:
            self.checkpointer.save(numbers, end)

    def may_switch(self) -> bool:
        """Whether another plan may be in force after this step of training, the same on all ranks."""
        if self._past is not None:
            return self._past.is_due(self.progress.trained)
        return self._replanner is not None and self._replanner.is_due(self.progress.trained)

    def find_better(self) -> Plan | None:
        """A plan that takes fewer seconds, or the plan of a run that is followed. All ranks call it together."""
        self.chain.channels.meet()
        if self._past is not None:
            return self._past.plan_after(self.progress.trained, self.parts.plan)
        return None if self._replanner is None else self._replanner.look(self.progress.trained)

    def _switch(self, plan: Plan) -> None:
        seconds = self.adopt(plan)
        if plan.is_continuous:
            self._forget_episodes()
        if self._replanner is not None:
            self._replanner.switched(self.progress.trained, seconds)

    def _generate(self) -> bool:
        """Generate continuously; returns whether the run stops or has ended, else another plan is in force."""
        if self.progress.step == 0:
            self.evaluate()
        last = self.parts.recipe.steps if self._past is None else self._past.made_before_next(self.progress.trained)
        plan = ContinuousLoop(self, last).run()
        if plan is not None:
            self._switch(plan)
        return plan is None

    def measure(self, spent: Mapping[str, float], seconds: float) -> None:
        """Take in the seconds of each entry in an iteration, and of the whole."""
        if self._replanner is not None:
            self._replanner.measure(spent, seconds)

    def _run_ahead(self) -> bool:
        """Take the iterations of a loop that is ahead of training, each with the weights of `lag + 1` steps before.

        Weights arrive while an iteration is made. What training decides after a step comes with them, and they are
        taken when exactly `lag` more iterations have been made: so the place of a checkpoint is the same in each run,
        whichever loop is faster. Returns whether the run stops; else another plan is in force.
        """
        loop, num_steps, is_stopping = self._loop, self.parts.recipe.steps, False
        if self.progress.step == 0:
            self.evaluate()
        while self.progress.trained < num_steps and not is_stopping and self._loop is loop:
            self.chain.channels.weights.begin(self.progress.trained + 1)
            if self.progress.step < min(num_steps, self.progress.trained + self._loop.lag + 1):
                numbers = self.run_step()
                self.measure(self.chain.spent, numbers["time/step"])
                self.write(self.progress.step, numbers)
                self.guards.must_roll_back(self.progress.step, self._agree(), self.checkpointer.newest)
                continue
            note = self.chain.take_weights()
            mine = StepEnd(note.is_stopping, note.is_checkpoint_due, self.progress.data_position)
            numbers, end = self.evaluate(), agree(mine, self._ranks)
            is_stopping = end.is_stopping
            self._end_step(numbers, end)
        return is_stopping

    def run_step(self) -> dict[str, float]:
        """Walk the chain once; returns the numbers of the iteration on the loop's first rank."""
        self.progress.step += 1
        seed_generators(self.parts.recipe.seed, self.progress.step, self._rank)
        begin, traces = time.perf_counter(), self.parts.directory.traces
        is_profiled = self.progress.step == self.parts.recipe.run.profiled_step
        trace = traces / f"device-rank-{self._rank}.json", self.parts.turns.device, self.parts.directory.may_fail
        with device_trace(*trace) if is_profiled else nullcontext():
            self.chain.walk()
        seconds = time.perf_counter() - begin
        with self.parts.clock.doing("log"):
            self.chain.report()
        with self.parts.clock.doing("wait_ranks"):
            judge = partial(self.guards.judge, self.progress.step)
            numbers, events = self.chain.metrics.take().reduce(judge, self.parts.transport.process_group)
            self.chain.events += events
        if self._log is not None and self.chain.proof is not None:
            self._log.facts = self.chain.proof.take(numbers)
        if "throughput/tokens" in numbers:
            numbers["throughput/tokens_per_s"] = numbers.pop("throughput/tokens") / seconds
        # The first rank may have no part in loading, but it has received what others report.
        self.progress.data_position = int(numbers.pop("data/position", 0))
        if not self._loop.lag:
            self.progress.trained = self.progress.step
        if self.guards.num_roll_backs:
            numbers["guard/roll_backs"] = self.guards.num_roll_backs
        return {**numbers, "time/step": seconds}

    def close(self) -> None:
        """End the threads that read data ahead, send what is in flight, and write checkpoints."""
        for loader in self.chain.loaders.values():
            loader.close()
        self.chain.channels.close()
        self.checkpointer.close()

    def _agree(self) -> StepEnd:
        """How the iteration has ended, the same on all ranks of the loop."""
        is_stopping, events = self.chain.channels.is_stop_wanted, tuple(self.chain.events)
        mine = StepEnd(is_stopping, self.checkpointer.is_due(), self.progress.data_position, events)
        with self.parts.clock.doing("wait_ranks"):
            end = agree(mine, self._ranks)
        # Bad weights must not take the place of good ones in a checkpoint.
        return replace(end, is_checkpoint_due=end.is_checkpoint_due and not end.is_doubtful)

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the weights of a step, where this asks for it and the model is in this loop.

        A loop that is ahead of training logs it here, as its iterations are other ones.
        """
        recipe, step = self.parts.recipe, self.progress.trained
        every = recipe.evaluation.every_steps
        ranks = answering(self.parts.plan.instances, recipe.evaluation.role).layout.ranks
        if not every or (step % every and step != recipe.steps) or ranks[0] not in self._loop.ranks:
            return {}
        numbers: dict[str, float] = {}
        self.parts.begin(step, "evaluate")
        if self.parts.evaluator is not None:
            record = partial(self.parts.directory.write_samples, step, self._rank, kind="evaluation")
            journal = partial(self.parts.episodes.write, "evaluation", step)
            at = EvaluationStep(partial(self.parts.progress, "evaluating"), step, record, journal)
            with self.tracer.span("evaluate", step), self.parts.clock.doing("evaluate"):
                numbers = self.parts.evaluator.run(at)
            numbers["time/evaluate"] = self.tracer.take("evaluate")
        with self.parts.clock.doing("wait_ranks"):
            numbers = to_first_rank(ranks, numbers, self._ranks)
        if self._log is not None and self._loop.lag and numbers:
            self._log.evaluations.write(step, {"time_s": self.progress.seconds, **numbers})
        return numbers

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of an iteration."""
        if self._log is not None and numbers:
            with self.parts.clock.doing("log"):
                numbers = {"time_s": self.progress.seconds, **numbers}
                self._log.write(step, numbers)
                error = self.parts.directory.first_reward_error() if numbers.get(FAILED) else ""
                self.parts.display.step(step, self.parts.recipe.steps, numbers, error)
        if step >= self.parts.recipe.run.trace_steps:
            self.tracer.close()

    def _resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoint = self.checkpointer.newest()
        if checkpoint is not None and self._past is not None:
            raise RecipeError.at(
                "run.follow",
                f"is {self.parts.recipe.run.follow}, but a run that follows another one cannot be continued, as what "
                "its engines were at is gone: pass --fresh to follow it from the beginning",
            )
        plan = plan_in_force(checkpoint, self.parts.recipe, self.parts.plan, self.parts.transport.world)
        if self._past is not None:
            plan = self._past.plan_after(0, plan) or plan
        if plan is not self.parts.plan:
            self.adopt(plan)
            if self._replanner is not None:
                self._replanner.follow(plan)
        if checkpoint is not None:
            self.checkpointer.resume(checkpoint, self.guards.resumed)
        else:
            self.chain.channels.open_journals()
        self.chain.num_roll_backs = self.guards.num_roll_backs
        if self.chain.proof is not None:
            self.chain.proof.forget()
        self._forget_episodes()
        if self._log is not None:
            self._log.open(self.progress, self.guards.num_roll_backs)
        self._is_log_open = True

    def _forget_episodes(self) -> None:
        """Forget episodes that are played again, and write down which layout is in force, where that matters."""
        plan, made, trained = self.parts.plan, self.progress.step, self.progress.trained
        if plan.is_continuous:
            made = int(self.parts.transport.world.max(torch.tensor([made]), "the iterations that are made"))
            if self._rank == 0:
                note_layout(self.parts.directory, plan, trained, made)
        self.parts.episodes.forget(made or -1, trained or -1, lambda rank: rank % plan.world_size == self._rank)


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, so that a step draws the same numbers however often it is run.

    So a checkpoint need not hold their state. Built-in stages key their own noise.
    """
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - user code may use the global generator
    torch.manual_seed(int(words[2]))


class LoopLog:
    """Log of the numbers of a loop's iterations, and of evaluations on its ranks; its first rank writes it.

    The loop that trains has one line for a step with all its numbers. A loop that is ahead evaluates the weights of an
    earlier step than the iteration that it is at, so that it has a file for either.

    Attributes:
        facts: Facts of the newest step for the proof of the run.
    """

    def __init__(self, parts: Parts, loop: Loop) -> None:
        directory, plan = parts.directory, parts.plan
        self._directory, self._plan, self._loop = directory, plan, loop
        self.facts: dict[str, Json] = {}
        self._proof = None if loop.lag else ProofLog(directory, proof_key())
        self._made_with = {} if loop.lag else run_facts(parts.recipe, plan)
        self.iterations = StepLog(directory, loop.name if loop.lag else "")
        self.evaluations = StepLog(directory, "evaluation") if loop.lag else self.iterations

    def open(self, progress: Progress, num_roll_backs: int) -> None:
        """Continue after the last iteration. What was written before the first one is written again."""
        self.open_files(progress)
        if not self._loop.lag:
            lags = {node: loop.lag for loop in self._plan.loops for node in loop.nodes}
            self._directory.forget_events(lambda node: (progress.step or -1) + lags.get(node, 0), num_roll_backs)

        def is_own(rank: int) -> bool:  # the loop that trains also takes ranks that there are no more
            loop = next((loop for loop in self._plan.loops if rank in loop.ranks), self._plan.leading)
            return loop.name == self._loop.name

        self._directory.forget_samples(progress.step or -1, progress.trained or -1, is_own)

    def open_files(self, progress: Progress) -> None:
        """Continue the files of the log after the last iteration."""
        self.iterations.open(progress.step + 1 if progress.step else 0)
        if self._loop.lag:
            self.evaluations.open(progress.trained + 1 if progress.trained else 0)
        if self._proof is not None:
            self._proof.open(progress.step + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an iteration, and add a step of training to the proof of the run."""
        self.iterations.write(step, numbers)
        if self._proof is not None and step:
            self._proof.write(step, self._made_with | self.facts | metrics_facts(step, numbers))

    def close(self, step: int) -> None:
        """Add the last checkpoints to the proof."""
        if self._proof is not None:
            self._proof.close(step)
