"""Episodes in flight on a rank that generates continuously: played now, or as the journal of a run has them.

    LiveEpisodes       an event loop in a thread plays them, so that no
                       environment waits while the rank does something else
          |  ask, drop, forget, end
    EpisodesInFlight -> EngineRequests -> the engine, which the rank's own thread steps
          |  ask, drop, forget, end
    JournaledEpisodes  what they wanted in a run that is followed, before the same steps

Either source says what episodes want of the engine, and the rest is the same. So a run that is followed takes the very
steps of the one before it, and neither environments nor tools are asked again.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.engine_scheduler import BEAT_S, EngineScheduler
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.player import EpisodePlayer
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.sources import own_tool_use
from leaderless.environments.user_functions import GRACE_S, end_tasks
from leaderless.observability.clock import Clock
from leaderless.rollout.engine import Completion, Request, SamplingParams
from leaderless.stages.context import StageContext
from leaderless.stages.episode_rollout import places_of, played_before, samples_of, writer_of
from leaderless.stages.episode_samples import Play, Played, sampled_in
from leaderless.worker.asynchronous.in_flight import (
    Advance,
    EngineRequests,
    EngineWork,
    EventKind,
    PendingRequest,
    Tally,
)

if TYPE_CHECKING:
    from leaderless.worker.asynchronous.journal import JournaledEpisodes


@dataclass(eq=False)
class EpisodeGroup:
    """The episodes of a task, in the order of their places.

    Attributes:
        number: Id of the task's group.
        places: Episodes to play.
        num_left: Number of those that have not ended.
        num_tokens: Tokens sampled in those that have.
        episodes: Those that have been played here, by their numbers.
    """

    number: int
    places: Sequence[EpisodePosition]
    num_left: int
    num_tokens: int = 0
    episodes: dict[int, Episode] = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that has ended: its group, the responses sampled in it, their tokens, and an error of the program."""

    group: EpisodeGroup
    responses: int
    tokens: int
    error: Exception | None = None


class Happening(NamedTuple):
    """Something that an episode wants of the engine, or its end.

    Attributes:
        kind: Kind of the event in the journal.
        about: Number of the response, conversation or episode.
        what: Request, to make it or to drop it; the end of an episode; None for a conversation.
    """

    kind: EventKind
    about: int
    what: PendingRequest | EpisodeEnd | None = None


