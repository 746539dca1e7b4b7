"""Saves a run, and continues it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.markup import escape

from leaderless.config import RecipeError, dump_recipe
from leaderless.data.buffer.row_agreement import Surplus
from leaderless.observability.clock import Tracer
from leaderless.observability.run_directory import read_lines, step_of
from leaderless.planner import Loop
from leaderless.worker.agreement import StepEnd
from leaderless.worker.asynchronous.async_state import STATE_FILE, GroupDivision, RemainingPrompts, read_async_state
from leaderless.worker.asynchronous.journal import cut_journals, journal_file
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.channel_rows import load_rows, save_rows
from leaderless.worker.checkpoint.preemption import PreemptionSaver
from leaderless.worker.checkpoint.reader import (
    LOOP_FILE,
    LoopState,
    RunState,
    load_checkpoint,
    newest_good,
    read_loop_state,
    read_node_state,
)
from leaderless.worker.checkpoint.writer import CheckpointError, CheckpointWriter, Content
from leaderless.worker.replan.active_plan import LAYOUT_FILE, replacement_of
from leaderless.worker.supervision.guards import RollBack

SURPLUS = "surplus"
"""Name of the surplus of repeated nodes among the rows of a checkpoint."""


class Checkpointer:
    """Writes a run's checkpoints, and reads the newest one.

    Attributes:
        preemption: Writer of the state before a step that may not be finished.
    """

    def __init__(self, parts: Parts, progress: Progress, chain: Chain, tracer: Tracer) -> None:
        """Save the surplus of the chain too; nothing is read or written yet."""
        self._parts, self._progress, self._chain, self._tracer = parts, progress, chain, tracer
        recipe, directory = parts.recipe, parts.directory
        self._lag = max(loop.fixed_lag for loop in parts.plan.loops)
        first_rank, descriptions = parts.plan.leading.ranks[0], dict[str, str]()
        if parts.transport.rank == first_rank:  # which writes them
            descriptions["recipe.yaml"] = dump_recipe(recipe)
            descriptions["plan.json"] = json.dumps(parts.plan.to_json(), indent=1)
        self._writer = CheckpointWriter(
            directory.checkpoints,
            parts.roles.trained(),
            parts.transport.world,
            parts.roles.tokenizer,
            recipe.checkpoint,
            # A loop that is ahead reaches the place of the checkpoint `lag` iterations later.
            recipe.run.timeout_s * (1 + max(loop.lag for loop in parts.plan.loops)),
            descriptions,
            first_rank,
        )
        self.preemption = PreemptionSaver(self._writer, parts.roles.trained(), chain.gate, parts.display.say)

    def is_due(self) -> bool:
        """Whether a checkpoint is due on this rank.

        One always is before the first step whose next iterations are not made any more, since the run ends: from there
        it can continue to more steps.
        """
        step, last_whole = self._progress.step, self._parts.recipe.steps - self._lag
        return self._writer.is_due(step) or (self._lag > 0 and step == last_whole)

    def newest(self) -> Path | None:
        """Find the newest undamaged checkpoint, after one that is being written. All ranks call it together."""
        self._writer.wait()
        parts = self._parts
        return newest_good(parts.directory.checkpoints, parts.transport.world, parts.display.say, self._why_not)

    def _why_not(self, checkpoint: Path) -> str:
        """Why a run with this number of steps cannot continue from a checkpoint; an empty text if it can."""
        steps = self._parts.recipe.steps
        for loop in self._parts.plan.loops:
            if not loop.fixed_lag:
                continue
            try:
                ahead = read_loop_state(checkpoint, loop.name)
            except RecipeError:
                continue  # every rank raises it when the checkpoint is read
            wanted = min(steps, step_of(checkpoint) + ahead.lag)
            if ahead.iteration < wanted:
                return (
                    f"it is of the end of a run, with rows of iterations up to {ahead.iteration}; with {steps} steps "
                    f"it would have those up to {wanted}, and the weights that sample them are gone"
                )
        return ""

    def resume(self, checkpoint: Path, rolled_back: Callable[[int], RollBack | None]) -> None:
        """Continue from an undamaged checkpoint, which was made under this plan. All ranks call it together.

        The data do not return where `rolled_back` finds a roll-back to the checkpoint of the step.
        """
        parts, progress, rank = self._parts, self._progress, self._parts.transport.rank
        self.preemption.reached(None)
        state = load_checkpoint(checkpoint, parts.roles.trained())
        for name in progress.nodes:
            progress.nodes[name] = read_node_state(checkpoint, name)
        parts.roles.sync_all()
        roll_back = rolled_back(state.step)
        progress.step = progress.trained = state.step
        progress.data_position = roll_back.data_position if roll_back else state.data_position
        progress.seconds_before = state.time_s
        loop = parts.plan.loop_of(rank)
        if loop.is_continuous:
            progress.step, progress.remaining = self._read_async_state(checkpoint, loop)
        elif loop.lag:
            ahead = read_loop_state(checkpoint, loop.name)
            progress.step, progress.data_position = ahead.iteration, ahead.data_position
        self._chain.channels.open_journals()  # before rows are in flight again, which is written down, too
        self._chain.channels.resume(checkpoint)
        for loader in self._chain.loaders.values():
            loader.position = progress.data_position
        repeat = parts.plan.repeat
        if repeat is not None and rank in repeat.layout:
            # The steps that went wrong have used the surplus in the checkpoint, so it is left out as well.
            shard = repeat.layout.shard_of(rank), repeat.layout.dp
            self._chain.buffer.surplus = Surplus(None if roll_back else load_rows(checkpoint, SURPLUS, *shard))
        parts.display.say(f"continuing from step {state.step} ([bold]{escape(str(checkpoint))}[/])")

    def _read_async_state(self, checkpoint: Path, loop: Loop) -> tuple[int, RemainingPrompts]:
        """Iterations that all ranks of a loop have handed over, and the groups that this one is to begin again."""
        parts, ranks = self._parts, self._parts.transport.process_group(loop.ranks)
        journal = journal_file(parts.directory.journal, loop.name, loop.ranks.index(ranks.rank))
        lines = list(read_lines(journal, "iteration")) if journal.exists() else []
        start = max((int(str(line["start"])) for line in lines), default=-1) + 1
        portions = next(iter(self._chain.loaders.values())).portions
        division = GroupDivision(portions, parts.recipe.batch.prompts_per_step, parts.recipe.steps)
        logged = parts.recipe.steps
        if ranks.rank == loop.ranks[0]:
            # A thread writes the log, and a kill may have come before. What has been trained is not made again.
            log = parts.directory.metrics_of(loop.name)
            steps = [int(str(line["step"])) for line in read_lines(log, "step")] if log.exists() else []
            logged = max([self._progress.trained, *steps])
        made, remaining = read_async_state(checkpoint, loop.name, ranks, division, start=start, logged=logged)
        cut_journals(parts.directory, loop.name, loop.ranks.index(ranks.rank), ranks.size, made)
        return made, remaining

    def save(self, numbers: dict[str, float], end: StepEnd) -> None:
        """Write a checkpoint where one is due, and always at the end. All ranks call it together.

        The metrics of the step from the first rank of each loop are listed in it; `end` is the same on all ranks of a
        loop.
        """
        is_last = self._progress.trained == self._parts.recipe.steps
        must_succeed = end.is_stopping or is_last
        is_wanted = must_succeed or end.is_checkpoint_due
        if is_wanted:
            with self._parts.clock.doing("checkpoint"):
                self._writer.wait()  # or nobody would see that the one before has failed
        self._report(self._writer.take_error())
        self.preemption.reached(None if is_wanted else self._content(numbers, end))
        if not is_wanted:
            return
        self._parts.begin(self._progress.step, "checkpoint")
        self._parts.episodes.flush()  # the run may continue from here, and what is in the journal is not made again
        with self._tracer.span("checkpoint", self._progress.step), self._parts.clock.doing("checkpoint"):
            is_awaited = must_succeed or not self._parts.recipe.checkpoint.asynchronous
            self._writer.begin(self._content(numbers, end), from_copy=not is_awaited)
            if is_awaited:
                try:
                    self._chain.channels.meet()
                    self._writer.finish()
                except (CheckpointError, OSError) as error:
                    if must_succeed:
                        raise
                    self._report(error)
        self._tracer.take("checkpoint")
        if end.is_stopping and not is_last:
            self._parts.display.stop()
            path = escape(str(self._parts.directory.checkpoints / f"step-{self._progress.trained:06d}"))
            self._parts.display.say(
                f"stopped after step {self._progress.trained}; the same command continues from [bold]{path}"
            )

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and report its error if there is one."""
        self.preemption.reached(None)
        self._writer.wait()
        self._report(self._writer.take_error())

    def close(self) -> None:
        """End what is being written."""
        self._writer.close()

    def _content(self, numbers: dict[str, float], end: StepEnd) -> Content:
        """Everything but tensors that a checkpoint written now holds."""
        plan, progress, rank = self._parts.plan, self._progress, self._parts.transport.rank
        repeat, surplus = plan.repeat, self._chain.buffer.surplus.batch
        rows: list[Callable[[Path], None]] = []
        if repeat is not None and surplus is not None and repeat.layout.represents(rank):
            shard = repeat.layout.shard_of(rank)
            rows.append(partial(save_rows, surplus, name=SURPLUS, shard=shard, num_shards=repeat.layout.dp))
        loop = plan.loop_of(rank)
        texts: dict[str, str] = {}
        if rank == plan.leading.ranks[0] and (replaced := replacement_of(plan, self._parts.recipe)):
            texts[LAYOUT_FILE] = replaced
        if self._chain.generation is not None:
            generated = self._chain.generation.snapshot()
            texts[STATE_FILE.format(loop.name, generated.shard)] = generated.to_json()
        elif loop.lag and rank == loop.ranks[0]:
            ahead = LoopState(progress.step, progress.data_position, loop.lag)
            texts[LOOP_FILE.format(loop.name)] = json.dumps(asdict(ahead))
        return Content(
            RunState(progress.trained, progress.data_position, progress.seconds),
            metrics=numbers,
            texts=texts,
            nodes={name: dict(state) for name, state in progress.nodes.items() if rank == plan[name].layout.ranks[0]},
            rows=[*rows, *self._chain.channels.contents()],
            keeps_old=end.is_doubtful,
        )

    def _report(self, error: BaseException | None) -> None:
        if error is not None:
            notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            self._parts.display.say(
                f"[bold red]a checkpoint could not be written[/]: {escape(str(error) + notes)}. "
                "Training continues; earlier checkpoints are as they were, and the next one is tried when it is due"
            )
