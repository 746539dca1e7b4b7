"""The rollout in an environment: each rank plays its own episodes, whose conversations become samples.

Episodes begin here, or continue what other roles have begun, as it is found in their samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch

from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.config.failures import FailureKind
from leaderless.config.models import ModelConfig
from leaderless.data.batch import SIBLING_BITS, Batch, Column
from leaderless.data.prompts.encode import RowEncoder, Tokenizer
from leaderless.data.prompts.images import ImageReader
from leaderless.distributed.errors import memory_explained
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode, EpisodePosition, Said, Spoken
from leaderless.environments.player import play_all
from leaderless.environments.registry import agents_of, environment_class, world_maker
from leaderless.environments.tools.sources import ToolSources, tool_use
from leaderless.observability.clock import Clock
from leaderless.planner import PlannedNode
from leaderless.planner.checks.model_files import check_player
from leaderless.planner.workflow.columns import EXPERTS, SUPPORT
from leaderless.planner.workflow.reward_stages import ENVIRONMENT
from leaderless.rollout.engine import RolloutEngine, SamplingParams
from leaderless.stages.context import StageContext
from leaderless.stages.episode_samples import EpisodeIndex, Play, Played, Work
from leaderless.stages.rollout import TOO_MUCH, distributions_of, first_sibling, num_siblings, recorded_support

if TYPE_CHECKING:
    from leaderless.models.vision.image_readers import FamilyImageReader


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Play `batch.responses_per_prompt` episodes of each task, and one more greedily if the node wants that."""
    return _play(batch, context, play_of(context.node, context.recipe))


def play_on(batch: Batch, context: StageContext) -> Batch:
    """Continue the episodes of other roles, up to where an agent of yet another role is to act.

    The samples of all agents come out, with what the environment has answered since.
    """
    config, recipe = context.recipe.environment, context.recipe
    assert config is not None
    assert batch.prompts is not None
    play = Play(distributions_of(recipe), 0, num_siblings(context.node.node, recipe), recipe.seed)
    places = recipe.batch.responses_per_prompt + 1
    return _play(batch.prompts, context, play, earlier_episodes(batch, agents_of(config), places))


def play_of(node: PlannedNode, recipe: Recipe) -> Play:
    """The episodes that a node plays of each task; the recipe is as the node sees it."""
    distributions = distributions_of(recipe, has_greedy="is_greedy" in node.writes)
    return Play(distributions, first_sibling(node.node, recipe), num_siblings(node.node, recipe), recipe.seed)


def _play(batch: Batch, context: StageContext, play: Play, earlier: Sequence[EarlierTurns] | None = None) -> Batch:
    """Play an episode from each distribution for each task, or continue earlier ones."""
    recipe = context.recipe
    data = [recipe.data.train_set_of(row) for row in batch.objects("rows") if isinstance(row, Mapping)]
    with memory_explained(TOO_MUCH), context.role.generating() as engine:
        begin = time.perf_counter()
        played = play_tasks(
            engine,
            play,
            batch,
            data,
            recipe,
            context.tokenizer,
            context.progress,
            role=context.node.node.role or "",
            earlier=earlier,
            clock=context.clock,
        )
        seconds = time.perf_counter() - begin
    return samples_of(played, context, seconds)


def samples_of(played: Played, context: StageContext, seconds: float) -> Batch:
    """The samples of episodes that took some seconds; they are reported and written down, too."""
    config, own = context.recipe.environment, context.node.node.role or ""
    played.report(context.metrics, context.node.layout.dp, seconds)
    if context.episodes is not None:
        context.episodes.write("step", context.step, "played", played.journal)
    error = played.first_error()
    if error is not None:
        context.run_directory.note_reward_error(context.step, context.process_group.rank, ENVIRONMENT, error)
    for kind, text in played.first_failures().items():
        context.run_directory.note_failure(context.step, context.process_group.rank, kind, text)
    samples = played.samples()
    context.facts["waits"] = played.waits()
    roles = [own] if config is None else [config.agents.get(agent, own) for agent in agents_of(config)]
    numbers = torch.tensor([context.agents.index(role) if role in context.agents else 0 for role in roles])
    recorded: dict[str, Column] = {EXPERTS: played.experts()} if context.recipe.algorithm.replay_experts else {}
    if SUPPORT in context.node.writes:
        recorded |= played.support()
    return samples.with_columns(recorded, agent=numbers[samples.dense("actor")])


@dataclass(frozen=True)
class EarlierTurns:
    """An episode that others have begun.

    Attributes:
        seat: Place that it belongs to.
        history: Messages of the other agents, in the order of the turns.
        failure: Cause and error, if it has failed.
    """

    seat: EpisodeIndex
    history: Sequence[Spoken]
    failure: tuple[FailureKind, str] | None


