"""The part of the plan that one rank executes: the walk through its chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from leaderless.base.named_functions import load_own
from leaderless.config import Recipe
from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer.databuffer import Databuffer
from leaderless.data.dataloader import Dataloader
from leaderless.observability.clock import State, Tracer
from leaderless.observability.console import FAILED
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.planner import (
    Action,
    Load,
    Plan,
    Pull,
    Push,
    Repeat,
    Reshard,
    RunNode,
    SyncWeights,
    Windowed,
    flat,
)
from leaderless.planner.workflow.stage_spec import tagged
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.stages.context import Grader, ModelRole, StageContext, UpdateGate, limited
from leaderless.stages.episodes import count_failures
from leaderless.training.engine import ValueEngine
from leaderless.training.micro_batches import response_lengths
from leaderless.worker.agreement import SecondsReport, StepMetrics, report_traffic, state_of, sync_of
from leaderless.worker.asynchronous.channels import Channels, Note
from leaderless.worker.asynchronous.generation import Generation
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.step_proof import StepProof

StageFunction = Callable[[Batch, StageContext], Batch]
WAITING = "waiting"
"""Span in which a rank waits for a window that is on its way."""


class Chain:
    """The entries of the schedule that a rank takes part in, in order, and the data that passes between them.

    Attributes:
        stages: Function of each node that the rank runs.
        buffer: Columns of the iteration.
        channels: Ends of the channels to other loops.
        loaders: Dataloader of each entry that loads.
        metrics: Metrics of the step.
        spent: Seconds of this rank in each entry of the last step.
        generation: Continuous generation; only where the loop generates continuously and has begun.
        events: Events that guards have reported in the step.
        num_roll_backs: Number of roll-backs so far.
        gate: Gate that stages pass before they change weights.
        proof: Facts of a step for the proof of the run; None in a loop that is ahead of training.
    """

    def __init__(self, parts: Parts, progress: Progress, tracer: Tracer) -> None:
        """Prepare the entries; the tracer times each."""
        self._parts, self._progress, self._tracer = parts, progress, tracer
        self._rank = parts.transport.rank
        self._entries = parts.plan.chain(self._rank)
        self._flat = tuple(flat(self._entries))
        # Weights are taken between two iterations, where a run is also evaluated, saved and stopped.
        self._arrivals = [
            action
            for action in self._entries
            if isinstance(action, Pull) and parts.plan.channel(action.channel).kind == "weights"
        ]
        self.stages = _load_stages(parts.plan, parts.recipe, self._rank)
        progress.nodes = {name: {} for name in self.stages}
        self.buffer = Databuffer(parts.plan, parts.transport)
        self.channels = Channels(parts, progress, self.buffer, tracer)
        self.loaders = {
            action: Dataloader(
                parts.sets,
                parts.recipe,
                action.layout.shard_of(self._rank),
                action.layout.dp,
                action.portions,
                in_turns=action.in_turns,
            )
            for action in self._flat
            if isinstance(action, Load)
        }
        self.metrics = StepMetrics(parts.plan, parts.transport)
        self.events: list[GuardEvent] = []
        self.num_roll_backs = 0
        self.spent: Mapping[str, float] = {}
        self._contexts: dict[str, StageContext] = {}
        self._seconds = SecondsReport(parts.plan, self._rank, parts.clock)
        self.generation: Generation | None = None
        self.gate = UpdateGate()
        loop = parts.plan.loop_of(self._rank)
        self.proof = None if loop.lag else StepProof(parts.plan, loop, parts.roles.trained())

    @property
    def states(self) -> Mapping[State, float]:
        """Seconds of this rank in each state, in the last iteration."""
        return self._seconds.taken

    def walk(self, prompts: Batch | None = None) -> None:
        """Go through the chain once, but for the weights that it begins with, and prompts that were loaded before."""
        self.events.clear()
        if self.proof is not None:
            self.proof.begin()
        actions = [action for action in self._entries if action not in self._arrivals]
        if prompts is not None:
            (load,) = self.loaders
            self.buffer.load(load, prompts)
            actions.remove(load)
        if self.generation is None and self._parts.plan.channels:
            self.channels.make_room()
        self._walk(actions)
        self.buffer.clear()

    def load(self, action: Load) -> Batch:
        """The prompts of the next iteration that are not loaded, for ranks that begin them before they walk."""
        with self.entry(action, self._progress.step + 1):
            return self.loaders[action].next()

    @contextmanager
    def entry(self, action: Action, step: int) -> Iterator[dict[str, object]]:
        """An entry of the chain that is executed now, for an iteration: it is shown and timed, and errors name it.

        Yields:
            Further facts for the trace.
        """
        doing = self._parts.clock.doing(state_of(action, self._parts.plan, self._rank))
        with self._placed(action, step), doing, self._tracer.span(str(action), step) as facts:
            yield facts

    def take_weights(self) -> Note:
        """Take the weights that the next training iteration leaves, and what its loop has noted."""
        with ExitStack() as stack:
            for action in self._arrivals:
                stack.enter_context(self.entry(action, self._progress.step))
            return self.channels.take_weights()

    def report(self) -> None:
        """Add the times of the entries and the numbers of the dataloaders to the metrics."""
        self.spent = spent = self._tracer.take_seconds()
        for action in self._flat:
            if isinstance(action, Windowed):
                self.metrics.of(action.ranks).max("time/waiting", spent.get(WAITING, 0.0))
            elif not isinstance(action, Repeat):
                ranks = self._parts.plan.ranks_of(action)
                self.metrics.of(ranks).max(f"time/{action}", spent.get(str(action), 0.0))
            if isinstance(action, Load):
                metrics = self.metrics.of(action.layout.ranks)
                for name, value in self.loaders[action].numbers().items():
                    metrics.mean(name, value, 1)
            if (sync := sync_of(action, self._parts.plan)) is not None:
                metrics = self.metrics.of(self._parts.plan.ranks_of(action))
                report_traffic(sync, self._parts.roles.traffic(sync), metrics)
        metrics = self.metrics.of(self._parts.plan.loop_of(self._rank).ranks)
        if self.proof is not None:
            self.proof.add_to(metrics)
        self._seconds.add_to(metrics)

    def _walk(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Repeat):
                self._repeat(action)
            elif isinstance(action, Windowed):
                self._walk_windows(action)
            else:
                with self.entry(action, self._progress.step) as facts:
                    self._execute(action, facts)
                    self.buffer.release(action)

    def _execute(self, action: Action, facts: dict[str, object]) -> None:
        match action:
            case Load():
                self.buffer.load(action, self.loaders[action].next())
            case RunNode(name):
                given = self.buffer.get(name)
                self._make_room(name)
                with self._parts.turns.of(self._parts.plan[name]):
                    context = self._context(name)
                    made = self.stages[name](given, context)
                self.buffer.put(name, made)
                if self.proof is not None:
                    self.proof.add(name, given, made, self._rank)
                facts.update(context.facts)
                facts.update(sizes_of(made, given, are_lengths_shown=self._parts.plan[name].spec.samples))
            case Reshard():
                self.buffer.reshard(action, self._parts.clock.doing("wait_rows"))
            case SyncWeights():
                self._parts.roles.sync(action)
            case Push(name):
                self.channels.push(self._parts.plan.channel(name))
            case Pull(name):
                self.channels.pull_rows(self._parts.plan.channel(name))

    def _make_room(self, name: str) -> None:
        """Let engines release memory that the trainers of a node need."""
        node = self._parts.plan[name]
        if {"score", "train"} & {*node.spec.roles.values()}:
            for serving in self._parts.roles.servings():
                serving.release(frozenset(node.layout.ranks))

    def _walk_windows(self, windowed: Windowed) -> None:
        """Go through entries window by window, while earlier windows are on their way to other ranks."""
        self.buffer.open_windows(windowed)
        step, doing = self._progress.step, self._parts.clock.doing
        for action, window in windowed.turns():
            with self._placed(action, step, f"{action} {window + 1}/{windowed.num_windows}"):
                match action:
                    case RunNode(name):
                        with self._tracer.span(WAITING, step), doing("wait_rows"):
                            self.buffer.wait(name, window)
                        self._make_room(name)
                        state = state_of(action, self._parts.plan, self._rank)
                        with doing(state), self._tracer.span(str(action), step):
                            made = self.stages[name](self.buffer.get(name, window), self._context(name))
                            self.buffer.put(name, made, window)
                    case Reshard():
                        timed = self._tracer.span(str(action), step, lane=1)
                        self.buffer.reshard_window(action, window, timed)
            self.buffer.release(action, window)
        with self._tracer.span(WAITING, step), doing("wait_rows"), self._placed(None, step, str(windowed)):
            self.buffer.close_windows()

    def _repeat(self, repeat: Repeat) -> None:
        """Repeat entries until their ranks together have the groups that the step wants."""
        num_rounds = 0
        while (num_groups := self._count_groups(repeat)) < repeat.num_groups and num_rounds < repeat.max_rounds:
            self._walk(repeat.body)
            self.buffer.end_round(repeat)
            num_rounds += 1
        self._check_filled(repeat, num_groups)
        metrics = self.metrics.of(repeat.ranks)
        metrics.max("sampling/rounds", num_rounds)
        metrics.max("sampling/carried", max(0, num_groups - repeat.num_groups))
        metrics.max("sampling/missing", max(0, repeat.num_groups - num_groups))
        if self._rank in repeat.layout:
            self.buffer.leave(repeat)
            self.channels.note_surplus(self.buffer.surplus.carried)

    def _count_groups(self, repeat: Repeat) -> int:
        """Number of groups that the last node has chosen so far, surplus of an earlier step included."""
        is_first = self._rank in repeat.layout and repeat.layout.represents(self._rank)
        own = torch.tensor([self.buffer.surplus.num_groups if is_first else 0])
        with self._tracer.span("repeat", self._progress.step), self._parts.clock.doing("wait_ranks"):
            process_group = self._parts.transport.process_group(repeat.ranks)
            return int(process_group.sum(own, f"the groups of '{repeat.last}'"))

    def _check_filled(self, repeat: Repeat, num_groups: int) -> None:
        """Refuse a step without any group, or with too few if the recipe does not allow it."""
        config = self._parts.recipe.algorithm.repeat
        if num_groups >= repeat.num_groups or (num_groups and config.on_exhausted == "train"):
            return
        raise RuntimeError(
            f"node '{repeat.last}' has chosen {num_groups} of the {repeat.num_groups} groups that a step wants, after "
            f"algorithm.repeat.max_rounds={config.max_rounds} rounds: the prompts are all too easy or all too hard for "
            "the policy, or their rewards fail; take other data, more responses_per_prompt or more rounds"
            + (", or set algorithm.repeat.on_exhausted=train" if num_groups else "")
        )

    def _context(self, name: str) -> StageContext:
        if name not in self._contexts:
            self._contexts[name] = self._make_context(name)
        context, metrics = self._contexts[name], self.metrics.of_node(self._contexts[name].node)
        if context.node.node.tag:
            metrics = metrics.named(partial(tagged, node=context.node.node))
        return replace(
            context,
            step=self._progress.step,
            metrics=metrics,
            state=self._progress.nodes[name],
            # Each event is reported once, by one of the ranks that know it.
            events=self.events if self._rank == context.node.layout.ranks[0] else [],
            num_roll_backs=self.num_roll_backs,
            source=self.generation or self._parts.desk,
            facts={},
            recorded={} if self.proof is None else self.proof.recorded,
        )

    def _make_context(self, name: str) -> StageContext:
        """The part of a node's context that is the same in all steps."""
        parts, node = self._parts, self._parts.plan[name]
        models: dict[str, ModelRole | ValueEngine] = {}
        for parameter, role in node.node.roles:
            model, use, what = parts.roles.of(role, node.layout), node.spec.roles[parameter], f"'{role}' of {name}"
            limit = model.limited_to if isinstance(model, ModelRole) else partial(limited, model)
            models[parameter] = limit(use, what, self.gate)
        main = next((parameter for parameter, use in node.spec.roles.items() if use == node.spec.role_use), None)
        return StageContext(
            recipe=node.settings_of(parts.recipe),
            node=node,
            step=0,
            process_group=parts.transport.process_group(node.layout.ranks),
            metrics=Metrics(),
            run_directory=parts.directory,
            episodes=parts.episodes,
            tokenizer=parts.roles.tokenizer,
            tokenizers=parts.roles.tokenizers,
            model=models.get(main) if main else None,
            models=models,
            grade=partial(self._grade, parts.judging.grader(node)),
            agents=parts.plan.agents,
            clock=parts.clock,
            progress=lambda done: parts.progress(done) if isinstance(done, str) else parts.progress(name, done),
        )

    def _grade(self, grade: Grader, inputs: Sequence[RewardInput], sources: Sequence[str | None]) -> list[Graded]:
        ahead = None if self.generation is None else self.generation.grading
        with self._parts.clock.doing("grade"):
            return (grade if ahead is None else ahead.grade)(inputs, sources)

    @contextmanager
    def _placed(self, action: Action | None, step: int, label: str = "") -> Iterator[None]:
        """Show the entry, or the part of it, that is executed now; errors name its place in the run.

        The end of several entries has a label alone, and is not shown.
        """
        label = label or str(action)
        if action is not None:
            self._parts.begin(step, label, action)
        try:
            yield
        except Exception as error:
            error.add_note(f"at step {step}, in {label}, on rank {self._rank}")
            raise


