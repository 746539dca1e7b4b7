"""One rank of a run: walks its chain step by step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.markup import escape

from leaderless.config import Recipe
from leaderless.data.databuffer import Databuffer
from leaderless.data.dataloader import Dataloader
from leaderless.data.dataset import TrainingSet
from leaderless.data.encode import Tokenizer
from leaderless.data.surplus import Surplus
from leaderless.data.transport import Transport
from leaderless.observability.console import Display
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.observability.step_log import StepLog
from leaderless.observability.trace import Tracer
from leaderless.planner import Action, Load, Loop, Plan, Reshard, Run, Stream, SyncWeights, flat, format_ranks
from leaderless.stages.context import Grader, StageContext
from leaderless.worker.agreement import StepEnd, agree
from leaderless.worker.checkpoint import CheckpointWriter, RunState, load_checkpoint, read_node_state
from leaderless.worker.evaluation import Evaluator, evaluated_instance
from leaderless.worker.guards import Guards
from leaderless.worker.loop import check_filled, count_groups, report_loop
from leaderless.worker.nodes import load_stages
from leaderless.worker.roles import Roles
from leaderless.worker.stop import StopRequest

WAITING = "waiting"
"""Span in which a rank waits for a window that is on its way."""


@contextmanager
def _placed(action: str, step: int, rank: int) -> Iterator[None]:
    """Errors say where in the run they came up."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at step {step}, in {action}, on rank {rank}")
        raise


