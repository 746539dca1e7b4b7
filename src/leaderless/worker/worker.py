"""One rank of a run: walks its chain step by step."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.markup import escape

from leaderless.checkpoint.reader import RunState, load_checkpoint, newest_good, read_node_state
from leaderless.checkpoint.writer import CheckpointError, CheckpointWriter, Content
from leaderless.config import Recipe, dump_recipe
from leaderless.data.databuffer import Databuffer
from leaderless.data.dataloader import Dataloader
from leaderless.data.dataset import TrainingSet
from leaderless.data.encode import Tokenizer
from leaderless.data.surplus import Surplus
from leaderless.data.transport import Transport
from leaderless.observability.console import Display
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.observability.step_log import StepLog
from leaderless.observability.trace import Tracer
from leaderless.planner import Action, Load, Loop, Plan, Reshard, RunNode, SyncWeights, Windowed, flat, format_ranks
from leaderless.stages.context import Grader, StageContext
from leaderless.supervision.guards import Guards
from leaderless.supervision.heartbeat import Watchdog, end_stalled
from leaderless.supervision.stop import StopRequest
from leaderless.worker.agreement import StepEnd, agree
from leaderless.worker.evaluation import Evaluator, evaluated_instance
from leaderless.worker.loop import check_filled, count_groups, report_loop
from leaderless.worker.nodes import load_stages
from leaderless.worker.roles import Roles
from leaderless.worker.seed import seed_generators

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
        self.places = {action: place for place, action in enumerate(flat(self.plan.schedule))}
        self.stages = load_stages(self.plan, self.rank)
        self.buffer = Databuffer(self.plan, self.transport)
        self.loaders = {
            action: Dataloader(self.sets, self.recipe, action.layout.shard_of(self.rank), action.layout.dp)
            for action in flat(self.chain)
            if isinstance(action, Load)
        }
        trace = self.directory.traces / f"rank-{self.rank}.json" if self.recipe.run.trace_steps else None
        self.directory.tell = lambda text: self.display.say(f"[bold red]{escape(text)}[/]")
        self.tracer = Tracer(trace, self.rank, self.directory.may_fail)
        self.pools = list(dict.fromkeys(self.plan.ranks_of(action) for action in flat(self.plan.schedule)))
        self.metrics = {ranks: Metrics() for ranks in self.pools if self.rank in ranks}
        self.states: dict[str, dict[str, float]] = {name: {} for name in self.stages}
        self.guards = Guards(self.recipe.guards, self.directory, self.display, is_first=self.rank == 0)
        self._events: list[GuardEvent] = []
        self.log = StepLog(self.directory, enable_tensorboard=self.recipe.run.tensorboard) if self.rank == 0 else None
        self.checkpoints = CheckpointWriter(
            self.directory.checkpoints,
            self.roles.trained(),
            self.transport.world,
            self.tokenizer,
            self.recipe.checkpoint,
            self.recipe.run.timeout_s,
            {"recipe.yaml": dump_recipe(self.recipe), "plan.json": json.dumps(self.plan.to_json(), indent=1)},
        )
        self._seconds_before = 0.0
        self._begin = time.monotonic()

    def run(self) -> int | None:
        """Train to the last step, or until a signal asks to stop; the last state is written as a checkpoint.

        Returns:
            The signal, when the run was stopped by one before the last step; SIGTERM where another rank got it.
        """
        self._resume()
        self._open_log()
        with self._watchdog(), StopRequest(self.recipe.run.grace_s, self._announce_stop, self._announce_end) as stop:
            self._run_steps(stop)
        return (stop.signal or signal.SIGTERM) if self.step < self.recipe.steps else None

    def _run_steps(self, stop: StopRequest) -> None:
        self.display.start(self.recipe.steps, self.step)
        if self.step == 0:
            self._log(self._evaluate())
        is_stopping = False
        while self.step < self.recipe.steps and not is_stopping:
            numbers = self.run_step() | self._evaluate()
            self._log(numbers)
            end = self._agree(stop)
            is_stopping = end.is_stopping
            if self.guards.settle(self.step, end, self._newest_checkpoint):
                self._roll_back()
            else:
                self._checkpoint(numbers, end)
        self.display.stop()
        self.tracer.close()
        if self.log is not None:
            self.log.close()

    def close(self) -> None:
        """End what reads data ahead and what writes behind."""
        for loader in self.loaders.values():
            loader.close()
        self.checkpoints.close()

    def _announce_stop(self) -> None:
        self.display.say("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one")

    def _announce_end(self) -> None:
        done = self.directory.last_step()
        goes_on = f"; the same command goes on from step {done}" if done else ""
        self.display.say(f"step {self.step} is abandoned after run.grace_s={self.recipe.run.grace_s:g} s{goes_on}")

    def _watchdog(self) -> Watchdog:
        run, stacks = self.recipe.run, self.directory.errors / f"stacks-rank-{self.rank}.txt"
        # A wait for a peer must not time out before the peer's stall is seen.
        timeout_s = min(run.stall_timeout_s, run.timeout_s / 2)
        on_stall = partial(end_stalled, directory=self.directory, rank=self.rank)
        return Watchdog(self.transport.activity, self.transport, timeout_s, stacks, on_stall)

    def _begin_entry(self, name: str, action: Action | None = None) -> None:
        """Show what is done now, and tell the watchdog; what is not in the schedule comes after all that is."""
        place = self.places[action] if action is not None else len(self.places)
        self.transport.activity.begin(self.step, name, place)
        self.display.activity(name)

    def _go_on(self, name: str, fraction: float) -> None:
        """Something of a node's work is done."""
        self.transport.activity.beat()
        self.display.activity(name, fraction)

    def _resume(self) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is None:
            return
        state = load_checkpoint(checkpoint, self.roles.trained())
        for name in self.states:
            self.states[name] = read_node_state(checkpoint, name)
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
            self.buffer.surplus = Surplus() if passed_over else Surplus.load(checkpoint, *shard)
        self.display.say(f"going on from step {state.step} ([bold]{escape(str(checkpoint))}[/])")

    def _roll_back(self) -> None:
        """Go on from the newest checkpoint, though not from its place in the data."""
        seconds = self._seconds()
        self._resume()
        self._open_log()
        self._seconds_before, self._begin = seconds, time.monotonic()

    def _open_log(self) -> None:
        if self.log is not None:
            self.log.open(self.step + 1 if self.step else 0, self.guards.num_roll_backs)

    def run_step(self) -> dict[str, float]:
        """Walk the chain once.

        Returns:
            The step's numbers, on rank 0.
        """
        self.step += 1
        seed_generators(self.recipe.seed, self.step, self.rank)
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
            if isinstance(action, Windowed):
                self._stream(action)
                continue
            self._begin_entry(str(action), action)
            with self.tracer.span(str(action), self.step):
                self._execute(action)
            self.buffer.release(action)

    def _stream(self, stream: Windowed) -> None:
        """Go through entries window by window, while windows before are on their way to other ranks."""
        self.buffer.open_windows(stream)
        for action, window in stream.turns():
            label = f"{action} {window + 1}/{stream.num_windows}"
            self._begin_entry(label, action)
            with _placed(label, self.step, self.rank):
                match action:
                    case RunNode(name):
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
            return count_groups(loop, self.buffer, self.transport.process_group(loop.ranks))

    def _execute(self, action: Action) -> None:
        with _placed(str(action), self.step, self.rank):
            match action:
                case Load():
                    self.buffer.load(action, self.loaders[action].next())
                case RunNode(name):
                    self.buffer.put(name, self.stages[name](self.buffer.get(name), self._context(name)))
                case Reshard():
                    self.buffer.reshard(action)
                case SyncWeights():
                    self.roles.sync(action)

    def _context(self, name: str) -> StageContext:
        node = self.plan[name]
        metrics = self.metrics[node.layout.ranks]
        return StageContext(
            recipe=self.recipe,
            node=node,
            step=self.step,
            process_group=self.transport.process_group(node.layout.ranks),
            metrics=metrics if node.layout.is_first_of_shard(self.rank) else metrics.of_replica(),
            run_directory=self.directory,
            tokenizer=self.tokenizer,
            model=self.roles.of(node.node.role, node.layout) if node.node.role else None,
            grade=self.grade,
            state=self.states[name],
            # Each event is to be told once, by one of the ranks that know it.
            events=self._events if self.rank == node.layout.ranks[0] else [],
            num_roll_backs=self.guards.num_roll_backs,
            progress=lambda fraction: self._go_on(name, fraction),
        )

    def _reduce_metrics(self, seconds: float) -> dict[str, float]:
        """Add up the numbers of each pool; rank 0 gets them all, for the log."""
        spent = self.tracer.take_seconds()
        for action in flat(self.chain):
            if isinstance(action, Windowed):
                self.metrics[action.ranks].max("time/waiting", spent.get(WAITING, 0.0))
            elif not isinstance(action, Loop):
                self.metrics[self.plan.ranks_of(action)].max(f"time/{action}", spent.get(str(action), 0.0))
            if isinstance(action, Load):
                for name, value in self.loaders[action].numbers().items():
                    self.metrics[action.layout.ranks].mean(name, value, 1)
        numbers: dict[str, float] = {}
        for ranks in self.pools:
            reduced = self.metrics[ranks].reduce(self.transport.process_group(ranks)) if self.rank in ranks else {}
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
        self._begin_entry("evaluate")
        if self.evaluator is not None:
            with self.tracer.span("evaluate", self.step):
                numbers = self.evaluator.run(lambda fraction: self._go_on("evaluate", fraction))
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

    def _agree(self, stop: StopRequest) -> StepEnd:
        """How the step has ended, the same on all ranks."""
        is_due = self.checkpoints.is_due(self.step)
        mine = StepEnd(stop.signal is not None, is_due, self.data_position, tuple(self._events))
        return agree(mine, self.transport.world)

    def _newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole, one that is being written included. All ranks call it together."""
        self.checkpoints.wait()
        return newest_good(self.directory.checkpoints, self.transport.world, self.display.say)

    def _checkpoint(self, numbers: dict[str, float], end: StepEnd) -> None:
        """Write a checkpoint where one is due, and always at the end."""
        is_last = self.step == self.recipe.steps
        must_succeed = end.is_stopping or is_last
        is_wanted = must_succeed or end.is_checkpoint_due
        if is_wanted:
            self.checkpoints.wait()  # or nobody would hear that the one before has failed
        self._tell_failed_checkpoint(self.checkpoints.take_error())
        if not is_wanted:
            return
        self._begin_entry("checkpoint")
        with self.tracer.span("checkpoint", self.step):
            self.checkpoints.begin(self._content(numbers))
            if not self.recipe.checkpoint.asynchronous or must_succeed:
                try:
                    self.checkpoints.settle()
                except (CheckpointError, OSError) as error:
                    if must_succeed:
                        raise
                    self._tell_failed_checkpoint(error)
        self.tracer.take_seconds()
        if end.is_stopping and not is_last:
            self.display.stop()
            path = self.directory.checkpoints / f"step-{self.step:06d}"
            self.display.say(f"stopped after step {self.step}; the same command goes on from [bold]{escape(str(path))}")

    def _content(self, numbers: dict[str, float]) -> Content:
        """What a checkpoint of this moment holds besides tensors."""
        loop, save_surplus = self.plan.loop, None
        if loop is not None and self.rank in loop.layout and loop.layout.is_first_of_shard(self.rank):
            # Batches are never changed in place: this one stays what it is while it is written.
            surplus, shard = Surplus(self.buffer.surplus.batch), loop.layout.shard_of(self.rank)
            save_surplus = partial(surplus.save, shard=shard, num_shards=loop.layout.dp)
        return Content(
            RunState(self.step, self.data_position, self._seconds()),
            metrics=numbers,
            nodes={
                name: dict(state) for name, state in self.states.items() if self.rank == self.plan[name].layout.ranks[0]
            },
            save_surplus=save_surplus,
        )

    def _tell_failed_checkpoint(self, error: BaseException | None) -> None:
        if error is not None:
            notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            self.display.say(
                f"[bold red]a checkpoint could not be written[/]: {escape(str(error) + notes)}. "
                "Training goes on; the checkpoints before are as they were, and the next one is tried when it is due"
            )
