"""Plays episodes: many at the same time, each with deadlines and limits of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

from leaderless.config import Json, RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.chat import ChatWriter
from leaderless.environments.deadlines import run_to_end, until_stuck
from leaderless.environments.programs.chat import Chat, Rules
from leaderless.environments.programs.doorway import LazyDoorway
from leaderless.environments.programs.lines import number_of
from leaderless.environments.programs.world import ProgramWorld
from leaderless.environments.protocol import Message, Observation, Task, Turn
from leaderless.environments.pump import EnginePump, Pump
from leaderless.environments.tools import Call, CallResult, Toolbox, result_messages
from leaderless.environments.tools.template import find_reader
from leaderless.environments.tools.use import ToolUse
from leaderless.environments.trace import Said, Trace, TraceNode
from leaderless.environments.witness import Answer, Witness
from leaderless.environments.world import ENVIRONMENT, OVERFLOW, TIMEOUT, Failure, World
from leaderless.rollout.engine import RolloutEngine, SamplingParams

Result = TypeVar("Result")


@dataclass(frozen=True)
class Spoken:
    """What was said in an episode that is continued.

    Attributes:
        context: Token ids that it followed on.
        tokens: Its own token ids.
        said: Facts about it; its reward is found again.
    """

    context: Sequence[int]
    tokens: Sequence[int]
    said: Said


@dataclass(frozen=True)
class Place:
    """An episode to play.

    Attributes:
        number: Unique number; with the seed it decides what is sampled.
        seed: Seed of the environment's random numbers.
        task: Row of the dataset.
        writer: Writer of its messages.
        params: Distribution from which the policy samples, and the limits of one message.
        agents: Agents that the policy plays; the episode ends when another one is to act. None if it plays all.
        history: What others have said before, in the order of the turns.
    """

    number: int
    seed: str
    task: Task
    writer: ChatWriter
    params: SamplingParams
    agents: frozenset[str] | None = None
    history: Sequence[Spoken] = ()


@dataclass
class Episode:
    """What was played.

    Attributes:
        trace: Everything that was said.
        agents: Names of the environment's agents.
        cause: Word by which a failed episode is counted; empty if it did not fail.
        error: Why it failed, for people.
        is_cut: Whether it ended at a limit.
        is_led: Whether a program led it.
        attempts: Number of times that it was tried.
        seconds: Seconds in the model, in the environment and in tools, by these names.
        calls: Results of all calls of tools.
        info: Facts that the environment has noted.
        place: What was to be played; None if it was not played here.
        answers: What the environment has answered.
    """

    trace: Trace = field(default_factory=Trace)
    agents: tuple[str, ...] = ()
    cause: str = ""
    error: str = ""
    is_cut: bool = False
    is_led: bool = False
    attempts: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "environment": 0.0, "tools": 0.0})
    calls: list[CallResult] = field(default_factory=list)
    info: dict[str, Json] = field(default_factory=dict)
    place: Place | None = None
    answers: list[Answer] = field(default_factory=list)


class Player:
    """Plays episodes in an environment."""

    def __init__(
        self,
        config: EnvironmentConfig,
        open_world: Callable[[], World | ProgramWorld],
        max_tokens: int,
        pump: Pump,
        tools: ToolUse | None = None,
    ) -> None:
        """Play nothing yet.

        Args:
            config: The recipe's `environment` section.
            open_world: Function that makes the environment of an episode.
            max_tokens: Most tokens of a conversation, from its beginning.
            pump: What samples what the policy says.
            tools: Tools that the policy may call; None for none.
        """
        self._config, self._open_world, self._max_tokens, self._pump = config, open_world, max_tokens, pump
        self._tools, self._doorway = tools, LazyDoorway()

    async def play(self, place: Place) -> Episode:
        """Play an episode, again if it fails and may be tried again."""
        episode = Episode()
        for attempt in range(self._config.max_attempts):
            one = _Attempt(self._config, self._max_tokens, self._pump, self._doorway, place, attempt)
            try:
                episode = await until_stuck(one.run(self._open_world, self._tools))
            except TimeoutError as error:
                episode = one.leave(str(error))
            if not episode.cause:
                break
        return episode

    async def close(self) -> None:
        """Answer no programs any more."""
        await self._doorway.close()


class _Attempt:
    """One try of an episode."""

    def __init__(
        self,
        config: EnvironmentConfig,
        max_tokens: int,
        pump: Pump,
        doorway: LazyDoorway,
        place: Place,
        attempt: int,
    ) -> None:
        self._config, self._max_tokens, self._pump, self._doorway = config, max_tokens, pump, doorway
        self._place, self._attempt = place, attempt
        self.episode = Episode(attempts=attempt + 1, place=place)
        self._ends: dict[str, TraceNode] = {}  # of each agent's conversation
        self._waiting: dict[str, list[Message]] = {}  # what an agent has been told since it spoke last
        self._num_turns = 0
        self._toolbox: Toolbox | None = None
        self._is_over = self._is_left = False

    async def run(self, open_world: Callable[[], World | ProgramWorld], tools: ToolUse | None) -> Episode:
        """Play to the end, or to the failure."""
        episode, world = self.episode, None
        try:
            world = open_world()
            episode.agents = world.agents
            if tools is not None and not isinstance(world, ProgramWorld):
                self._toolbox = await tools.open(world)
            await self._play(world)
        except Failure as failure:
            episode.cause, episode.error = failure.cause, str(failure)
        except RecipeError as error:
            episode.cause, episode.error = ENVIRONMENT, str(error)
        finally:
            self._end()
            if self._toolbox is not None:
                await self._toolbox.close(self._config.tool_timeout_s)
            if world is not None:
                await world.close()
        return episode

    def leave(self, error: str) -> Episode:
        """The episode when a function does not end; whatever that does later changes nothing any more."""
        self._is_left, episode = True, self.episode
        if not self._is_over:
            episode.cause, episode.error = TIMEOUT, error
            self._end()
        return replace(episode, trace=Trace([*episode.trace.nodes]), answers=[*episode.answers], calls=[*episode.calls])

    def _end(self) -> None:
        """Release what the engine keeps of the episode."""
        if not self._is_over:
            self._is_over = True
            for number in range(len(self.episode.agents)):
                self._pump.forget(self._conversation(number))

    async def _play(self, world: World | ProgramWorld) -> None:
        if isinstance(world, ProgramWorld):
            await self._follow(world)
            return
        world = Witness(world, self.episode.answers)
        agent = world.agents[0]
        observation = await self._timed(world.reset(self._place.task, self._place.seed), "environment")
        self._tell(agent, observation)
        while True:
            if self._num_turns < len(self._place.history):
                said: TraceNode | None = self._repeat(agent, self._place.history[self._num_turns])
            elif self._place.agents is None or agent in self._place.agents:
                said = await self._say(agent)
            else:
                return
            if said is None:
                return
            calls = self._calls_in(said)
            if not calls:
                turn = await self._timed(world.act(self._place.writer.text(said.tokens)), "environment")
                self._reward(turn, said, agent)
                self.episode.info |= turn.info
                if turn.done:
                    return
            if self._num_turns >= self._config.max_turns:
                self.episode.is_cut = True
                return
            if calls:
                self._tell(agent, await self._answer(calls))
                continue
            agent = agent if turn.agent is None else turn.agent
            self._tell(agent, turn.observation)

    def _calls_in(self, said: TraceNode) -> Sequence[Call]:
        """The calls in a message; it is then recorded as chat templates write one with calls, if they can be read."""
        if self._toolbox is None:
            return ()
        found = self._toolbox.parse(self._place.writer.text(said.tokens, is_plain=False))
        if found.calls and not any(call.problem for call in found.calls):
            said.messages = [found.message()]
        return found.calls

    async def _answer(self, calls: Sequence[Call]) -> list[Message]:
        """What tools answer to the calls of a message."""
        assert self._toolbox is not None
        results = await self._timed(self._toolbox.run(calls, self._config.tool_timeout_s), "tools")
        self.episode.calls += results
        return result_messages(results)

    async def _follow(self, program: ProgramWorld) -> None:
        """Play an episode that a program leads."""
        place, config, episode = self._place, self._config, self.episode
        rules = Rules(
            number=f"{place.number}/{self._attempt}",
            seed=place.seed,
            params=place.params,
            max_tokens=self._max_tokens,
            max_turns=config.max_turns,
            reader_of=partial(find_reader, config.tool_format, place.writer.tokenizer, is_chat=place.writer.is_chat),
        )
        episode.is_led = True
        chat = Chat(rules, place.writer, episode.trace, self._pump, self._doorway)
        begin = time.perf_counter()
        try:
            result = await program.play(place.task, chat)
        finally:
            episode.seconds["model"] += chat.seconds
            episode.seconds["environment"] += max(0.0, time.perf_counter() - begin - chat.seconds)
        if chat.overflow is not None and config.on_overflow == "fail":
            raise Failure(OVERFLOW, str(chat.overflow))
        episode.is_cut = chat.overflow is not None
        episode.info |= {name: value for name, value in result.items() if name != "reward"}
        last = episode.trace.said()[-1].said
        assert last is not None
        last.reward += float(cast("float", result["reward"]))

    async def _timed(self, answer: Awaitable[Result], what: str) -> Result:
        begin = time.perf_counter()
        try:
            found = await answer
        finally:
            self.episode.seconds[what] += time.perf_counter() - begin
        if self._is_left:
            raise asyncio.CancelledError
        return found

    def _tell(self, agent: str, observation: Observation) -> None:
        try:
            messages = self._place.writer.messages_of(observation)
        except TypeError as error:
            raise Failure(ENVIRONMENT, str(error)) from error
        self._waiting.setdefault(agent, []).extend(messages)

    async def _say(self, agent: str) -> TraceNode | None:
        """Let an agent say something; None if its conversation has become too long."""
        known = self._ends.get(agent)
        num_known = 0 if known is None else len(known.context()) - 1  # the last token was sampled, but not read
        end = self._told(agent)
        prompt = end.context()
        room = min(self._place.params.max_tokens, self._max_tokens - len(prompt))
        if room < 1:
            self._overflow(len(prompt))
            return None
        begin = time.perf_counter()
        completion = await self._pump.ask(
            prompt,
            noise_id(self._place.number, self._attempt, self._num_turns),
            self._place.params.limited_to(room),
            self._conversation(self.episode.agents.index(agent)),
            num_known,
        )
        self.episode.seconds["model"] += time.perf_counter() - begin
        facts = Said(completion.log_probs, completion.policy_versions, self._num_turns, agent, completion.is_truncated)
        facts.temperature = self._place.params.distribution.temperature
        return self._add(end, completion.tokens, facts)

    def _told(self, agent: str) -> TraceNode:
        """The end of an agent's conversation, with what it has been told since it spoke last."""
        trace, writer = self.episode.trace, self._place.writer
        end, told = self._ends.get(agent), self._waiting.pop(agent, [])
        if end is None:
            messages, tokens = writer.begin(told)
            end = trace.add(None, tokens, messages)
        elif told:
            end = trace.add(end, writer.add(told, end.tokens), told)
        self._ends[agent] = end
        return end

    def _repeat(self, agent: str, spoken: Spoken) -> TraceNode:
        """Say again what was said when the episode was played up to here."""
        end = self._told(agent)
        if agent != spoken.said.agent or end.context() != list(spoken.context):
            raise Failure(
                ENVIRONMENT,
                f"the environment has not done the same again in turn {self._num_turns + 1}, so that another policy "
                "cannot continue the episode: let it take all randomness from `rng`",
            )
        return self._add(end, spoken.tokens, replace(spoken.said, reward=0.0, is_repeated=True))

    def _add(self, end: TraceNode, tokens: Sequence[int], facts: Said) -> TraceNode:
        message: Message = {"role": "assistant", "content": self._place.writer.text(tokens)}
        self._ends[facts.agent] = self.episode.trace.add(end, tokens, [message], facts)
        self._num_turns += 1
        return self._ends[facts.agent]

    def _overflow(self, num_tokens: int) -> None:
        """End an episode in which a conversation has become too long."""
        text = (
            f"a conversation has {num_tokens} tokens, and may have {self._max_tokens} (data.max_prompt_tokens + "
            "environment.max_episode_tokens): raise them, or let the environment say less"
        )
        if self._config.on_overflow == "fail" or not self._num_turns:
            raise Failure(OVERFLOW, text)
        self.episode.is_cut = True

    def _reward(self, turn: Turn, said: TraceNode, agent: str) -> None:
        """Add rewards to what their agents have said last."""
        rewards = turn.reward if isinstance(turn.reward, Mapping) else {agent: turn.reward}
        for name, value in rewards.items():
            node = said if name == agent else self._last_said(name)
            if node is None and value:
                raise Failure(ENVIRONMENT, f"agent '{name}' is rewarded by {value:g}, but has not said anything yet")
            if node is not None and node.said is not None:
                node.said.reward += value

    def _last_said(self, agent: str) -> TraceNode | None:
        nodes = (node for node in reversed(self.episode.trace.nodes) if node.said and node.said.agent == agent)
        return next(nodes, None)

    def _conversation(self, agent: int) -> int:
        return noise_id(self._place.number, self._attempt, -1 - agent)


