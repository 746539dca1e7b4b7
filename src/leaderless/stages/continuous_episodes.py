"""Episodes under way on a rank that generates continuously.

They are played in the event loop of a thread, so that no environment waits while the rank does something else. What
they ask of the engine waits for the rank's own thread, which steps it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from leaderless.config import Recipe
from leaderless.data.batch import Batch
from leaderless.data.encode import Tokenizer
from leaderless.environments.deadlines import GRACE_S
from leaderless.environments.episode import Episode, Place
from leaderless.environments.player import Player
from leaderless.environments.pump import BEAT_S
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.use import own_tool_use
from leaderless.observability.clock import Clock
from leaderless.online.pump import Order, settle
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.continuous import Advance, EventKind, Events, Tally
from leaderless.stages.play import places_of, writer_of
from leaderless.stages.played import Play, sampled_in

News = tuple[EventKind, int]
"""What the thread of the episodes tells: a kind, and what it is about."""


@dataclass
class EngineWork:
    """See `Work`: what the engine has done for episodes since the last share."""

    busy_s: float = 0.0
    known_tokens: int = 0
    cached_tokens: int = 0


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
    ) -> Completion:
        """Sample one response."""
        request = Request(prompt, [sample_id], conversation=conversation)
        order = Order(prompt, sample_id, params, asyncio.get_running_loop().create_future(), Completion())
        self.tell("ask", sample_id, (order, request, known_tokens))
        try:
            return await order.answer
        except asyncio.CancelledError:
            self.tell("drop", sample_id)
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


@dataclass
class _Group:
    """The episodes of a task, in the order of their places."""

    episodes: list[Episode | None]
    playing: list[Future[None]]
    num_left: int


class EpisodeField:
    """Episodes of tasks of several iterations; see `ResponseField`.

    Attributes:
        tally: What has been generated since it was last set.
        work: What the engine has done since the last share.
    """

    def __init__(
        self,
        engine: SharedEngine,
        recipe: Recipe,
        play: Play,
        tokenizer: Tokenizer,
        role: str,
        events: Events,
        beat: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Have nothing under way.

        Args:
            engine: View of an engine that is awake and has weights.
            recipe: The recipe, as seen by the role that samples.
            play: Episodes of each task.
            tokenizer: Tokenizer of the policy.
            role: Role that samples.
            events: What happens between the steps of the engine, which are counted there.
            beat: Function that is called as a sign of life.
            clock: Clock of the rank.
        """
        config = recipe.environment
        assert config is not None, "episodes are played in an environment"
        self._engine, self._recipe, self._play, self._role = engine, recipe, play, role
        self._events, self._beat, self._clock = events, beat, clock
        self._tokenizer = copy.deepcopy(tokenizer)  # the other threads use theirs
        sets = list(recipe.data.train_sets().values())
        is_chat = any(writer_of(self._tokenizer, one).is_chat for one in sets)
        self._tools = own_tool_use(config, environment_class(config), self._tokenizer, is_chat=is_chat)
        self._pump = QueuePump()
        longest = recipe.data.max_prompt_tokens + config.max_episode_tokens
        self._player = Player(config, world_maker(config), longest, self._pump, self._tools)
        self._free = asyncio.Semaphore(config.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()
        self._groups: dict[int, _Group] = {}
        self._begun: list[int] = []
        self._held: list[tuple[News, object]] = []  # of a line that is followed, what has come before its time
        self._orders: dict[int, tuple[Order, int]] = {}  # under way, by the number of the request
        self.tally, self.work = Tally(), EngineWork()

    @property
    def is_busy(self) -> bool:
        """Whether an episode is under way."""
        return any(group.num_left for group in self._groups.values())

    def begin(self, prompts: Batch) -> None:
        """Begin the episodes of some tasks."""
        data = [self._recipe.data.train_set_of(row) for row in prompts.objects("rows") if isinstance(row, Mapping)]
        writers = {id(one): writer_of(self._tokenizer, one, self._tools) for one in data}
        places = places_of(self._play, prompts, [writers[id(one)] for one in data], self._recipe, self._role)
        siblings = len(self._play.distributions)
        for row, number in enumerate(prompts.ids.tolist()):
            group = self._groups[number] = _Group([None] * siblings, [], siblings)
            for index, place in enumerate(places[row * siblings : (row + 1) * siblings]):
                playing = self._one(number, index, place)
                group.playing.append(asyncio.run_coroutine_threadsafe(playing, self._loop))
            self._begun.append(number)

    async def _one(self, group: int, index: int, place: Place) -> None:
        """Play an episode; the thread does it."""
        outcome: Episode | Exception
        async with self._free:
            try:
                outcome = await self._player.play(place)
            except Exception as error:  # noqa: BLE001 - it is raised by the other thread
                outcome = error
        self._pump.tell("end", place.number, (group, index, outcome))

    def step(self) -> list[Advance]:
        """Do what episodes ask for, and let the engine take a step, or wait for them if it has nothing to do."""
        # A group counts from its beginning: its first token may be sampled a little later.
        advances = [Advance(group, has_begun=True, is_finished=False) for group in self._begun]
        self._begun.clear()
        if self._events.expected is None:
            for news, what in self._pump.take():
                advances += self._heed(news, what)
        else:
            while (due := self._events.due()) is not None and due[0] != "weights":
                advances += self._heed(*self._await(due))
            if due is not None:
                return advances
        if self._orders:
            self._take_step()
        elif not advances and self._events.expected is None:
            with self._clock.doing("environment"):
                self._pump.wait()
        return advances

    def _await(self, due: tuple[str, int]) -> tuple[News, object]:
        """Wait for something that the line that is followed has next."""
        end_s = time.monotonic() + self._recipe.run.timeout_s
        while time.monotonic() < end_s:
            self._held += self._pump.take()
            for place, (news, _) in enumerate(self._held):
                if news == due:
                    return self._held.pop(place)
            self._pump.wait()
            self._beat()
        come = ", ".join(f"{kind} {about}" for (kind, about), _ in self._held[:3]) or "nothing"
        raise RuntimeError(
            f"after {self._events.steps} steps of the engine, the run that is followed had '{due[0]} {due[1]}', which "
            f"has not come for {self._recipe.run.timeout_s:g} s ({come} has): environments must answer here as there"
        )

    def _heed(self, news: News, what: object) -> Sequence[Advance]:
        """Do what an episode asks for."""
        kind, about = news
        self._events.note(kind, about)
        if kind == "end":
            assert isinstance(what, tuple), "an end comes with its episode"
            return self._end(*what)
        if kind == "forget":
            self._engine.forget(about)
        elif kind == "drop":
            for number in [number for number, (order, _) in self._orders.items() if order.sample_id == about]:
                self.tally.voided += len(self._orders.pop(number)[0].completion.tokens)
                self._engine.abort(number)
        elif isinstance(what, tuple):
            order, request, known_tokens = what
            self._orders[self._engine.submit(request, order.params)] = order, known_tokens
            self.work.known_tokens += known_tokens
        return ()

    def _end(self, number: int, index: int, outcome: Episode | Exception) -> Sequence[Advance]:
        group = self._groups.get(number)
        if group is None:
            return ()  # given up
        if isinstance(outcome, Exception):
            raise outcome
        group.episodes[index] = outcome
        group.num_left -= 1
        said = sampled_in(outcome)
        self.tally.responses += len(said)
        self.tally.tokens += sum(len(node.tokens) for node in said)
        return [Advance(number, has_begun=False, is_finished=True)] if not group.num_left else ()

    def _take_step(self) -> None:
        self._events.steps += 1
        begin = time.perf_counter()
        deltas = self._engine.step()
        self.work.busy_s += time.perf_counter() - begin
        self._deliver(deltas)

    def collect(self) -> list[Advance]:
        """Take what an evaluation's steps have brought; groups count from their beginning."""
        self._deliver(self._engine.collect())
        return []

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.request not in self._orders:
                continue  # dropped
            order, known_tokens = self._orders[delta.request]
            order.completion.add(delta)
            self.work.cached_tokens += min(delta.cached_tokens, known_tokens)
            if delta.finish_reason is not None:
                del self._orders[delta.request]
                settle(order, order.completion)

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
        work, self.work = self.work, EngineWork()
        return work

    def reset(self) -> None:
        """Forget all groups."""
        self._cancel()
        self._groups.clear()
        self._begun.clear()
        self._held.clear()
        self._orders.clear()
        for _ in self._pump.take():
            pass
        self._engine.sleep(keep_weights=True)

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
