"""One try of an episode: messages, calls and rewards, up to its end or its failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.engine_scheduler import EngineScheduler
from leaderless.environments.episode import Episode, EpisodePosition, RecordedAnswer, Said, Spoken, Trace, TraceNode
from leaderless.environments.guarded_environment import EnvironmentFailure, GuardedEnvironment, messages_of
from leaderless.environments.programs.chat import Chat, Rules
from leaderless.environments.programs.conversations import OUT_OF_TOKENS, number_of
from leaderless.environments.programs.program_environment import LazyEndpoint, ProgramEnvironment
from leaderless.environments.protocol import Message, Observation, Turn
from leaderless.environments.tools import Call, CallResult, Toolbox, result_messages
from leaderless.environments.tools.calls import MISTAKES
from leaderless.rollout.engine import Request

Result = TypeVar("Result")
Answer = TypeVar("Answer", Observation, Turn)
OpenTools = Callable[[GuardedEnvironment], Awaitable[Toolbox]]
"""Function that opens the tools of an episode."""


class EpisodeRunner:
    """One try of an episode."""

    def __init__(
        self,
        config: EnvironmentConfig,
        max_tokens: int,
        pump: EngineScheduler,
        doorway: LazyEndpoint,
        place: EpisodePosition,
        attempt: int,
    ) -> None:
        self._config, self._max_tokens, self._pump, self._doorway = config, max_tokens, pump, doorway
        self._place, self._attempt = place, attempt
        self.episode = Episode(attempts=attempt + 1, place=place)
        self._ends: dict[str, TraceNode] = {}  # of each agent's conversation
        self._waiting: dict[str, list[Message]] = {}  # messages to an agent since it spoke last
        self._num_turns = 0
        self._toolbox: Toolbox | None = None
        self._is_over = self._is_left = False

    async def run(
        self, open_world: Callable[[], GuardedEnvironment | ProgramEnvironment], open_tools: OpenTools | None
    ) -> Episode:
        """Play to the end, or to the failure."""
        episode, world = self.episode, None
        try:
            world = open_world()
            episode.agents = world.agents
            if open_tools is not None and not isinstance(world, ProgramEnvironment):
                self._toolbox = await open_tools(world)
            await self._play(world)
        except EnvironmentFailure as failure:
            episode.fail(failure.kind, str(failure))
        except RecipeError as error:
            episode.fail("environment", str(error))
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
            episode.fail("deadline", error)
            self._end()
        left = replace(episode, trace=Trace([*episode.trace.nodes]), answers=[*episode.answers])
        return replace(left, calls=[*episode.calls], failures=[*episode.failures])

    def _end(self) -> None:
        """Release what the engine keeps of the episode."""
        if not self._is_over:
            self._is_over = True
            for number in range(len(self.episode.agents)):
                self._pump.forget(self._conversation(number))

    async def _play(self, world: GuardedEnvironment | ProgramEnvironment) -> None:
        if isinstance(world, ProgramEnvironment):
            await self._follow(world)
            return
        agent = world.agents[0]
        self._tell(agent, await self._noted(world.reset(self._place.task, self._place.seed)))
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
                turn = await self._noted(world.act(self._place.writer.text(said.tokens)))
                self._reward(turn, agent)
                self.episode.info |= turn.info
                if turn.done:
                    return
            is_last = self._num_turns >= self._config.max_turns
            if calls and not (is_last and not self._has_steps(calls)):
                results = await self._answered(calls, agent)
                if any(result.done for result in results):
                    return
                self._tell(agent, result_messages(results))
            if is_last:
                self.episode.is_cut = True
                return
            if calls:
                continue
            agent = turn.next_after(agent)
            self._tell(agent, turn.observation)

    def _calls_in(self, said: TraceNode) -> Sequence[Call]:
        """The calls in a message; it is then recorded as chat templates write one with calls, if they can be read."""
        if self._toolbox is None:
            return ()
        found = self._toolbox.parse(self._place.writer.text(said.tokens, is_plain=False))
        if found.calls and not any(call.problem for call in found.calls):
            said.messages = [found.message()]
        return found.calls

    def _has_steps(self, calls: Sequence[Call]) -> bool:
        return self._toolbox is not None and self._toolbox.has_steps(calls)

    async def _answered(self, calls: Sequence[Call], agent: str) -> Sequence[CallResult]:
        """Results of an agent's calls, which it is rewarded for."""
        assert self._toolbox is not None
        results = await self._timed(self._toolbox.run(calls, self._config.tool_timeout_s), "tools")
        self.episode.calls += results
        self._note_calls(results)
        self._reward(Turn(reward=sum(result.reward for result in results)), agent)
        return results

    def _note_calls(self, results: Sequence[CallResult]) -> None:
        """Note calls that the policy got wrong, and tools whose failure it is told."""
        for result in results:
            if result.refusal in MISTAKES:
                self.episode.note("policy", result.text)
            elif result.kind is not None:
                self.episode.note(result.kind, result.text.removeprefix("Error: "))

    async def _follow(self, program: ProgramEnvironment) -> None:
        """Play an episode that a program leads."""
        place, config, episode = self._place, self._config, self.episode
        rules = Rules(
            number=f"{place.number}/{self._attempt}",
            seed=place.seed,
            params=place.params,
            max_tokens=self._max_tokens,
            max_turns=config.max_turns,
            tool_format=config.tool_format,
        )
        episode.is_led = True
        chat = Chat(rules, place.writer, episode.trace, self._pump, self._doorway)
        begin = time.perf_counter()
        try:
            result = await program.play(place.task, chat)
        finally:
            episode.seconds["model"] += chat.seconds
            episode.seconds["environment"] += max(0.0, time.perf_counter() - begin - chat.seconds)
        if chat.overflow is not None:
            episode.is_cut = True
            if chat.overflow.code == OUT_OF_TOKENS:
                episode.note("policy", str(chat.overflow))
        episode.info |= {name: value for name, value in result.items() if name != "reward"}
        last = episode.trace.said()[-1].said
        assert last is not None
        last.reward += float(cast("float", result["reward"]))

    async def _noted(self, answer: Awaitable[Answer]) -> Answer:
        """An answer of the environment, which is noted for the journal."""
        begin = time.perf_counter()
        found = await self._timed(answer, "environment")
        turn = found if isinstance(found, Turn) else Turn(found)
        self.episode.answers.append(RecordedAnswer(turn, time.perf_counter() - begin))
        return found

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
        self._waiting.setdefault(agent, []).extend(
            messages_of(observation, sees_images=self._place.writer.reader is not None)
        )

    async def _say(self, agent: str) -> TraceNode | None:
        """Let an agent say something; None if its conversation has become too long."""
        known = self._ends.get(agent)
        num_known = 0 if known is None else len(known.context()) - 1  # the last token was sampled, but not read
        end = self._told(agent)
        prompt = end.context()
        room = min(self._place.params.max_tokens, self._max_tokens - len(prompt))
        if room < 1:
            problem = (
                f"a conversation has {len(prompt)} tokens, and may have {self._max_tokens} (data.max_prompt_tokens + "
                "environment.max_episode_tokens): raise them, or let the environment say less"
            )
            if not self._num_turns:
                raise EnvironmentFailure("environment", problem)  # the policy has not said anything
            self.episode.is_cut = True
            self.episode.note("policy", problem)
            return None
        noise = noise_id(self._place.number, self._attempt, self._num_turns)
        conversation = self._conversation(self.episode.agents.index(agent))
        request = Request(prompt, [noise], conversation=conversation, images=end.seen())
        begin = time.perf_counter()
        completion = await self._pump.ask(request, self._place.params.limited_to(room), num_known)
        self.episode.seconds["model"] += time.perf_counter() - begin
        if completion.finish_reason == "aborted":
            raise EnvironmentFailure("infrastructure", "the engine has given up an answer of the policy")
        facts = Said(completion.log_probs, completion.policy_versions, self._num_turns, agent, completion.is_truncated)
        facts.temperature = self._place.params.distribution.temperature
        facts.experts, facts.support = completion.experts, completion.support
        return self._add(end, completion.tokens, facts)

    def _told(self, agent: str) -> TraceNode:
        """The end of an agent's conversation, with the messages that it got since it spoke last."""
        trace, writer = self.episode.trace, self._place.writer
        end, told = self._ends.get(agent), self._waiting.pop(agent, [])
        if end is None:
            messages, tokens = writer.begin(told)
            end = trace.add(None, tokens, messages, images=writer.images(messages, tokens))
        elif told:
            tokens = writer.add(told, end.tokens)
            end = trace.add(end, tokens, told, images=writer.images(told, tokens))
        self._ends[agent] = end
        return end

    def _repeat(self, agent: str, spoken: Spoken) -> TraceNode:
        """Say again what was said when the episode was played up to here."""
        end = self._told(agent)
        if agent != spoken.said.agent or end.context() != list(spoken.context):
            raise EnvironmentFailure(
                "environment",
                f"the environment has not done the same again in turn {self._num_turns + 1}, so that another policy "
                "cannot continue the episode: let it take all randomness from `rng`",
            )
        return self._add(end, spoken.tokens, replace(spoken.said, reward=0.0, is_repeated=True))

    def _add(self, end: TraceNode, tokens: Sequence[int], facts: Said) -> TraceNode:
        message: Message = {"role": "assistant", "content": self._place.writer.text(tokens)}
        self._ends[facts.agent] = self.episode.trace.add(end, tokens, [message], facts)
        self._num_turns += 1
        return self._ends[facts.agent]

    def _reward(self, turn: Turn, agent: str) -> None:
        """Add rewards to what their agents have said last."""
        for name, value in turn.rewards_for(agent).items():
            said = (node.said for node in reversed(self.episode.trace.nodes) if node.said and node.said.agent == name)
            last = next(said, None)
            if last is not None:
                last.reward += value
            elif value:
                raise EnvironmentFailure(
                    "environment", f"agent '{name}' is rewarded by {value:g}, but has not said anything yet"
                )

    def _conversation(self, agent: int) -> int:
        return noise_id(self._place.number, self._attempt, -1 - agent)


def noise_id(number: int, attempt: int, turn: int) -> int:
    """The sample id of a message: the episode's for its first one, and 63 bits that follow from it for others."""
    if attempt == turn == 0:
        return number
    return number_of(f"{number}/{attempt}/{turn}")