class EpisodesInFlight:
    """Episodes of tasks of several iterations; see `ResponsesInFlight`.

    Attributes:
        tally: Numbers of responses and tokens since it was last set.
    """

    def __init__(
        self,
        requests: EngineRequests,
        source: LiveEpisodes | JournaledEpisodes,
        recipe: Recipe,
        play: Play,
        role: str | None,
        data: DatasetConfig | None = None,
    ) -> None:
        """Start with nothing in flight.

        Args:
            requests: Requests to the engine, which is awake and has weights.
            source: Source of the episodes.
            recipe: The recipe, as seen by the role that samples.
            play: Episodes of each task.
            role: Role that samples; None if it plays all agents.
            data: Dataset of all tasks; None for the training dataset.
        """
        self._requests, self._source, self._recipe, self._play = requests, source, recipe, play
        self._role, self._data = role, data
        self._groups: dict[int, EpisodeGroup] = {}
        self._begun: list[int] = []
        self.tally = Tally()

    @property
    def is_busy(self) -> bool:
        """Whether an episode is in flight."""
        return any(group.num_left for group in self._groups.values())

    def begin(self, prompts: Batch) -> None:
        """Begin the episodes of some tasks."""
        tokenizer, tools = self._source.tokenizer, self._source.tools
        places = places_of(self._play, prompts, self._recipe, tokenizer, tools, self._role, self._data)
        siblings = len(self._play.distributions)
        for row, number in enumerate(prompts.ids.tolist()):
            group = EpisodeGroup(number, places[row * siblings : (row + 1) * siblings], siblings)
            self._groups[number] = group
            self._source.begin(group)
            self._begun.append(number)

    def step(self) -> list[Advance]:
        """Do what episodes ask for, and let the engine take a step, or wait for them if it has nothing to do."""
        # A group counts from its beginning: its first token may be sampled a little later.
        advances = [Advance(group, has_begun=True, is_finished=False) for group in self._begun]
        has_done = bool(self._begun)
        self._begun.clear()
        # Each is done before the next one is asked for: a journaled request is made from what its conversation was
        # then.
        for happening in self._source.happened():
            advances += self._do(happening)
            has_done = True
        if self._requests.events.due() is not None:
            return advances  # a journal has weights or a canceled group before the next step
        if self._requests.is_busy:
            self._requests.step()
        # Something has happened, which may have finished a group: the caller looks before this waits.
        elif not has_done:
            self._source.wait()
        return advances

    def _do(self, happening: Happening) -> Sequence[Advance]:
        kind, about, what = happening
        if isinstance(what, EpisodeEnd):
            return self._end(about, what)
        if what is None:
            self._requests.forget(about)
        elif kind == "ask":
            self._requests.ask(what)
        else:
            self.tally.voided += self._requests.drop(what)
        return ()

    def _end(self, number: int, ended: EpisodeEnd) -> Sequence[Advance]:
        group = ended.group
        if self._groups.get(group.number) is not group:
            return ()  # canceled, and perhaps begun again
        facts = {"group": group.number, "responses": ended.responses, "tokens": ended.tokens}
        self._requests.events.note("end", number, facts)
        if ended.error is not None:
            raise ended.error
        group.num_left -= 1
        group.num_tokens += ended.tokens
        self.tally.responses += ended.responses
        self.tally.tokens += ended.tokens
        return [Advance(group.number, has_begun=False, is_finished=True)] if not group.num_left else ()

    def collect(self) -> list[Advance]:
        """Take what an evaluation's steps have brought; groups count from their beginning."""
        self._requests.collect()
        return []

    def cancel(self, number: int) -> None:
        """Cancel what is left of a group, and forget all of it."""
        group = self._groups.pop(number)
        self._source.cancel(group)
        self.tally.voided += group.num_tokens

    def samples(self, prompts: Batch, context: StageContext, seconds: float) -> Batch:
        """Hand over the groups of some prompts, which are finished, as samples that took some seconds."""
        rows = [row for row in prompts.objects("rows") if isinstance(row, Mapping)]
        sets = [self._recipe.data.train_set_of(row) for row in rows]
        return samples_of(self.played(prompts, sets, context.tokenizer), context, seconds)

    def played(self, tasks: Batch, data: Sequence[DatasetConfig], tokenizer: Tokenizer) -> Played:
        """Hand over the episodes of tasks, which are finished, with the work of the engine since this was last called.

        `data` are the datasets of the tasks; the tokenizer is for the thread that calls this.
        """
        episodes = self._source.take([self._groups.pop(group) for group in tasks.ids.tolist()])
        work, self._requests.work = self._requests.work, EngineWork()
        return played_before(self._play, tasks, data, self._recipe, tokenizer, episodes, work)

    def reset(self) -> None:
        """Forget all groups."""
        self._source.reset()
        self._groups.clear()
        self._begun.clear()
        self._requests.reset()

    def close(self) -> None:
        """End what plays episodes; those in flight are lost."""
        self._source.close()


