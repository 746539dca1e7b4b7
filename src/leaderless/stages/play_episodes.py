"""Rollouts in an environment: each rank plays its own episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import SIBLING_BITS, Batch
from leaderless.data.prompts.encode import RowEncoder, Tokenizer
from leaderless.data.prompts.images import ImageReader
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.player import play_all
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.sources import ToolSources, tool_use
from leaderless.observability.clock import Clock
from leaderless.planner.checks.model_files import check_player
from leaderless.rollout.engine import RolloutEngine, SamplingParams
from leaderless.stages.earlier_turns import EarlierTurns, EpisodeIndex
from leaderless.stages.episode_samples import Play, Played, Work

if TYPE_CHECKING:
    from leaderless.models.vision.image_readers import FamilyImageReader


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