@dataclass
class Worker:
    """Everything that one rank needs to train.

    Attributes:
        recipe: What the user set.
        plan: The same on every rank.
        transport: Has all groups of the plan.
        roles: The models.
        sets: Training prompts.
        evaluator: Held-out prompts, on ranks that hold the model that answers them.
        tokenizer: Of the policy.
        grade: Computes rewards.
        directory: Of the run.
        display: What a person sees, on the first rank.
    """

    recipe: Recipe
    plan: Plan
    transport: Transport
    roles: Roles
    sets: Sequence[TrainingSet]
    evaluator: Evaluator | None
    tokenizer: Tokenizer
    grade: Grader
    directory: RunDirectory
    display: Display
    step: int = field(default=0, init=False)
    data_position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.rank = self.transport.rank
        self.chain = self.plan.chain(self.rank)
        self.stages = load_stages(self.plan, self.rank)
        self.buffer = Databuffer(self.plan, self.transport)
        self.loaders = {
            action: Dataloader(self.sets, self.recipe, action.layout.shard_of(self.rank), action.layout.dp)
            for action in flat(self.chain)
            if isinstance(action, Load)
        }
        trace = self.directory.traces / f"rank-{self.rank}.json" if self.recipe.run.trace_steps else None
        self.tracer = Tracer(trace, self.rank)
        self.pools = list(dict.fromkeys(self.plan.ranks_of(action) for action in flat(self.plan.schedule)))
        self.metrics = {ranks: Metrics() for ranks in self.pools if self.rank in ranks}
        self.states: dict[str, dict[str, float]] = {name: {} for name in self.stages}
        self.guards = Guards(self.recipe.guards, self.directory, self.display, is_first=self.rank == 0)
        self._events: list[GuardEvent] = []
        self.log = StepLog(self.directory, enable_tensorboard=self.recipe.run.tensorboard) if self.rank == 0 else None
        self._seconds_before = 0.0
        self._begin = time.monotonic()

    def run(self) -> int | None:
        """Train to the last step, or until a signal asks to stop; the last state is written as a checkpoint.

        Returns:
            The signal, when this rank was stopped by one before the last step.
        """
        self._resume()
        with StopRequest(self._announce_stop, has_peers=self.transport.world.size > 1) as stop:
            self._run_steps(stop)
        return stop.signal if self.step < self.recipe.steps else None

    def _run_steps(self, stop: StopRequest) -> None:
        self.display.start(self.recipe.steps, self.step)
        if self.step == 0:
            self._log(self._evaluate())
        is_stopping = False
        while self.step < self.recipe.steps and not is_stopping:
            numbers = self.run_step()
            self._log(numbers | self._evaluate())
            end = agree(StepEnd(stop.signal is not None, self.data_position, tuple(self._events)), self.transport.world)
            is_stopping = end.is_stopping
            if self.guards.settle(self.step, end):
                self._roll_back()
            else:
                self._checkpoint(is_stopping=is_stopping)
        self.display.stop()
        self.tracer.close()
        if self.log is not None:
            self.log.close()

    def close(self) -> None:
        """End what reads data ahead."""
        for loader in self.loaders.values():
            loader.close()

    def _announce_stop(self) -> None:
        self.display.say("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one")

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        checkpoints = list_checkpoints(self.directory.checkpoints)
        if not checkpoints:
            return
        state = load_checkpoint(checkpoints[-1], self.roles.trained())
        for name in self.states:
            self.states[name] = read_node_state(checkpoints[-1], name)
        self.roles.sync_all()
        self.step, self.data_position, self._seconds_before = state.step, state.data_position, state.time_s
        passed_over = self.guards.resumed(state.step)
        if passed_over is not None:
            self.data_position = passed_over.data_position
        for loader in self.loaders.values():
            loader.position = self.data_position
        loop = self.plan.loop
        if loop is not None and self.rank in loop.layout:
            # What waits in the checkpoint was used by the steps that went wrong, so it is passed over as well.
            shard = loop.layout.shard_of(self.rank), loop.layout.dp
            self.buffer.surplus = Surplus() if passed_over else Surplus.load(checkpoints[-1], *shard)
        if self.rank == 0:
            self.directory.forget_after(state.step, self.guards.num_roll_backs)
        self.display.say(f"going on from step {state.step} ([bold]{escape(str(checkpoints[-1]))}[/])")

    def _roll_back(self) -> None:
        """Go on from the newest checkpoint, though not from its place in the data."""
        seconds = self._seconds()
        self._resume()
        self._seconds_before, self._begin = seconds, time.monotonic()

    def run_step(self) -> dict[str, float]:
        """Walk the chain once.

        Returns:
            The step's numbers, on rank 0.
        """
        self.step += 1
        self._events.clear()
        begin = time.perf_counter()
        self._walk(self.chain)
        self.buffer.clear()
        return self._reduce_metrics(time.perf_counter() - begin)

    def _walk(self, actions: Sequence[Action]) -> None:
        """Execute entries of the chain one after the other."""
        for action in actions:
            if isinstance(action, Loop):
                self._repeat(action)
                continue
            if isinstance(action, Stream):
                self._stream(action)
                continue
            self.display.activity(str(action))
            with self.tracer.span(str(action), self.step):
                self._execute(action)
            self.buffer.release(action)

    def _stream(self, stream: Stream) -> None:
        """Go through entries window by window, while windows before are on their way to other ranks."""
        self.buffer.open_windows(stream)
        for action, window in stream.turns():
            label = f"{action} {window + 1}/{stream.num_windows}"
            self.display.activity(label)
            with _placed(label, self.step, self.rank):
                match action:
                    case Run(name):
                        with self.tracer.span(WAITING, self.step):
                            self.buffer.wait(name, window)
                        with self.tracer.span(str(action), self.step):
                            made = self.stages[name](self.buffer.get(name, window), self._context(name))
                            self.buffer.put(name, made, window)
                    case Reshard():
                        timed = self.tracer.span(str(action), self.step, lane=1)
                        self.buffer.reshard_window(action, window, timed)
            self.buffer.release(action, window)
        with self.tracer.span(WAITING, self.step), _placed(str(stream), self.step, self.rank):
            self.buffer.close_windows()

    def _repeat(self, loop: Loop) -> None:
        """Go round a loop until its ranks together have the groups that the step wants."""
        num_rounds = 0
        while (num_groups := self._count_groups(loop)) < loop.num_groups and num_rounds < loop.max_rounds:
            self._walk(loop.body)
            self.buffer.end_round(loop)
            num_rounds += 1
        check_filled(loop, num_groups, self.recipe.algorithm.loop)
        report_loop(loop, num_groups, num_rounds, self.metrics[loop.ranks])
        if self.rank in loop.layout:
            self.buffer.leave(loop)

    def _count_groups(self, loop: Loop) -> int:
        with self.tracer.span("loop", self.step):
            return count_groups(loop, self.buffer, self.transport.group(loop.ranks))

    def _execute(self, action: Action) -> None:
        with _placed(str(action), self.step, self.rank):
            match action:
                case Load():
                    self.buffer.load(action, self.loaders[action].next())
                case Run(name):
                    self.buffer.put(name, self.stages[name](self.buffer.get(name), self._context(name)))
                case Reshard():
                    self.buffer.reshard(action)
                case SyncWeights():
                    self.roles.sync(action)

    def _context(self, name: str) -> StageContext:
        node = self.plan[name]
        return StageContext(
            recipe=self.recipe,
            node=node,
            step=self.step,
            group=self.transport.group(node.layout.ranks),
            metrics=self.metrics[node.layout.ranks],
            run_directory=self.directory,
            tokenizer=self.tokenizer,
            model=self.roles.of(node.node.role, node.layout) if node.node.role else None,
            grade=self.grade,
            state=self.states[name],
            # Each event is to be told once, by one of the ranks that know it.
            events=self._events if self.rank == node.layout.ranks[0] else [],
            num_roll_backs=self.guards.num_roll_backs,
            progress=lambda fraction: self.display.activity(name, fraction),
        )

    def _reduce_metrics(self, seconds: float) -> dict[str, float]:
        """Add up the numbers of each pool; rank 0 gets them all, for the log."""
        spent = self.tracer.take_seconds()
        for action in flat(self.chain):
            if isinstance(action, Stream):
                self.metrics[action.ranks].max("time/waiting", spent.get(WAITING, 0.0))
            elif not isinstance(action, Loop):
                self.metrics[self.plan.ranks_of(action)].max(f"time/{action}", spent.get(str(action), 0.0))
            if isinstance(action, Load):
                for name, value in self.loaders[action].numbers().items():
                    self.metrics[action.layout.ranks].mean(name, value, 1)
        numbers: dict[str, float] = {}
        for ranks in self.pools:
            reduced = self.metrics[ranks].reduce(self.transport.group(ranks)) if self.rank in ranks else {}
            if self.rank == ranks[0]:
                nodes = [node for node in self.plan.nodes if node.layout.ranks == ranks]
                self._events += self.guards.judge_rewards(self.step, reduced, nodes)
            numbers |= self._bring_to_first(ranks, reduced)
        self.metrics = {ranks: Metrics() for ranks in self.metrics}
        if "throughput/tokens" in numbers:
            numbers["throughput/tokens_per_s"] = numbers.pop("throughput/tokens") / seconds
        # The first rank may have no part in loading; what others report has been brought to it.
        self.data_position = int(numbers.pop("data/position", 0))
        if self.guards.num_roll_backs:
            numbers["guard/roll_backs"] = self.guards.num_roll_backs
        return {**numbers, "time/step": seconds}

    def _bring_to_first(self, ranks: tuple[int, ...], numbers: dict[str, float]) -> dict[str, float]:
        """Numbers that some ranks agree on, brought to rank 0 by the first of them if it is not among them."""
        world = self.transport.world
        if 0 in ranks or self.rank not in {0, ranks[0]}:
            return numbers
        if self.rank == ranks[0]:
            text = torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)
            world.exchange({0: text}, [], "the log")
            return numbers
        message = world.exchange({}, [ranks[0]], f"the numbers of ranks {format_ranks(ranks)}")[ranks[0]]
        received: dict[str, float] = json.loads(bytes(message.numpy()))
        return received

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy, where this step asks for it."""
        every = self.recipe.evaluation.every_steps
        if not every or (self.step % every and self.step != self.recipe.steps):
            return {}
        numbers: dict[str, float] = {}
        if self.evaluator is not None:
            with self.tracer.span("evaluate", self.step):
                numbers = self.evaluator.run(lambda fraction: self.display.activity("evaluate", fraction))
            numbers["time/evaluate"] = self.tracer.take_seconds()["evaluate"]
        return self._bring_to_first(evaluated_instance(self.plan).layout.ranks, numbers)

    def _log(self, numbers: dict[str, float]) -> None:
        if self.log is not None and numbers:
            numbers = {"time_s": self._seconds(), **numbers}
            self.log.write(self.step, numbers)
            self.display.step(self.step, self.recipe.steps, numbers)
        if self.step >= self.recipe.run.trace_steps:
            self.tracer.close()

    def _seconds(self) -> float:
        """Seconds that the run has taken, earlier starts included."""
        return self._seconds_before + time.monotonic() - self._begin

    def _save_surplus(self, folder: Path) -> None:
        """Write what a loop has left over, each shard once."""
        loop = self.plan.loop
        if loop is not None and self.rank in loop.layout and loop.layout.is_first_of_shard(self.rank):
            self.buffer.surplus.save(folder, loop.layout.shard_of(self.rank), loop.layout.dp)

    def _checkpoint(self, *, is_stopping: bool) -> None:
        """Write a checkpoint where this step asks for one, and always at the end."""
        every = self.recipe.checkpoint.every_steps
        is_last = self.step == self.recipe.steps
        if not (is_stopping or is_last or (every and self.step % every == 0)):
            return
        self.display.activity("checkpoint")
        writer = CheckpointWriter(
            self.directory.checkpoints,
            self.roles.trained(),
            self.transport.world,
            self.tokenizer,
            self.recipe.checkpoint.keep,
        )
        with self.tracer.span("checkpoint", self.step):
            mine = {name: state for name, state in self.states.items() if self.rank == self.plan[name].layout.ranks[0]}
            path = writer.save(mine, RunState(self.step, self.data_position, self._seconds()), self._save_surplus)
        self.tracer.take_seconds()
        if is_stopping and not is_last:
            self.display.stop()
            self.display.say(f"stopped after step {self.step}; the same command goes on from [bold]{escape(str(path))}")
