"""One rank of a run: takes one step of its loop after the other, and writes the log of the loop."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from rich.markup import escape

from leaderless.config import RecipeError
from leaderless.observability.clock import Tracer
from leaderless.observability.console import FAILED
from leaderless.observability.line_file import StepLog
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Loop, Plan, PlannedNode, RoleInstance, answering
from leaderless.worker.agreement import StepEnd, agree, to_first_rank
from leaderless.worker.asynchronous.async_loop import ContinuousLoop, Duties
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.checkpointer import Checkpointer
from leaderless.worker.device_sharing import device_trace
from leaderless.worker.replan.active_plan import PastLayouts, note_layout, plan_in_force, write_description
from leaderless.worker.replan.adopt import adopt
from leaderless.worker.replan.replanner import Replanner
from leaderless.worker.supervision.guards import Guards
from leaderless.worker.supervision.stop import StopRequest
from leaderless.worker.supervision.supervised import supervised


class Worker:
    """Trains, evaluates, logs and saves on one rank.

    Attributes:
        parts: Models, data and the other parts of the worker.
        progress: Position of its loop.
        chain: Entries of the plan that this rank executes.
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
        self._guards = Guards(recipe.guards, directory, parts.display, is_first=self._rank == self._loop.ranks[0])
        self._log, self._is_log_open = self._make_log(), False

    def _make_log(self) -> LoopLog | None:
        """The log of this rank's loop, if this is the loop's first rank."""
        if self._rank != self._loop.ranks[0]:
            return None
        return LoopLog(self.parts.directory, self.parts.plan, self._loop)

    def _follow(self, parts: Parts, chain: Chain) -> None:
        """Take the steps that come with these parts, and this chain of their plan."""
        self.parts, self.chain = parts, chain
        self._keeper = Checkpointer(parts, self.progress, chain, self.tracer)
        self._loop = parts.plan.loop_of(self._rank)
        self._ranks = parts.transport.process_group(self._loop.ranks)

    def adopt(self, plan: Plan) -> float:
        """Continue under another plan, between two steps; returns the seconds. All ranks call it together.

        Raises:
            RecipeError: The plan of this run, or the new one, cannot be changed while the run goes on.
        """
        self._keeper.finish()
        self.parts.begin(self.progress.step, "adopt")
        with self.tracer.span("adopt", self.progress.step):
            self._follow(*adopt(plan, self.parts, self.progress, self.chain, self.tracer))
            self._guards.is_first, self._log = self._rank == self._loop.ranks[0], self._make_log()
            if self._log is not None and self._is_log_open:
                self._log.open_files(self.progress)
            if self._rank == 0:
                write_description(self.parts.directory, self.parts.recipe, plan, self.parts.display.say)
        return self.tracer.take("adopt")

    def run(self, *, is_guest: bool = False) -> int | None:
        """Train to the last step, or until a signal asks to stop; the last state is written as a checkpoint.

        Args:
            is_guest: Whether the process belongs to a program that continues after the run, so that nothing may end it.

        Returns:
            The signal that stopped the run before the last step, if one did; SIGTERM where another rank received it.
        """
        self._resume()
        with supervised(self.parts, self.progress, is_guest=is_guest) as stop:
            self._run_steps(stop)
        return (stop.signal or signal.SIGTERM) if self.progress.trained < self.parts.recipe.steps else None

    def _run_steps(self, stop: StopRequest) -> None:
        self.parts.clock.start()
        self.chain.channels.is_asked_to_stop = lambda: stop.signal is not None
        self.parts.display.start(self.parts.recipe.steps, self.progress.trained)
        is_stopping = False
        while not is_stopping:
            is_stopping = self._run_loop() or self.progress.trained == self.parts.recipe.steps
        self.chain.channels.finish()
        self.parts.display.stop()
        self.tracer.close()

    def _run_loop(self) -> bool:
        """Go through iterations while this rank is in the same loop; returns whether the run stops."""
        if self._loop.is_continuous:
            return self._generate()
        return self._run_ahead() if self._loop.lag else self._train()

    def _train(self) -> bool:
        """Take the steps of the run, until they stop or another plan is in force; returns whether they stop."""
        loop, num_steps, is_stopping = self._loop, self.parts.recipe.steps, False
        if self.progress.step == 0:
            self._write(0, self._evaluate())
        while self.progress.step < num_steps and not is_stopping and self._loop is loop:
            numbers = self.run_step()
            if self._replanner is not None:
                numbers |= self._replanner.numbers()
                self._replanner.measure(self.chain.spent, numbers["time/step"])
            numbers |= self._evaluate()
            self._write(self.progress.step, numbers)
            end = self._agree()
            self.chain.channels.end_iteration(end)
            is_stopping = end.is_stopping
            if self._guards.must_roll_back(self.progress.step, end, self._keeper.newest):
                self._roll_back()
                continue
            self._end_step(numbers, end)
        return is_stopping

    def _end_step(self, numbers: dict[str, float], end: StepEnd) -> None:
        """Change the plan, and save, where that is due after a step of training. All ranks call it together.

        Unfinished work of ranks that generate continuously is saved before, as it is dropped then.
        """
        numbers, is_continuous = numbers if self._log is not None else {}, self.parts.plan.is_continuous
        if is_continuous:
            self._keeper.save(numbers, end)
        if not end.is_stopping and self._may_switch():
            plan = self.find_better()
            if plan is not None:
                self._switch(plan)
        if not is_continuous:
            self._keeper.save(numbers, end)

    def _may_switch(self) -> bool:
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
        made = self._note_layout()
        if self.parts.plan.is_continuous:
            self._forget_episodes(made)
        if self._replanner is not None:
            self._replanner.switched(self.progress.trained, seconds)

    def _note_layout(self) -> int:
        """Write down which layout is in force, where that matters; returns the iterations that are made."""
        plan, made = self.parts.plan, self.progress.step
        if not plan.is_continuous:
            return made
        made = int(self.parts.transport.world.max(torch.tensor([made]), "the iterations that are made"))
        if self._rank == 0:
            note_layout(self.parts.directory, plan, self.progress.trained, made)
        return made

    def _generate(self) -> bool:
        """Generate continuously; returns whether the run stops or has ended, else another plan is in force."""

        def evaluate() -> dict[str, float]:
            numbers = self._evaluate()
            self._write_evaluation(numbers)
            return numbers

        def measure(spent: Mapping[str, float], seconds: float) -> None:
            if self._replanner is not None:
                self._replanner.measure(spent, seconds)

        if self.progress.step == 0:
            evaluate()
        last = self.parts.recipe.steps
        if self._past is not None:
            last = self._past.made_before_next(self.progress.trained)
        duties = Duties(last, evaluate, self._write, measure, self._may_switch, self.find_better)
        plan = ContinuousLoop(
            self.parts, self.progress, self.chain, self._keeper, self._guards, duties, self.tracer
        ).run()
        if plan is not None:
            self._switch(plan)
        return plan is None

    def _run_ahead(self) -> bool:
        """Take the iterations of a loop that is ahead of training, each with the weights of `lag + 1` steps before.

        Weights arrive while an iteration is made. What training decides after a step comes with them, and they are
        taken when exactly `lag` more iterations have been made: so the place of a checkpoint is the same in each run,
        whichever loop is faster. Returns whether the run stops; else another plan is in force.
        """
        loop, num_steps, is_stopping = self._loop, self.parts.recipe.steps, False
        if self.progress.step == 0:
            self._write_evaluation(self._evaluate())
        while self.progress.trained < num_steps and not is_stopping and self._loop is loop:
            self.chain.channels.weights.begin(self.progress.trained + 1)
            if self.progress.step < min(num_steps, self.progress.trained + self._loop.lag + 1):
                numbers = self.run_step()
                if self._replanner is not None:
                    self._replanner.measure(self.chain.spent, numbers["time/step"])
                self._write(self.progress.step, numbers)
                self._guards.must_roll_back(self.progress.step, self._agree(), self._keeper.newest)
                continue
            note = self.chain.take_weights()
            mine = StepEnd(note.is_stopping, note.is_checkpoint_due, self.progress.data_position)
            numbers, end = self._evaluate(), agree(mine, self._ranks)
            self._write_evaluation(numbers)
            is_stopping = end.is_stopping
            self._end_step(numbers, end)
        return is_stopping

    def run_step(self) -> dict[str, float]:
        """Walk the chain once; returns the numbers of the iteration on the loop's first rank."""
        self.progress.step += 1
        seed_generators(self.parts.recipe.seed, self.progress.step, self._rank)
        begin = time.perf_counter()
        with self._profiled():
            self.chain.channels.make_room()
            self.chain.walk()
        seconds = time.perf_counter() - begin
        with self.parts.clock.doing("log"):
            self.chain.report()
        with self.parts.clock.doing("wait_ranks"):
            numbers = self.chain.metrics.reduce(self._judge)
        if "throughput/tokens" in numbers:
            numbers["throughput/tokens_per_s"] = numbers.pop("throughput/tokens") / seconds
        # The first rank may have no part in loading, but it has received what others report.
        self.progress.data_position = int(numbers.pop("data/position", 0))
        if not self._loop.lag:
            self.progress.trained = self.progress.step
        if self._guards.num_roll_backs:
            numbers["guard/roll_backs"] = self._guards.num_roll_backs
        return {**numbers, "time/step": seconds}

    def _profiled(self) -> AbstractContextManager[None]:
        """The context of a step: the one that is to be profiled has a trace of the device."""
        directory, step = self.parts.directory, self.parts.recipe.run.profiled_step
        if self.progress.step != step:
            return nullcontext()
        path = directory.traces / f"device-rank-{self._rank}.json"
        return device_trace(path, self.parts.turns.device, directory.may_fail)

    def close(self) -> None:
        """End the threads that read data ahead, send what is in flight, and write checkpoints."""
        for loader in self.chain.loaders.values():
            loader.close()
        self.chain.channels.close()
        self._keeper.close()

    @property
    def _evaluated(self) -> RoleInstance:
        """The model that answers held-out prompts."""
        return answering(self.parts.plan.instances, self.parts.recipe.evaluation.role)

    def _judge(self, numbers: Mapping[str, float], nodes: Sequence[PlannedNode]) -> None:
        self.chain.events += self._guards.judge_rewards(self.progress.step, numbers, nodes)

    def _agree(self) -> StepEnd:
        """How the iteration has ended, the same on all ranks of the loop."""
        is_stopping, events = self.chain.channels.is_stop_wanted, tuple(self.chain.events)
        mine = StepEnd(is_stopping, self._keeper.is_due(), self.progress.data_position, events)
        with self.parts.clock.doing("wait_ranks"):
            return agree(mine, self._ranks)

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the weights of a step, where this asks for it and the model is in this loop."""
        recipe, step = self.parts.recipe, self.progress.trained
        every, ranks = recipe.evaluation.every_steps, self._evaluated.layout.ranks
        if not every or (step % every and step != recipe.steps) or ranks[0] not in self._loop.ranks:
            return {}
        numbers: dict[str, float] = {}
        self.parts.begin(step, "evaluate")
        if self.parts.evaluator is not None:
            with self.tracer.span("evaluate", step), self.parts.clock.doing("evaluate"):
                record = partial(self.parts.directory.write_samples, step, self._rank, kind="evaluation")
                journal = partial(self.parts.episodes.write, "evaluation", step)
                numbers = self.parts.evaluator.run(partial(self.parts.progress, "evaluate"), record, journal, step)
            numbers["time/evaluate"] = self.tracer.take("evaluate")
        with self.parts.clock.doing("wait_ranks"):
            return to_first_rank(ranks, numbers, self._ranks)

    def _write_evaluation(self, numbers: dict[str, float]) -> None:
        """Log what was measured after a step of training, in a loop that is ahead of it."""
        if self._log is not None and numbers:
            self._log.write_evaluation(self.progress.trained, {"time_s": self.progress.seconds, **numbers})

    def _write(self, step: int, numbers: dict[str, float]) -> None:
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
        checkpoint = self._keeper.newest()
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
            self._keeper.resume(checkpoint, self._guards.resumed)
        else:
            self.chain.channels.open_journals()
        self.chain.num_roll_backs = self._guards.num_roll_backs
        self._forget_episodes(self._note_layout())
        if self._log is not None:
            self._log.open(self.progress, self._guards.num_roll_backs)
        self._is_log_open = True

    def _forget_episodes(self, made: int) -> None:
        """Forget episodes that are played again, those after some iterations."""
        trained, world_size = self.progress.trained, self.parts.plan.world_size
        self.parts.episodes.forget(made or -1, trained or -1, lambda rank: rank % world_size == self._rank)

    def _roll_back(self) -> None:
        """Continue from the newest checkpoint, but with the next data and the clock of the run."""
        now = self.progress.seconds
        self._resume()
        self.progress.seconds_before += now - self.progress.seconds


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, so that a step draws the same numbers however often it is run.

    So a checkpoint need not hold their state. Built-in stages key their own noise.
    """
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - user code may use the global generator
    torch.manual_seed(int(words[2]))