class LiveEpisodes:
    """Episodes that are played in the event loop of a thread.

    What they ask of the engine waits for the rank's own thread, which steps it.

    Attributes:
        tokenizer: Tokenizer of the policy, for use with this source alone.
        tools: Tools that the policy may call.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, clock: Clock, data: DatasetConfig | None = None) -> None:
        """Start the thread; `data` is the dataset of all tasks, None for the training dataset."""
        config = recipe.environment
        assert config is not None, "episodes are played in an environment"
        self._clock, self._queue = clock, RequestQueue()
        self.tokenizer = copy.deepcopy(tokenizer)  # the other threads use theirs
        sets = [*recipe.data.train_sets().values()] if data is None else [data]
        is_chat = any(writer_of(self.tokenizer, one).is_chat for one in sets)
        self.tools = own_tool_use(config, environment_class(config), self.tokenizer, is_chat=is_chat)
        longest = recipe.data.max_prompt_tokens + config.max_episode_tokens
        open_tools = None if self.tools is None else self.tools.open
        self._player = EpisodePlayer(config, world_maker(config), longest, self._queue, open_tools)
        self._free = asyncio.Semaphore(config.concurrency)
        self._playing: dict[EpisodeGroup, list[Future[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def begin(self, group: EpisodeGroup) -> None:
        """Begin the episodes of a group."""
        played = (self._one(group, place) for place in group.places)
        # All begin at once; the semaphore limits how many of them play.
        self._playing[group] = [asyncio.run_coroutine_threadsafe(one, self._loop) for one in played]

    async def _one(self, group: EpisodeGroup, place: EpisodePosition) -> None:
        async with self._free:
            try:
                # Stored before its end is in the queue: the rank's own thread may take it as soon as it sees that.
                group.episodes[place.number] = episode = await self._player.play(place)
            # A canceled episode puts nothing into the queue: CancelledError is no Exception.
            except Exception as error:  # noqa: BLE001 - it is raised by the other thread
                ended = EpisodeEnd(group, 0, 0, error)
            else:
                said = sampled_in(episode)
                ended = EpisodeEnd(group, len(said), sum(len(node.tokens) for node in said))
        self._queue.put(Happening("end", place.number, ended))

    def happened(self) -> Iterator[Happening]:
        """Events since the last call, in order."""
        return self._queue.take()

    def wait(self) -> None:
        """Wait for something to happen, but not for longer than a second."""
        with self._clock.doing("environment"):
            self._queue.wait()

    def cancel(self, group: EpisodeGroup) -> None:
        """Cancel the episodes of a group that have not ended."""
        # The event loop cancels it a little later. If it waits for a response then, it asks to drop it.
        for playing in self._playing.pop(group):
            playing.cancel()

    def take(self, groups: Sequence[EpisodeGroup]) -> list[Episode]:
        """Hand over the episodes of groups that are finished."""
        for group in groups:
            del self._playing[group]
        return [group.episodes[place.number] for group in groups for place in group.places]

    def reset(self) -> None:
        """Forget all episodes."""
        # First the episodes, which may still ask for something, and then the queue.
        self._cancel()
        self._playing.clear()
        for _ in self._queue.take():
            pass

    def _cancel(self) -> None:
        """Cancel all episodes, and wait until they have ended."""

        async def cancel() -> None:
            await end_tasks()
            await self._player.close()

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(2 * GRACE_S)

    def close(self) -> None:
        """End the thread; episodes in flight are lost."""
        try:
            with suppress(TimeoutError):  # an episode does not end, and the thread with it
                self._cancel()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
            if self.tools is not None:
                self.tools.close()


class RequestQueue(EngineScheduler):
    """Requests of episodes, which wait until the thread that steps the engine takes them."""

    def __init__(self) -> None:
        self._waiting: deque[Happening] = deque()
        self._is_there = threading.Event()

    @override
    async def ask(self, request: Request, params: SamplingParams, known_tokens: int = 0) -> Completion:
        (sample_id,) = request.sample_ids
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(request, params, known_tokens, partial(_answer, answer))
        self.put(Happening("ask", sample_id, pending))
        try:
            return await answer
        except asyncio.CancelledError:
            # Or the engine would go on with a response that nobody waits for.
            self.put(Happening("drop", sample_id, pending))
            raise

    @override
    def forget(self, conversation: int) -> None:
        self.put(Happening("forget", conversation))

    def put(self, happening: Happening) -> None:
        """Let the other thread know."""
        # In this order: a thread that is woken finds something.
        self._waiting.append(happening)
        self._is_there.set()

    def take(self) -> Iterator[Happening]:
        """All that is in the queue, in order."""
        # Before the queue is read, or what is put meanwhile would be there without a signal.
        self._is_there.clear()
        while self._waiting:
            yield self._waiting.popleft()

    def wait(self) -> None:
        """Wait until something is in the queue, but not for longer than a second."""
        self._is_there.wait(BEAT_S)


def _answer(answer: asyncio.Future[Completion], completion: Completion) -> None:
    """Give an episode its response, in the thread of its event loop."""

    def settle() -> None:
        # It may have been canceled while the answer was on its way to this thread.
        if not answer.done():
            answer.set_result(completion)

    with suppress(RuntimeError):  # the event loop has ended
        answer.get_loop().call_soon_threadsafe(settle)
