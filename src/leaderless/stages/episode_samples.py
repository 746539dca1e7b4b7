"""Episodes that were played: as samples, as lines of the journal, and as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.failures import PLAYED_KINDS, FailureKind
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import SIBLING_BITS, Batch, Column, Jagged, make_sample_ids
from leaderless.data.dataset import image_column
from leaderless.data.prompts.images import PromptImage, num_alike
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode, TraceNode, TraceSample
from leaderless.environments.journal import line_of, text_of
from leaderless.environments.tools.sources import ToolSources
from leaderless.models.routers import UNKNOWN
from leaderless.observability.metrics import Metrics
from leaderless.planner.workflow.columns import EXPERTS, IMAGES, LATER_IMAGES
from leaderless.stages.rollout import support_columns


@dataclass(frozen=True)
class Play:
    """Episodes to play for each task.

    Attributes:
        distributions: Distribution from which the policy samples in each of them.
        first: Sibling number of the first episode of a task.
        stride: Number of siblings after which the siblings of the episodes' further samples begin.
        seed: Seed of all noise.
    """

    distributions: Sequence[SamplingConfig]
    first: int
    stride: int
    seed: int


class EpisodeIndex(NamedTuple):
    """Where an episode belongs: a task, a place among its episodes, and the sibling number of its first sample."""

    task: int
    place: int
    begin: int


class Work(Protocol):
    """Work of an engine; see `SharedEngineScheduler`."""

    @property
    def busy_s(self) -> float:
        """Seconds that it has worked."""

    @property
    def known_tokens(self) -> int:
        """Tokens that it had read or sampled before."""

    @property
    def cached_tokens(self) -> int:
        """Those of them that it still had."""

    @property
    def num_drafted(self) -> int:
        """Tokens that it has drafted, of responses that have ended."""

    @property
    def num_accepted(self) -> int:
        """Those of them that the model has accepted."""


@dataclass(frozen=True)
class Played:
    """Episodes of some tasks; episodes of a task are next to each other.

    Attributes:
        play: Episodes that were to be played.
        tasks: The tasks.
        episodes: The episodes.
        seats: Place that each episode belongs to.
        pump: The engine's work.
        end_token: Token with which the prompt of a task begins if none of its episodes succeeded.
        writers: Writer of the messages of each task's episodes.
        tools: Tools that the policy may call; None for none.
    """

    play: Play
    tasks: Batch
    episodes: Sequence[Episode]
    seats: Sequence[EpisodeIndex]
    pump: Work
    end_token: int
    writers: Sequence[ChatWriter]
    tools: ToolSources | None

    @cached_property
    def _rows(self) -> Sequence[_Row]:
        played = zip(self.episodes, self.seats, strict=True)
        rows = [row for episode, seat in played for row in _rows_of(episode, seat, self.play.stride)]
        return sorted(rows, key=lambda row: (int(self.tasks.ids[row.task]), row.sibling))

    @cached_property
    def _prompts(self) -> Sequence[tuple[Sequence[int], Sequence[PromptImage]]]:
        """Common beginning of all conversations of each task, and the images in it."""
        samples: list[list[TraceSample]] = [[] for _ in range(len(self.tasks))]
        for row in self._rows:
            if row.sample is not None:
                samples[row.task].append(row.sample)
        return [_beginning(some) if some else ([self.end_token], ()) for some in samples]

    def samples(self) -> Batch:
        """The episodes as samples of the tasks, whose prompts are what all conversations of a task begin with."""
        prompts = self._prompts
        task = torch.tensor([row.task for row in self._rows], dtype=torch.int64)
        lists = [tokens for tokens, _ in prompts]
        table = self.tasks.with_columns(prompt_tokens=Jagged.from_lists(lists, torch.int64, "prompt_tokens"))
        siblings = torch.tensor([row.sibling for row in self._rows], dtype=torch.int64)
        ids = make_sample_ids(self.tasks.ids[task], siblings)
        lengths = [len(lists[row.task]) for row in self._rows]
        samples = Batch(ids, {**self._token_columns(lengths), **self._episode_columns(task)}, table, task)
        if all(writer.reader is None for writer in self.writers):
            return samples
        table = table.with_columns(images=image_column([images for _, images in prompts], IMAGES))
        later = [
            [image for image in (row.sample or NOTHING).images if image.place >= length]
            for row, length in zip(self._rows, lengths, strict=True)
        ]
        columns = {**samples.columns, LATER_IMAGES: image_column(later, LATER_IMAGES)}
        return Batch(ids, columns, table, task)

    def experts(self) -> Jagged:
        """The experts of each sample, as far as they are known; samples of a task share their prompt's experts."""
        shared: dict[int, Sequence[bytes]] = {}
        rows: list[bytes] = []
        for row in self._rows:
            sample = row.sample or NOTHING
            known = list(sample.experts)
            if known:
                first = shared.setdefault(row.task, known[: len(self._prompts[row.task][0])])
                known[: len(first)] = first
                known += [bytes([UNKNOWN]) * len(known[0])] * (len(sample.tokens) - 1 - len(known))
            rows.append(b"".join(known))
        values = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.empty(0).byte()
        return Jagged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64), EXPERTS)

    def support(self) -> dict[str, Column]:
        """The tokens that could be drawn in place of the sampled ones; see `support_columns`."""
        samples = [row.sample or NOTHING for row in self._rows]
        lengths = torch.tensor([len(sample.log_probs) for sample in samples], dtype=torch.int64)
        return support_columns([sample.support for sample in samples], lengths)

    def _token_columns(self, prompt_lengths: Sequence[int]) -> dict[str, Column]:
        samples = [row.sample or NOTHING for row in self._rows]
        pairs = list(zip(samples, prompt_lengths, strict=True))

        def trained(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Jagged:
            return Jagged.from_lists(values, dtype, "response_tokens")

        return {
            "tokens": Jagged.from_lists([s.tokens[length:] for s, length in pairs], torch.int64, "tokens"),
            "response_mask": Jagged.from_lists([s.is_trained[length:] for s, length in pairs], torch.bool, "tokens"),
            "response_lengths": torch.tensor([len(s.log_probs) for s in samples], dtype=torch.int64),
            "policy_versions": trained([s.policy_versions for s in samples], torch.int32),
            "temperatures": trained([s.temperatures for s in samples], torch.float32),
            "rollout_log_probs": trained([s.log_probs for s in samples], torch.float32),
            "turns": trained([s.turns for s in samples], torch.int32),
            "turn_rewards": trained([s.rewards for s in samples], torch.float32),
        }

    def _episode_columns(self, task: torch.Tensor) -> dict[str, Column]:
        def ids(siblings: Sequence[int]) -> torch.Tensor:
            return make_sample_ids(self.tasks.ids[task], torch.tensor(siblings, dtype=torch.int64))

        rows, distributions = self._rows, self.play.distributions
        columns: dict[str, Column] = {
            "truncated": torch.tensor([row.is_cut for row in rows], dtype=torch.bool),
            "episode_ids": ids([row.credit for row in rows]),
            "joint_ids": ids([row.play for row in rows]),
            "actor": torch.tensor([row.actor for row in rows], dtype=torch.int64),
            "environment_rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
            "environment_failed": tuple(row.failure for row in rows),
        }
        if any(distribution.temperature == 0 for distribution in distributions):
            is_greedy = [distributions[row.place].temperature == 0 for row in rows]
            columns["is_greedy"] = torch.tensor(is_greedy, dtype=torch.bool)
        return columns

    @cached_property
    def drifts(self) -> Sequence[bool | None]:
        """Whether each episode that has not failed has drifted; None for failed ones and where it is unknown."""
        played = zip(self.episodes, self.seats, strict=True)
        return [None if episode.cause else has_drifted(episode, self.writers[seat.task]) for episode, seat in played]

    def waits(self) -> list[float]:
        """Seconds for which the episode of each sample has waited for its environment and its tools."""
        played = zip(self.episodes, self.seats, strict=True)
        waited = {
            (seat.task, seat.place): episode.seconds["environment"] + episode.seconds["tools"]
            for episode, seat in played
        }
        return [round(waited[row.task, row.place], 4) for row in self._rows]

    def journal(self) -> Iterator[str]:
        """The episodes that were played here, as lines of the journal."""
        for episode, drift in zip(self.episodes, self.drifts, strict=True):
            if episode.place is not None:
                number = episode.place.number
                facts: dict[str, Json] = {"group_id": number >> SIBLING_BITS, "stride": self.play.stride}
                yield text_of(line_of(episode) | facts | {"has_drifted": drift})

    def first_failures(self) -> dict[FailureKind, str]:
        """The first error of each kind of failure that an episode has met, overcome or not."""
        found: dict[FailureKind, str] = {}
        for one in (note for episode in self.episodes for note in episode.failures):
            found.setdefault(one.kind, one.error)
        return found

    def first_error(self) -> str | None:
        """Why the first failed episode has failed; None if none has."""
        return next((episode.error for episode in self.episodes if episode.cause), None)

    def report(self, metrics: Metrics, num_engines: int, seconds: float) -> None:
        """Report what was played.

        Args:
            metrics: Collector.
            num_engines: Number of engines that have played.
            seconds: Seconds that this one took.
        """
        num_tokens = sum(len(node.tokens) for episode in self.episodes for node in sampled_in(episode))
        metrics.mean("rollout/tokens_per_s", num_engines * num_tokens, seconds)
        metrics.mean("rollout/engine_busy", self.pump.busy_s, seconds)
        metrics.mean("rollout/prefix_hits", self.pump.cached_tokens, self.pump.known_tokens)
        metrics.mean("rollout/drafts_accepted", self.pump.num_accepted, self.pump.num_drafted)
        # A greedy episode is only a baseline, and in no metric of what the policy samples.
        is_sampled = [self.play.distributions[seat.place].temperature > 0 for seat in self.seats]
        sampled = [episode for episode, is_own in zip(self.episodes, is_sampled, strict=True) if is_own]
        drifts = [drift for drift, is_own in zip(self.drifts, is_sampled, strict=True) if is_own]
        whole = [episode for episode in sampled if not episode.cause]
        said = [node for episode in whole for node in sampled_in(episode)]
        cut = sum(node.said.is_truncated for node in said if node.said)
        metrics.mean("rollout/response_tokens", sum(len(node.tokens) for node in said), len(said))
        metrics.mean("rollout/truncated", cut, len(said))
        metrics.total("episode/failed", len(sampled) - len(whole))
        for kind in PLAYED_KINDS:
            metrics.mean(f"failure/{kind}", sum(_has_met(episode, kind) for episode in sampled), len(sampled))
        metrics.total("episode/repeated", sum(episode.attempts - 1 for episode in sampled))
        numbers: dict[str, Sequence[float]] = {
            "turns": [len(episode.trace.said()) for episode in whole],
            "tokens": [sum(len(node.tokens) for node in episode.trace.nodes) for episode in whole],
            "told_tokens": [
                sum(len(node.tokens) for node in episode.trace.nodes if not node.said) for episode in whole
            ],
            "samples": [len(episode.trace.samples()) for episode in whole],
            "cut": [episode.is_cut for episode in whole],
            "drift": [drift for drift in drifts if drift is not None],
            "model_s": [episode.seconds["model"] for episode in whole],
            "environment_s": [episode.seconds["environment"] for episode in whole],
        }
        for name, values in numbers.items():
            metrics.mean(f"episode/{name}", sum(values), len(values))
        if self.tools is not None:
            _report_calls(metrics, whole, [tool.name for tool in self.tools.tools])


def _has_met(episode: Episode, kind: FailureKind) -> bool:
    """Whether an episode has met a failure of a kind; one that another role has begun, only that which ended it."""
    return episode.cause == kind or any(one.kind == kind for one in episode.failures)


def _report_calls(metrics: Metrics, episodes: Sequence[Episode], names: Sequence[str]) -> None:
    """Report how episodes have used tools."""
    calls = [call for episode in episodes for call in episode.calls]
    metrics.mean("episode/tools_s", sum(episode.seconds["tools"] for episode in episodes), len(episodes))
    metrics.mean("tool/calls", len(calls), len(episodes))
    metrics.mean("tool/misread", sum(call.refusal in {"malformed", "unknown_tool"} for call in calls), len(calls))
    for name in names:
        own = [call for call in calls if call.name == name and call.refusal != "malformed"]
        refused = sum(call.refusal not in {None, "failed"} for call in own)
        shown = name.replace("/", ".")  # as servers may name them
        metrics.mean(f"tool/calls/{shown}", len(own), len(episodes))
        metrics.mean(f"tool/refused/{shown}", refused, len(own))


NOTHING = TraceSample("", [], [], [], [], [], [], [], is_truncated=False)
"""Empty sample of a failed episode."""


@dataclass(frozen=True)
class _Row:
    """A sample of an episode; of a failed one an empty one.

    Attributes:
        sibling: Number of the sample within its task.
        task: Place of the task in the batch.
        place: Place of the episode within its task.
        credit: Sibling number of the first sample of its episode and agent: the unit of credit.
        play: Sibling number of the first sample of the episode, which its agents share.
        actor: Place of the agent among the environment's agents.
        sample: Tokens; None if the episode has failed.
        reward: Sum of the agent's rewards in the episode.
        is_cut: Whether the episode or the sample ended at a limit.
        failure: Reason why the episode has failed; None if it has not.
    """

    sibling: int
    task: int
    place: int
    credit: int
    play: int
    actor: int
    sample: TraceSample | None
    reward: float
    is_cut: bool
    failure: Json


def sampled_in(episode: Episode) -> list[TraceNode]:
    """Sampled messages of an episode, without what others had said before."""
    return [node for node in episode.trace.said() if node.said and not node.said.is_repeated]


def _rows_of(episode: Episode, seat: EpisodeIndex, stride: int) -> list[_Row]:
    """The samples of an episode, agent after agent; of a failed one an empty sample."""
    task, place, begin = seat
    if episode.cause:
        failure: Json = {"cause": episode.cause, "error": episode.error}
        return [_Row(begin, task, place, begin, begin, 0, None, 0.0, episode.is_cut, failure)]
    samples = sorted(episode.trace.samples(), key=lambda sample: episode.agents.index(sample.agent))
    if begin + len(samples) * stride > 1 << SIBLING_BITS:
        error = (
            f"the episode has {len(samples)} conversations or branches, and ids have room for "
            f"{((1 << SIBLING_BITS) - begin) // stride}: lower environment.max_turns or batch.responses_per_prompt"
        )
        failure = {"cause": "environment", "error": error}
        return [_Row(begin, task, place, begin, begin, 0, None, 0.0, episode.is_cut, failure)]
    rewards = dict.fromkeys(episode.agents, 0.0)
    for node in episode.trace.said():
        if node.said:
            rewards[node.said.agent] += node.said.reward
    rows: list[_Row] = []
    credit: dict[str, int] = {}
    for number, sample in enumerate(samples):
        sibling = begin + number * stride
        rows.append(
            _Row(
                sibling=sibling,
                task=task,
                place=place,
                credit=credit.setdefault(sample.agent, sibling),
                play=begin,
                actor=episode.agents.index(sample.agent),
                sample=sample,
                reward=rewards[sample.agent],
                is_cut=episode.is_cut or sample.is_truncated,
                failure=None,
            )
        )
    return rows


def has_drifted(episode: Episode, writer: ChatWriter) -> bool | None:
    """Whether the model has seen other tokens than if a chat template had written some conversation anew each turn.

    That is no error: what was sampled counts. But the model was perhaps trained on conversations written anew. None for
    a program that has asked with plain texts or with tools of its own, which cannot be written anew here.
    """
    if not writer.is_chat:
        return False
    if episode.is_led and not all(_is_of(writer, node) for node in episode.trace.nodes if node.parent is None):
        return None
    for node in episode.trace.said():
        if node.parent is not None and node.parent.parent is not None:
            messages = [message for one in node.parent.path() for message in one.messages]
            try:
                anew = writer.fresh(messages, node.parent.seen())
            except RecipeError:  # some templates write one call in a message at most
                return True
            if anew != node.parent.context():
                return True
    return False


def _is_of(writer: ChatWriter, first: TraceNode) -> bool:
    """Whether a conversation begins as a writer would write it."""
    try:
        return writer.begin(first.messages)[1] == list(first.tokens)
    except RecipeError:
        return False


def _beginning(samples: Sequence[TraceSample]) -> tuple[list[int], Sequence[PromptImage]]:
    """Beginning of some samples before anything is trained, and the images in it."""
    first = samples[0].images
    tokens = common_beginning([sample.tokens[: sample.head_length] for sample in samples])
    length = min(num_alike(first, sample.images, len(tokens)) for sample in samples)
    return tokens[:length], [image for image in first if image.place < length]


def common_beginning(rows: Sequence[list[int]]) -> list[int]:
    """Common beginning of all sequences."""
    first, last = min(rows), max(rows)  # of sequences in order, the first and the last differ most
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]
