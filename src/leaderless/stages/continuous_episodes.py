"""Episodes under way on a rank that generates continuously.

They are played in the event loop of a thread, so that no environment waits while the rank does something else. What
they ask of the engine waits for the rank's own thread, which steps it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch
from leaderless.data.encode import Tokenizer
from leaderless.data.images import PromptImage
from leaderless.environments.deadlines import GRACE_S
from leaderless.environments.episode import Episode, Place
from leaderless.environments.player import Player
from leaderless.environments.pump import BEAT_S
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.use import own_tool_use
from leaderless.observability.clock import Clock
from leaderless.online.pump import Order, settle
from leaderless.rollout.engine import Completion, Request, SamplingParams
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.continuous import Advance, EventKind, Events, Tally
from leaderless.stages.continuous_orders import EngineWork, Orders, Wish
from leaderless.stages.play import places_of, writer_of
from leaderless.stages.played import Play, sampled_in

News = tuple[EventKind, int]
"""What the thread of the episodes tells: a kind, and what it is about."""


class QueuePump:
    """See `Pump`. What is asked for waits until another thread takes it."""

    def __init__(self) -> None:
        """Nothing is asked for yet."""
        self._news: deque[tuple[News, object]] = deque()
        self._is_there = threading.Event()

    async def ask(
        self,
        prompt: Sequence[int],
        sample_id: int,
        params: SamplingParams,
        conversation: int | None = None,
        known_tokens: int = 0,
        images: tuple[PromptImage, ...] = (),
    ) -> Completion:
        """Sample one response."""
        request = Request(prompt, [sample_id], conversation=conversation, images=images)
        order = Order(prompt, sample_id, params, asyncio.get_running_loop().create_future(), Completion())
        wish = Wish(request, params, known_tokens, partial(settle, order))
        self.tell("ask", sample_id, wish)
        try:
            return await order.answer
        except asyncio.CancelledError:
            self.tell("drop", sample_id, wish)
            raise

    def forget(self, conversation: int) -> None:
        """See `Pump`."""
        self.tell("forget", conversation)

    def tell(self, kind: EventKind, about: int, what: object = None) -> None:
        """Tell the other thread something."""
        self._news.append(((kind, about), what))
        self._is_there.set()

    def take(self) -> Iterator[tuple[News, object]]:
        """What was told, in order."""
        self._is_there.clear()
        while self._news:
            yield self._news.popleft()

    def wait(self) -> None:
        """Wait for something to be told, but not for longer than a second."""
        self._is_there.wait(BEAT_S)


@dataclass(eq=False)
class Group:
    """The episodes of a task, in the order of their places."""

    number: int
    episodes: list[Episode | None]
    playing: list[Future[None]]
    num_left: int


@dataclass(frozen=True)
class Ended:
    """An episode that has ended: its place in its group, and what was played or why that cannot be said."""

    group: Group
    index: int
    outcome: Episode | Exception


class EpisodeField:
    """Episodes of tasks of several iterations; see `ResponseField`.

    Attributes:
        tally: Numbers of responses and tokens since it was last set.
    """

    def __init__(
        self,
        engine: SharedEngine,
        recipe: Recipe,
        play: Play,
        tokenizer: Tokenizer,
        role: str | None,
        events: Events,
        clock: Clock,
        data: DatasetConfig | None = None,
    ) -> None:
        """Have nothing under way.

        Args:
            engine: View of an engine that is awake and has weights.
            recipe: The recipe, as seen by the role that samples.
            play: Episodes of each task.
            tokenizer: Tokenizer of the policy.
            role: Role that samples; None if it plays all agents.
            events: Record of events between the steps of the engine, which it counts.
            clock: Clock of the rank.
            data: Dataset of all tasks; None for those of training.
        """
        config = recipe.environment
        assert config is not None, "episodes are played in an environment"
        self._recipe, self._play, self._role, self._data = recipe, play, role, data
        self._events, self._clock = events, clock
        self._orders = Orders(engine, events, play.distributions)
        self._tokenizer = copy.deepcopy(tokenizer)  # the other threads use theirs
        sets = [*recipe.data.train_sets().values()] if data is None else [data]
        is_chat = any(writer_of(self._tokenizer, one).is_chat for one in sets)
        self._tools = own_tool_use(config, environment_class(config), self._tokenizer, is_chat=is_chat)
        self._pump = QueuePump()
        longest = recipe.data.max_prompt_tokens + config.max_episode_tokens
        self._player = Player(config, world_maker(config), longest, self._pump, self._tools)
        self._free = asyncio.Semaphore(config.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self._groups: dict[int, Group] = {}
        self._begun: list[int] = []
        self.tally = Tally()

    @property
    def is_busy(self) -> bool:
        """Whether an episode is under way."""
        return any(group.num_left for group in self._groups.values())

    def begin(self, prompts: Batch) -> None:
        """Begin the episodes of some tasks."""
        places = places_of(self._play, prompts, self._recipe, self._tokenizer, self._tools, self._role, self._data)
        siblings = len(self._play.distributions)
        for row, number in enumerate(prompts.ids.tolist()):
            group = self._groups[number] = Group(number, [None] * siblings, [], siblings)
            for index, place in enumerate(places[row * siblings : (row + 1) * siblings]):
                playing = self._one(group, index, place)
                group.playing.append(asyncio.run_coroutine_threadsafe(playing, self._loop))
            self._begun.append(number)

    async def _one(self, group: Group, index: int, place: Place) -> None:
        """Play an episode; the thread does it."""
        outcome: Episode | Exception
        async with self._free:
            try:
                outcome = await self._player.play(place)
            except Exception as error:  # noqa: BLE001 - it is raised by the other thread
                outcome = error
        self._pump.tell("end", place.number, Ended(group, index, outcome))

    def step(self) -> list[Advance]:
        """Do what episodes ask for, and let the engine take a step, or wait for them if it has nothing to do."""
        # A group counts from its beginning: its first token may be sampled a little later.
        advances = [Advance(group, has_begun=True, is_finished=False) for group in self._begun]
        self._begun.clear()
        for news, what in self._pump.take():
            advances += self._heed(news, what)
        if self._orders.is_busy:
            self._orders.step()
        elif not advances:
            with self._clock.doing("environment"):
                self._pump.wait()
        return advances

    def _heed(self, news: News, what: object) -> Sequence[Advance]:
        """Do what an episode asks for."""
        kind, about = news
        if isinstance(what, Ended):
            return self._end(about, what)
        if not isinstance(what, Wish):
            self._orders.forget(about)
        elif kind == "ask":
            self._orders.ask(what)
        else:
            self.tally.voided += self._orders.drop(what)
        return ()

    def _end(self, number: int, ended: Ended) -> Sequence[Advance]:
        group = ended.group
        if self._groups.get(group.number) is not group:
            return ()  # given up, and perhaps begun again
        said = [] if isinstance(ended.outcome, Exception) else sampled_in(ended.outcome)
        num_tokens = sum(len(node.tokens) for node in said)
        facts = {"group": group.number, "responses": len(said), "tokens": num_tokens}
        self._events.note("end", number, facts)
        if isinstance(ended.outcome, Exception):
            raise ended.outcome
        group.episodes[ended.index] = ended.outcome
        group.num_left -= 1
        self.tally.responses += len(said)
        self.tally.tokens += num_tokens
        return [Advance(group.number, has_begun=False, is_finished=True)] if not group.num_left else ()

    def collect(self) -> list[Advance]:
        """Take what an evaluation's steps have brought; groups count from their beginning."""
        self._orders.collect()
        return []

    def give_up(self, number: int) -> None:
        """Cancel what is left of a group, and forget all of it."""
        group = self._groups.pop(number)
        for playing in group.playing:
            playing.cancel()
        said = [node for episode in group.episodes if episode is not None for node in sampled_in(episode)]
        self.tally.voided += sum(len(node.tokens) for node in said)

    def take(self, groups: Sequence[int]) -> list[Episode]:
        """Hand over the episodes of groups that are finished, group by group."""
        found = [episode for group in groups for episode in self._groups.pop(group).episodes]
        return [episode for episode in found if episode is not None]

    def take_work(self) -> EngineWork:
        """What the engine has done since this was last asked."""
        work, self._orders.work = self._orders.work, EngineWork()
        return work

    def reset(self) -> None:
        """Forget all groups."""
        self._cancel()
        self._groups.clear()
        self._begun.clear()
        for _ in self._pump.take():
            pass
        self._orders.reset()

    def _cancel(self) -> None:
        """Cancel all episodes, and wait until they have ended."""

        async def cancel() -> None:
            others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=GRACE_S)
            await self._player.close()

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(2 * GRACE_S)

    def close(self) -> None:
        """End the thread; episodes that are under way are lost."""
        try:
            with suppress(TimeoutError):  # an episode does not end, and the thread with it
                self._cancel()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE_S)
            if self._tools is not None:
                self._tools.sources.close()