def earlier_episodes(batch: Batch, agents: Sequence[str], num_places: int) -> list[EarlierTurns]:
    """The episodes that samples are from, in the order of their ids.

    Args:
        batch: Samples with the columns of a rollout in an environment; all samples of an episode are here.
        agents: Names of the environment's agents.
        num_places: Places that each node has for the episodes of a task.
    """
    assert batch.prompt_index is not None
    spoken: dict[int, list[Spoken]] = {}
    failures: dict[int, tuple[FailureKind, str] | None] = {}
    task_of: dict[int, int] = {}
    for row, play in enumerate(batch.dense("joint_ids").tolist()):
        failure = batch.objects("environment_failed")[row]
        failures[play] = None
        if isinstance(failure, Mapping):
            failures[play] = cast("FailureKind", failure["cause"]), str(failure["error"])
        task_of[play] = int(batch.prompt_index[row])
        spoken.setdefault(play, [])
    for play, one in _spoken(batch, agents):
        spoken[play].append(one)
    found: list[EarlierTurns] = []
    for play in sorted(spoken):
        begin = play & ((1 << SIBLING_BITS) - 1)
        history = sorted(spoken[play], key=lambda one: one.said.turn)
        found.append(EarlierTurns(EpisodeIndex(task_of[play], begin % num_places, begin), history, failures[play]))
    return found


def _spoken(batch: Batch, agents: Sequence[str]) -> Iterator[tuple[int, Spoken]]:
    """Messages of each sample, with the episode that they are from."""
    lists = {
        name: batch.jagged(name).to_lists()
        for name in ("tokens", "response_mask", "turns", "rollout_log_probs", "policy_versions", "temperatures")
    }
    support = recorded_support(batch) if SUPPORT in batch else []
    prompts, plays = batch.jagged("prompt_tokens").to_lists(), batch.dense("joint_ids").tolist()
    actors, truncated = batch.dense("actor").tolist(), batch.dense("truncated").tolist()
    for row, play in enumerate(plays):
        places = [place for place, is_sampled in enumerate(lists["response_mask"][row]) if is_sampled]
        turns = lists["turns"][row]
        for turn, group in groupby(range(len(places)), key=lambda number: turns[number]):
            numbers = list(group)
            tokens, begin, end = lists["tokens"][row], places[numbers[0]], places[numbers[-1]] + 1
            said = Said(
                log_probs=[lists["rollout_log_probs"][row][number] for number in numbers],
                policy_versions=[int(lists["policy_versions"][row][number]) for number in numbers],
                turn=int(turn),
                agent=agents[actors[row]],
                is_truncated=truncated[row] and numbers[-1] == len(places) - 1,
                temperature=lists["temperatures"][row][numbers[0]],
                support=[support[row][number] for number in numbers] if support else (),
            )
            yield play, Spoken([*prompts[row], *tokens[:begin]], tokens[begin:end], said)


def play_tasks(  # noqa: PLR0913
    engine: RolloutEngine,
    play: Play,
    tasks: Batch,
    data: Sequence[DatasetConfig],
    recipe: Recipe,
    tokenizer: Tokenizer,
    progress: Callable[[float], None],
    *,
    role: str | None = None,
    earlier: Sequence[EarlierTurns] | None = None,
    clock: Clock | None = None,
) -> Played:
    """Play the episodes of some tasks with an engine that is awake and has weights.

    Args:
        engine: Engine that samples.
        play: Episodes of each task.
        tasks: Tasks: rows of datasets, with their group ids.
        data: Dataset of each task.
        recipe: The recipe, as seen by the role that samples.
        tokenizer: Tokenizer of the policy.
        progress: Function that gets the finished fraction.
        role: Role that samples; episodes end when an agent of another role is to act. None if it plays all agents.
        earlier: Episodes to continue; None to begin new ones.
        clock: Clock of the thread, which learns when the engine works and when the environment does.
    """
    config, end_token = recipe.environment, tokenizer.eos_token_id
    assert config is not None
    assert end_token is not None
    tools = tools_of(recipe, tokenizer)
    reader = reader_of(recipe, tokenizer, role)
    known = {id(one): writer_of(tokenizer, one, tools, reader) for one in data}
    writers = [known[id(one)] for one in data]
    begun = _begun(play, len(tasks)) if earlier is None else earlier
    places = _places([one for one in begun if not one.failure], play, tasks, writers, recipe, role)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(done / max(1, len(places)))

    longest = recipe.data.max_prompt_tokens + config.max_episode_tokens
    episodes, pump = play_all(engine, config, world_maker(config), places, longest, report, tools, clock)
    played = iter(episodes)
    whole = [Episode(cause=one.failure[0], error=one.failure[1]) if one.failure else next(played) for one in begun]
    result = Played(play, tasks, whole, [one.seat for one in begun], pump, end_token, writers, tools)
    _ = result.drifts  # a tokenizer is used by one thread at a time, and the journal is written by another one
    return result