class LoopLog:
    """Writes the numbers of a loop's iterations, and of evaluations on its ranks.

    The loop that trains has one line for a step with all its numbers. A loop that is ahead evaluates the weights of an
    earlier step than the iteration that it is at, so that it has a file for either.
    """

    def __init__(self, directory: RunDirectory, plan: Plan, loop: Loop) -> None:
        self._directory, self._plan, self._loop = directory, plan, loop
        self._iterations = StepLog(directory, loop.name if loop.lag else "")
        self._evaluations = self._iterations
        if loop.lag:
            self._evaluations = StepLog(directory, "evaluation")

    def open(self, progress: Progress, num_roll_backs: int) -> None:
        """Continue after the last iteration. What was written before the first one is written again."""
        self.open_files(progress)
        if not self._loop.lag:
            lags = {node: loop.lag for loop in self._plan.loops for node in loop.nodes}
            self._directory.forget_events(lambda node: (progress.step or -1) + lags.get(node, 0), num_roll_backs)
        self._directory.forget_samples(progress.step or -1, progress.trained or -1, self._is_own)

    def open_files(self, progress: Progress) -> None:
        """Continue the files of the log after the last iteration."""
        self._iterations.open(progress.step + 1 if progress.step else 0)
        if self._loop.lag:
            self._evaluations.open(progress.trained + 1 if progress.trained else 0)

    def _is_own(self, rank: int) -> bool:
        """Whether a rank is in this loop; the one that trains also takes those that there are no more."""
        loop = next((loop for loop in self._plan.loops if rank in loop.ranks), self._plan.leading)
        return loop.name == self._loop.name

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an iteration."""
        self._iterations.write(iteration, numbers)

    def write_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what was measured after a step of training."""
        self._evaluations.write(step, numbers)
