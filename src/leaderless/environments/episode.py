"""Episodes to be played, and episodes that were played: trees of messages, whose branches become training samples.

A node of a tree holds only the tokens that it adds, so that an episode takes memory in proportion to its length however
many turns it has. What the policy said is kept as it was sampled, and never encoded again. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from leaderless.base.values import Json
from leaderless.config.failures import FailureKind
from leaderless.data.prompts.images import PromptImage
from leaderless.environments.protocol import ONLY_AGENT, Message, Task, Turn

if TYPE_CHECKING:
    from leaderless.environments.chat_writer import ChatWriter
    from leaderless.environments.tools.calls import CallResult
    from leaderless.rollout.engine import SamplingParams


@dataclass
class Said:
    """Facts about a message that the policy sampled.

    Attributes:
        log_probs: Log-probability of each token under the distribution it was drawn from.
        policy_versions: Version of the weights that sampled each token.
        turn: Number of the message in the episode, over all agents.
        agent: Agent that said it.
        is_truncated: Whether it was cut off at its longest allowed length.
        reward: Reward of what was said.
        temperature: Temperature at which it was sampled.
        is_repeated: Whether it was sampled earlier, on perhaps another rank, and only said again.
        experts: Experts of each token of the message and all before it but the last, if they were recorded; see
            `Completion`. They are in no journal.
        support: Tokens that could be drawn in place of each token, if they were recorded; see `Completion`. They are in
            no journal.
    """

    log_probs: Sequence[float]
    policy_versions: Sequence[int]
    turn: int
    agent: str = ONLY_AGENT
    is_truncated: bool = False
    reward: float = 0.0
    temperature: float = 1.0
    is_repeated: bool = False
    experts: Sequence[bytes] = ()
    support: Sequence[bytes] = ()


@dataclass(eq=False)
class TraceNode:
    """Messages that follow others.

    Attributes:
        parent: Node that it follows; None at the beginning of a conversation.
        tokens: Token ids that it adds, with those that the chat template puts between messages.
        messages: The messages, for people and for the template.
        said: Facts of a message that the policy sampled; None if all is from others.
        images: Images of the messages, with their places among these tokens.
    """

    parent: TraceNode | None
    tokens: Sequence[int]
    messages: Sequence[Message]
    said: Said | None = None
    images: Sequence[PromptImage] = ()

    def path(self) -> list[TraceNode]:
        """The nodes from the beginning of the conversation to this one."""
        nodes: list[TraceNode] = []
        node: TraceNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def context(self) -> list[int]:
        """All tokens up to the end of this node."""
        return [token for node in self.path() for token in node.tokens]

    def seen(self) -> tuple[PromptImage, ...]:
        """All images up to the end of this node, with their places in the context."""
        path = self.path()
        begins = accumulate((len(node.tokens) for node in path), initial=0)
        return tuple(image.moved(begin) for node, begin in zip(path, begins, strict=False) for image in node.images)


@dataclass(frozen=True)
class TraceSample:
    """A branch of a trace as a training sequence.

    Attributes:
        agent: Agent whose messages are trained.
        tokens: All token ids, from the beginning to the last trained one.
        is_trained: Mask over the tokens: those that the agent sampled, and that no earlier sample trains.
        log_probs: Log-probability of each trained token.
        policy_versions: Version of the weights of each trained token.
        turns: Number of the turn of each trained token.
        rewards: Reward at each trained token: the reward of a turn at its last one, else 0.
        temperatures: Temperature at which each trained token was sampled.
        is_truncated: Whether the last trained message was cut off.
        experts: Experts of each token but the last, as far as they are known, from the pass that read it first.
        images: Images with their places among all tokens.
        support: Tokens that could be drawn in place of each trained token, if they were recorded.
    """

    agent: str
    tokens: list[int]
    is_trained: list[bool]
    log_probs: list[float]
    policy_versions: list[int]
    turns: list[int]
    rewards: list[float]
    temperatures: list[float]
    is_truncated: bool
    experts: Sequence[bytes] = ()
    images: Sequence[PromptImage] = ()
    support: Sequence[bytes] = ()

    @property
    def head_length(self) -> int:
        """Number of tokens before the first trained one."""
        return self.is_trained.index(True)


@dataclass
class Trace:
    """The messages of an episode.

    Attributes:
        nodes: All nodes, in the order in which they were added.
    """

    nodes: list[TraceNode] = field(default_factory=list)

    def add(
        self,
        parent: TraceNode | None,
        tokens: Sequence[int],
        messages: Sequence[Message],
        said: Said | None = None,
        images: Sequence[PromptImage] = (),
    ) -> TraceNode:
        """Add a node behind another, or at the beginning of a conversation."""
        node = TraceNode(parent, tokens, messages, said, images)
        self.nodes.append(node)
        return node

    def said(self) -> list[TraceNode]:
        """Messages of the policy, in the order of the turns."""
        return sorted((node for node in self.nodes if node.said), key=lambda node: node.said.turn if node.said else 0)

    def leaves(self) -> list[TraceNode]:
        """The ends of all branches, in the order in which they were added."""
        inner = {id(node.parent) for node in self.nodes}
        return [node for node in self.nodes if id(node) not in inner]

    def samples(self) -> list[TraceSample]:
        """Each branch as a training sequence, in the order of their last turns.

        What branches share is trained in the one that ended first. A conversation in which several agents speak gives a
        sample for each of them.
        """
        trained, samples = set[int](), list[TraceSample]()
        for leaf in self.leaves():
            path = leaf.path()
            fresh = [node for node in path if node.said and node.tokens and id(node) not in trained]
            trained.update(map(id, fresh))
            for agent in dict.fromkeys(node.said.agent for node in fresh if node.said):
                chosen = [node for node in fresh if node.said and node.said.agent == agent]
                samples.append(_sample(path[: path.index(chosen[-1]) + 1], chosen, agent))
        return sorted(samples, key=lambda sample: sample.turns[-1])


def _sample(path: Sequence[TraceNode], chosen: Sequence[TraceNode], agent: str) -> TraceSample:
    """A training sequence of the nodes of a path, some of which are trained."""
    trained = {id(node) for node in chosen}
    facts = [(node, node.said) for node in chosen if node.said]
    experts: list[bytes] = []  # as far as the agent's messages in the path know them
    for said in (node.said for node in path if node.said and node.said.agent == agent):
        experts += said.experts[len(experts) :]
    return TraceSample(
        agent=agent,
        tokens=[token for node in path for token in node.tokens],
        is_trained=[id(node) in trained for node in path for _ in node.tokens],
        log_probs=[value for _, said in facts for value in said.log_probs],
        policy_versions=[version for _, said in facts for version in said.policy_versions],
        turns=[said.turn for node, said in facts for _ in node.tokens],
        rewards=[
            said.reward if place == len(node.tokens) - 1 else 0.0
            for node, said in facts
            for place in range(len(node.tokens))
        ],
        temperatures=[said.temperature for node, said in facts for _ in node.tokens],
        is_truncated=facts[-1][1].is_truncated,
        experts=experts,
        images=path[-1].seen(),
        support=[one for _, said in facts for one in said.support],
    )


@dataclass(frozen=True)
class RecordedAnswer:
    """Answer of an environment, with which an episode can be played again without it.

    Attributes:
        turn: The answer; one to the beginning of an episode has only an observation.
        seconds: Seconds that it took.
    """

    turn: Turn
    seconds: float


@dataclass(frozen=True)
class Spoken:
    """Messages of an episode that is continued.

    Attributes:
        context: Token ids that it followed on.
        tokens: Its own token ids.
        said: Facts about it; its reward is found again.
    """

    context: Sequence[int]
    tokens: Sequence[int]
    said: Said


@dataclass(frozen=True)
class EpisodePosition:
    """An episode to play.

    Attributes:
        number: Unique number; with the seed it decides what is sampled.
        seed: Seed of the environment's random numbers.
        task: Row of the dataset.
        writer: Writer of its messages.
        params: Distribution from which the policy samples, and the limits of one message.
        agents: Agents that the policy plays; the episode ends when another one is to act. None if it plays all.
        history: Messages of other agents so far, in the order of the turns.
    """

    number: int
    seed: str
    task: Task
    writer: ChatWriter
    params: SamplingParams
    agents: frozenset[str] | None = None
    history: Sequence[Spoken] = ()


class FailureNote(NamedTuple):
    """A failure that an episode has met, whether it ended it or not.

    Attributes:
        kind: Kind of the failure.
        error: Description of what has happened, for people.
        attempt: Number of the attempt in which it happened, from 0 on.
    """

    kind: FailureKind
    error: str
    attempt: int = 0


@dataclass
class Episode:
    """Episode that was played.

    Attributes:
        trace: Everything that was said.
        agents: Names of the environment's agents.
        cause: Kind of the failure that has ended it; empty if it did not fail.
        error: Reason why it failed, for people.
        is_cut: Whether it ended at a limit.
        is_led: Whether a program led it.
        attempts: Number of times that it was tried.
        seconds: Seconds in the model, in the environment and in tools, by these names.
        calls: Results of all calls of tools.
        info: Facts that the environment has noted.
        place: Place that was to be played; None if it was not played here.
        answers: Answers of the environment.
        failures: All failures that it has met, in order, also those that were overcome.
    """

    trace: Trace = field(default_factory=Trace)
    agents: tuple[str, ...] = ()
    cause: FailureKind | Literal[""] = ""
    error: str = ""
    is_cut: bool = False
    is_led: bool = False
    attempts: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "environment": 0.0, "tools": 0.0})
    calls: list[CallResult] = field(default_factory=list)
    info: dict[str, Json] = field(default_factory=dict)
    place: EpisodePosition | None = None
    answers: list[RecordedAnswer] = field(default_factory=list)
    failures: list[FailureNote] = field(default_factory=list)

    def fail(self, kind: FailureKind, error: str) -> None:
        """End it by a failure."""
        self.cause, self.error = kind, error
        self.note(kind, error)

    def note(self, kind: FailureKind, error: str) -> None:
        """Note a failure that does not end it."""
        self.failures.append(FailureNote(kind, error, self.attempts - 1))