def played_before(
    play: Play,
    tasks: Batch,
    data: Sequence[DatasetConfig],
    recipe: Recipe,
    tokenizer: Tokenizer,
    episodes: Sequence[Episode],
    work: Work,
) -> Played:
    """Episodes that were played by another thread, with writers of this one; see `play_tasks`."""
    assert tokenizer.eos_token_id is not None
    tools = tools_of(recipe, tokenizer)
    reader = reader_of(recipe, tokenizer)
    writers = [writer_of(tokenizer, one, tools, reader) for one in data]
    seats = [one.seat for one in _begun(play, len(tasks))]
    for episode, seat in zip(episodes, seats, strict=True):
        if episode.place is not None:
            episode.place = replace(episode.place, writer=writers[seat.task])
    return Played(play, tasks, episodes, seats, work, tokenizer.eos_token_id, writers, tools)


def _begun(play: Play, num_tasks: int) -> list[EarlierTurns]:
    """All episodes, before anything has been said."""
    places = range(len(play.distributions))
    seats = (EpisodeIndex(task, place, play.first + place) for task in range(num_tasks) for place in places)
    return [EarlierTurns(seat, (), None) for seat in seats]


def places_of(
    play: Play,
    tasks: Batch,
    recipe: Recipe,
    tokenizer: Tokenizer,
    tools: ToolSources | None,
    role: str | None,
    data: DatasetConfig | None = None,
) -> list[EpisodePosition]:
    """All episodes of some tasks, task after task, before anything has been said.

    The tasks are rows of the recipe's datasets for training, or of another one.
    """
    rows = [row for row in tasks.objects("rows") if isinstance(row, Mapping)]
    sets = [recipe.data.train_set_of(row) if data is None else data for row in rows]
    reader = reader_of(recipe, tokenizer, role)
    writers = {id(one): writer_of(tokenizer, one, tools, reader) for one in sets}
    return _places(_begun(play, len(tasks)), play, tasks, [writers[id(one)] for one in sets], recipe, role)


def _places(
    begun: Sequence[EarlierTurns],
    play: Play,
    tasks: Batch,
    writers: Sequence[ChatWriter],
    recipe: Recipe,
    role: str | None,
) -> list[EpisodePosition]:
    rollout, roles = recipe.rollout, recipe.players
    rows, groups = tasks.objects("rows"), tasks.ids.tolist()
    agents = frozenset(agent for agent in roles if roles[agent] == role) if roles and role else None
    places: list[EpisodePosition] = []
    for one in begun:
        task, place, begin = one.seat
        row, group = rows[task], groups[task]
        assert isinstance(row, Mapping)
        params = SamplingParams(play.distributions[place], rollout.max_response_tokens, rollout.stop, play.seed)
        number = (group << SIBLING_BITS) + begin
        places.append(EpisodePosition(number, f"{play.seed}/{group}", row, writers[task], params, agents, one.history))
    return places


def tools_of(recipe: Recipe, tokenizer: Tokenizer) -> ToolSources | None:
    """The tools that the policy may call in the recipe's environment, the same ones until they are closed.

    Raises:
        RecipeError: They cannot be used.
    """
    if recipe.environment is None:
        return None
    sets = [*recipe.data.train_sets().values(), *([recipe.data.evaluation] if recipe.data.evaluation else [])]
    is_chat = any(writer_of(tokenizer, one).is_chat for one in sets)
    return tool_use(recipe.environment, environment_class(recipe.environment), tokenizer, is_chat=is_chat)


def check_policy(recipe: Recipe, tokenizer: Tokenizer, role: str) -> None:
    """Refuse a model that cannot take the turns of the recipe's environment, or see what it shows, before it is loaded.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the policy.
        role: Role that samples.

    Raises:
        RecipeError: It cannot, or lacks the settings of its images.
    """
    config = recipe.model_of(role)
    if config is None or (recipe.environment is None and recipe.online is None):
        return
    from leaderless.models.decoder import load_model_config  # `transformers` takes seconds

    check_player(recipe, role, load_model_config(config, role).model_type)
    reader_of(recipe, tokenizer, role)


def reader_of(recipe: Recipe, tokenizer: Tokenizer, role: str | None = None) -> ImageReader | None:
    """Facts about the images that the recipe's environment may show; None if it shows none.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the policy.
        role: Role that samples; None for any, as all have the same tokenizer.

    Raises:
        RecipeError: The model reads text alone, or lacks the settings of its images.
    """
    if not recipe.has_later_images:
        return None
    known = (role, recipe.evaluation.role, *recipe.players.values(), "policy", *recipe.models)
    role = next(one for one in known if one is not None and recipe.model_of(one) is not None)
    config = recipe.model_of(role)
    assert config is not None
    return _opened(config.path, config.revision, role).named(tokenizer)


@lru_cache(maxsize=8)
def _opened(path: str, revision: str | None, role: str) -> FamilyImageReader:
    from leaderless.models.vision.image_readers import open_reader

    return open_reader(ModelConfig(path=path, revision=revision), role)


def writer_of(
    tokenizer: Tokenizer, data: DatasetConfig, tools: ToolSources | None = None, reader: ImageReader | None = None
) -> ChatWriter:
    """Writer of the messages of episodes whose tasks are rows of a dataset."""
    is_chat = RowEncoder(tokenizer, data, "data.train", is_task=True).is_chat
    return ChatWriter(tokenizer, is_chat, data.system, () if tools is None else tools.schemas, reader)