def _load_stages(plan: Plan, recipe: Recipe, rank: int) -> Mapping[str, StageFunction]:
    """Import the stage functions of a rank's nodes, by node."""
    stages: dict[str, StageFunction] = {}
    product = "continuous" if plan.loop_of(rank).is_continuous else recipe.product
    for node in plan.nodes:
        if rank in node.layout:
            implementation = node.spec.implementations.get(product, node.spec.implementation)
            stage = cast("StageFunction", load_own(implementation))
            stages[node.name] = partial(_with_failures, stage) if "reward_valid" in node.writes else stage
    return stages


def _with_failures(stage: StageFunction, batch: Batch, context: StageContext) -> Batch:
    """Run a stage that writes which rewards are valid, and report the share of episodes whose reward is not."""
    made = stage(batch, context)
    num_failed, num_episodes = count_failures(made, context)
    context.metrics.mean(FAILED, num_failed, num_episodes)
    return made


def sizes_of(*batches: Batch, are_lengths_shown: bool) -> Mapping[str, int | list[int]]:
    """Rows, sampled tokens and the most of a row, of the first batch that has tokens; else rows alone.

    The batches are output and input of a node. The tokens of each row are added where lengths are shown.
    """
    for batch in batches:
        columns = batch.columns.values()
        found = next((x.lengths for x in columns if isinstance(x, Jagged) and x.axis == "response_tokens"), None)
        if "response_mask" in batch:
            found = response_lengths(batch.jagged("response_mask"))
        if found is not None:
            lengths: list[int] = found.tolist()
            sizes: dict[str, int | list[int]] = {"rows": len(lengths), "tokens": sum(lengths)}
            sizes["longest"] = max(lengths, default=0)
            return {**sizes, "lengths": lengths} if are_lengths_shown else sizes
    return {"rows": max(len(batch) for batch in batches)}
