"""A worker process: builds its part of a run, trains or evaluates, and cleans up."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from rich.markup import escape

from leaderless.base.devices import host_memory_trimmed
from leaderless.base.named_functions import load_own
from leaderless.base.versions import REMEDY, unfit_versions
from leaderless.config import Recipe, RecipeError
from leaderless.config.environment import ONLINE
from leaderless.config.models import ModelConfig
from leaderless.data.dataloader import open_training_set
from leaderless.data.dataset import Dataset, TrainingSet, open_dataset
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import ImageReader
from leaderless.data.prompts.preferences import make_encoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.files import find_files
from leaderless.data.sources.open_source import open_source
from leaderless.distributed.activity import Activity
from leaderless.distributed.transport import Transport
from leaderless.models.chat_templates.check import check_template
from leaderless.models.loading.tokenizer import byte_tokenizer, end_tokens, load_tokenizer
from leaderless.models.vision.image_readers import open_reader
from leaderless.observability.console import Display
from leaderless.observability.episode_files import EpisodeJournal
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.planner import Plan, RoleInstance, answering
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.rewards.dry_run import inputs_of_row
from leaderless.rewards.judges.judge import AnswerFile
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import Failures
from leaderless.stages.context import Clients
from leaderless.stages.episode_rollout import writer_of
from leaderless.worker.build.accelerator import check_accelerator, choose_attention
from leaderless.worker.build.instances import check_engines, check_readers
from leaderless.worker.build.join import add_process_groups, check_shared, join_workers
from leaderless.worker.build.judging import Judging
from leaderless.worker.build.memory_bounds import MemoryBounds, check_memory
from leaderless.worker.build.offload_places import check_offload, remove_folder
from leaderless.worker.build.parts import Parts
from leaderless.worker.build.roles import Roles
from leaderless.worker.checkpoint.reader import find_damage, load_checkpoint
from leaderless.worker.device_sharing import DeviceSharing, open_turns
from leaderless.worker.evaluate.evaluator import EvaluationStep, make_evaluator
from leaderless.worker.evaluate.preferences import all_datasets, make_scorer
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.replan.active_plan import plan_in_force, write_description
from leaderless.worker.worker import Worker


def train(recipe: Recipe, plan: Plan, place: RankInfo, display: Display) -> int | None:
    """Be one worker of a training run; returns the signal that stopped it before the last step, if one did."""
    with open_worker(recipe, plan, place, display) as worker:
        return worker.run(is_guest=place.is_guest)


class Entrance(Protocol):
    """An address that is reserved, or the knowledge of other ranks' addresses."""

    def open(self, recipe: Recipe, tokenizer: Tokenizer) -> Clients | None:
        """Let clients in; None on ranks that they do not ask."""

    def say(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        """Say where clients ask, and write it into the folder of the run."""


MakeEntrance = Callable[[Recipe, Plan, int], Entrance]
"""Function that reserves the address of a rank at which clients ask; it raises a RecipeError if it cannot be had."""


@contextmanager
def open_worker(recipe: Recipe, plan: Plan, place: RankInfo, display: Display) -> Iterator[Worker]:
    """Join the others and build this worker's part of a run; yields the worker, ready for its first step."""
    # An address at which clients ask is reserved before ranks wait for each other.
    directory, clients = RunDirectory.of(recipe), PRODUCTS[recipe.product].clients
    entrance = cast("MakeEntrance", load_own(clients))(recipe, plan, place.rank) if clients else None
    with ExitStack() as stack:
        rewards, transport, turns = _join(recipe, plan, place, display, stack)
        check_shared(directory.path, transport.world)
        newest = next(reversed(list_checkpoints(directory.checkpoints)), None)
        plan = plan_in_force(newest, recipe, plan, transport.world)
        add_process_groups(plan, transport)
        if place.rank == 0:
            write_description(directory, recipe, plan, display.say)
        check_offload(recipe, plan, place, turns.device)
        stack.callback(remove_folder, recipe)
        memory = check_memory(recipe, plan, place, turns.device, transport.world, display.say)
        memory = memory.as_begun(directory, transport.world)
        builder = _Builder(recipe, plan, transport, turns, display, directory.logs)
        # Before the models are loaded that are trained: what is wrong with rows is found first.
        sets, held_out = builder.scored_sets(directory.data) or builder.open_sets(directory.data)
        builder.load_roles(memory)
        stack.callback(builder.roles.close)
        if plan.batch.adapts_to_memory:
            builder.roles.adapt_to_memory(directory)
        builder.roles.sync_all()
        desk = None if entrance is None else entrance.open(recipe, builder.tokenizer)
        if desk is not None:
            stack.callback(desk.close)
        stack.callback(display.stop)
        episodes = EpisodeJournal(directory, place.rank, recipe.run.kept_episodes)
        stack.callback(episodes.close)
        parts = Parts(
            recipe, plan, transport, builder.roles, rewards, sets, held_out, directory, episodes, display, turns, desk
        )
        worker = Worker(parts)
        stack.callback(worker.close)
        if entrance is not None:
            entrance.say(directory, partial(_print_own, display))
        try_rewards_once(parts)
        yield worker


def try_rewards_once(parts: Parts) -> None:
    """Grade one response to a row of each dataset before the first step, and say which rewards fail.

    It is the expected answer, or an empty one if the row has none. Episodes are not made up.
    """
    recipe, rank = parts.recipe, parts.transport.rank
    grades = any(node.spec.grades and rank in node.layout for node in parts.plan.nodes)
    if recipe.product != "text" or not grades:
        return
    for key, one in zip(recipe.data.train_sets(), parts.sets, strict=True):
        (prompt,) = one.feed(recipe.seed, 0, shuffle=False).take([0])
        row = recipe.data.named(key, prompt.row)
        kind, sample = next(iter(inputs_of_row(recipe, row, 0).items()))
        for name, error in parts.rewards.try_on(sample, recipe.data.source_of(row)).items():
            text = f"reward {name} cannot grade the {kind} response to a row of {key}: {error}"
            _print_own(parts.display, f"{text}; `leaderless reward RECIPE` tries it on more rows")


def evaluate(
    recipe: Recipe, plan: Plan, place: RankInfo, display: Display, checkpoint: Path | None
) -> dict[str, float]:
    """Be one worker of an evaluation, with the weights of a checkpoint or those that the recipe names.

    Returns:
        The scores, on every rank.
    """
    with ExitStack() as stack:
        rewards, transport, turns = _join(recipe, plan, place, display, stack)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leaderless-eval-")))
        builder = _Builder(recipe, plan, transport, turns, display, logs, checkpoint)
        builder.load_roles()
        stack.callback(builder.roles.close)
        if checkpoint is not None:
            damage = find_damage(checkpoint, transport.world)
            if damage:
                raise RecipeError.at("", f"checkpoint {checkpoint} is damaged: {damage}; take another one")
            role, ranks = builder.instance.role, builder.instance.layout.ranks
            load_checkpoint(checkpoint, {role: builder.roles.engines[role, ranks]})
        judging = Judging(recipe, plan, transport, builder.roles, rewards)
        evaluator = make_evaluator(recipe, plan, builder.held_out(), judging)
        assert evaluator is not None, "every rank answers"
        display.start(1, 0)
        try:
            return evaluator.run(EvaluationStep(partial(transport.activity.show, "evaluating")))
        finally:
            display.stop()


def _join(
    recipe: Recipe, plan: Plan, place: RankInfo, display: Display, stack: ExitStack
) -> tuple[RewardPool, Transport, DeviceSharing]:
    """Start the processes that compute rewards for this worker, then meet the other workers."""
    activity, run = Activity(), RunDirectory.of(recipe)
    display.status = partial(str, activity)
    run.say = say = partial(_print_own, display)
    if place.local_rank == 0 and (wrong := "; ".join(unfit_versions())):
        run.say(f"this run may fail: {wrong}: {REMEDY}")
    check_engines(recipe, plan, place, say)
    answers = AnswerFile(run.answers / f"rank-{place.rank}.jsonl", run.may_fail)
    failures = Failures(recipe.guards.hopeless_failures, say)
    pool = RewardPool(recipe.reward, recipe.run.reward_processes, activity.advance, answers, failures)
    rewards = stack.enter_context(pool)
    joining = join_workers(place, plan, recipe.run.timeout_s, activity, recipe.run.transport)
    transport, device = stack.enter_context(joining)
    stack.enter_context(host_memory_trimmed(device))
    check_accelerator(recipe, plan, place, device, say)
    choose_attention(plan, device, transport.world, say)
    return rewards, transport, stack.enter_context(open_turns(plan, run.path, device, transport.world))


class _Builder:
    """Makes the parts of a worker from the recipe."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        transport: Transport,
        turns: DeviceSharing,
        display: Display,
        logs: Path,
        checkpoint: Path | None = None,
    ) -> None:
        self.recipe, self.plan, self.transport, self.display = recipe, plan, transport, display
        self.instance: RoleInstance = answering(plan.instances, recipe.evaluation.role)
        first = answering(plan.instances).role  # the tokenizer does not depend on what is evaluated
        config = recipe.model_of(first)
        assert config is not None
        on_hub = checkpoint is None and bool(config.path) and not Path(config.path).exists()
        self._say_source("loading", str(checkpoint or config.name), on_hub=on_hub)
        self.tokenizer: Tokenizer = load_tokenizer(config, first) if recipe.body is None else byte_tokenizer()
        if display.is_shown and (warning := warning_of_drift(recipe, config, self.tokenizer)):
            display.say(f"[yellow]{escape(warning)}[/]")
        self._turns, self._logs = turns, logs

    def load_roles(self, memory: MemoryBounds | None = None) -> None:
        """Load the models of this rank, as `roles`."""
        check_readers(self.recipe, self.plan)
        parts = self.recipe, self.plan, self.transport, self._turns, self.tokenizer, self._logs
        self.roles = Roles(*parts, partial(_print_own, self.display), memory)

    def open_sets(self, folder: Path) -> tuple[list[TrainingSet], Dataset | None]:
        """The datasets to train on, and the held-out rows if the run evaluates. All ranks call it together.

        `folder` keeps what is found out about them.
        """
        cache = DataCache(self.transport.world, folder)
        # They are read in a thread, and a tokenizer may not be used by two at once.
        tokenizer, reader = copy.deepcopy(self.tokenizer), self._reader()
        sets: list[TrainingSet] = []
        for key, config in self.recipe.data.train_sets().items():
            if config.path != ONLINE:
                self._say_source("opening", config.path, on_hub=find_files(config, key) is None)
            with self.display.reading(config.path) as progress:
                sets.append(open_training_set(config, key, tokenizer, self.recipe, cache, progress, reader))
            self._say(key, sets[-1], config.path)
        return sets, self.held_out() if self.recipe.evaluation.every_steps else None

    def scored_sets(self, folder: Path) -> tuple[list[TrainingSet], Dataset | None] | None:
        """The same with the scores of the reference; None if the plan needs none."""
        scorer = make_scorer(self.recipe, self.plan, self.transport, self._turns.device, folder, self.display.say)
        if scorer is None:
            return None
        sets, held_out = self.open_sets(folder)
        scored: list[TrainingSet] = []
        for one in all_datasets(sets):
            with self.display.reading(one.encoder.config.path) as progress:
                scored.append(scorer.scored(one, progress))
        if held_out is not None and held_out.encoder.config.preferences:
            with self.display.reading(held_out.encoder.config.path) as progress:
                held_out = scorer.scored(held_out, progress)
        scorer.close()
        return scored, held_out

    def held_out(self) -> Dataset:
        """The held-out prompts. All ranks call it together."""
        config, key = self.recipe.data.evaluation, "data.evaluation"
        assert config is not None, "checked when the recipe was read"
        self._say_source("opening", config.path, on_hub=find_files(config, key) is None)
        cache = DataCache(self.transport.world, RunDirectory.of(self.recipe).data)
        source, is_task = open_source(config, key, cache), self.recipe.has_tasks
        encoder = make_encoder(self.tokenizer, config, key, is_task=is_task, reader=self._reader())
        with self.display.reading(config.path) as progress:
            dataset = open_dataset(source, encoder, self.recipe, cache, progress, self.recipe.evaluation.max_prompts)
        self._say(key, dataset, config.path)
        return dataset

    def _reader(self) -> Callable[[], ImageReader]:
        """Opens what the model says of images; it keeps pixels, and each dataset has its own."""
        role = answering(self.plan.instances).role
        config = self.recipe.model_of(role)
        assert config is not None
        return partial(open_reader, config, role, self.tokenizer)

    def _say_source(self, verb: str, path: str, *, on_hub: bool) -> None:
        self.transport.activity.show(verb, path)
        self.display.say(f"{verb} [bold]{escape(path)}[/]{' from the hub' if on_hub else ''}")

    def _say(self, key: str, dataset: TrainingSet, path: str) -> None:
        self.display.say(f"{key}: {dataset.summary(f'[bold]{escape(path)}[/]')}")


def warning_of_drift(recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer) -> str:
    """Warning before a run whose episodes are written by a chat template that is not append-only; else nothing."""
    data = recipe.data.train_sets().values()
    if recipe.environment is None or not any(writer_of(tokenizer, one).is_chat for one in data):
        return ""
    report = check_template(tokenizer, end_tokens(config, tokenizer))
    if report.is_append_only:
        return ""
    return f"the chat template is {report.verdict()}. `leaderless template {config.path}` shows the tokens."


def _print_own(display: Display, text: str) -> None:
    """Print a line about this rank alone, on the first rank's screen or in another rank's log."""
    if display.is_shown:
        display.say(escape(text))
    else:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