def noise_id(number: int, attempt: int, turn: int) -> int:
    """The sample id of a message: that of the episode for its first one, and 63 bits that follow from it for others."""
    if attempt == turn == 0:
        return number
    return number_of(f"{number}/{attempt}/{turn}")


def play_all(
    engine: RolloutEngine,
    config: EnvironmentConfig,
    open_world: Callable[[], World | ProgramWorld],
    places: Sequence[Place],
    max_tokens: int,
    progress: Callable[[int], None],
    tools: ToolUse | None = None,
) -> tuple[list[Episode], EnginePump]:
    """Play episodes with an engine that is awake and has weights, at most `config.concurrency` at a time.

    Args:
        engine: Engine that samples.
        config: The recipe's `environment` section.
        open_world: Function that makes the environment of an episode.
        places: The episodes.
        max_tokens: Most tokens of a conversation, from its beginning.
        progress: Function that gets the number of episodes that have ended since its last call, also 0.
        tools: Tools that the policy may call; None for none.

    Returns:
        The episodes in the order of their places, and the pump with what it has measured.
    """

    async def play() -> tuple[list[Episode], EnginePump]:
        pump = EnginePump(engine, lambda: progress(0))
        player, free = Player(config, open_world, max_tokens, pump, tools), asyncio.Semaphore(config.concurrency)

        async def one(place: Place) -> Episode:
            async with free:
                episode = await player.play(place)
            progress(1)
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                engine_task = tasks.create_task(pump.run())
                playing = [tasks.create_task(one(place)) for place in places]
                await asyncio.gather(*playing)
                engine_task.cancel()
        finally:
            await player.close()
        return [task.result() for task in playing], pump

    try:
        return run_to_end(play())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
