"""The journals of ranks that generate continuously, and the episodes of a run that is followed.

All that happens is a step of the engine, or happens between two steps. A line says what happened before which step
while a rank worked on the share of an iteration; so it can be done again, with the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.episode import Episode, EpisodePosition, TraceNode
from leaderless.environments.journal import episode_of
from leaderless.environments.tools.sources import ToolSources
from leaderless.observability.episode_files import Kind, What, episode_files, read_episode_file
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, read_lines
from leaderless.rollout.engine import Completion
from leaderless.stages.episode_samples import sampled_in
from leaderless.worker.asynchronous.episodes import EpisodeEnd, EpisodeGroup, Happening
from leaderless.worker.asynchronous.in_flight import EngineRequests, EventKind, PendingRequest


class JournalLine(TypedDict):
    """Entry of the journal about a share.

    Attributes:
        iteration: Iteration of the share.
        start: Number of earlier starts of the run.
        trained: Iteration whose weights the engine had when work on the share began.
        steps: Steps that the engine had taken since the start when the share was complete.
        events: Events meanwhile, each with the steps of the engine before it, its kind and its subject; see `Events`.
        groups: Groups of the share, ascending.
        canceled: Groups that were canceled, and begun again later.
    """

    iteration: int
    start: int
    trained: int
    steps: int
    events: list[list[int | str]]
    groups: list[int]
    canceled: list[int]


def journal_file(folder: Path, loop: str, shard: int) -> Path:
    """The journal of a rank that generates continuously, in the folder of a run's journals."""
    return folder / f"{loop}-shard-{shard:05d}.jsonl"


def cut_journals(directory: RunDirectory, loop: str, shard: int, num_shards: int, made: int) -> None:
    """Drop what is made again from the journals of a shard, and of those that there are no more, which ranks share."""
    for place in count(shard, num_shards):
        file = journal_file(directory.journal, loop, place)
        if not file.exists() and place > shard:
            return
        LineFile(file, "iteration", directory.may_fail).cut_after(made)


def read_journal(folder: Path, loop: str, shard: int, num_shards: int, first: int) -> Iterator[JournalLine]:
    """The lines of the journal of a rank from an iteration on, from a run that is followed.

    Raises:
        RecipeError: There are none, or they are of another number of ranks.
    """
    if not _has_line(journal_file(folder, loop, shard), first) or _has_line(
        journal_file(folder, loop, num_shards), first
    ):
        known = sum(_has_line(file, first) for file in folder.glob(f"{loop}-shard-*.jsonl"))
        found = f"{known} ranks have generated '{loop}' continuously" if known else "there is no journal of such ranks"
        raise RecipeError.at(
            "run.follow",
            f"in {folder} {found} from iteration {first} on, but here {num_shards} do: follow it on as many ranks",
        )
    for line in read_lines(journal_file(folder, loop, shard), "iteration"):
        if int(str(line["iteration"])) >= first:
            yield cast("JournalLine", line)


def _has_line(journal: Path, iteration: int) -> bool:
    lines = read_lines(journal, "iteration") if journal.exists() else ()
    return any(line["iteration"] == iteration for line in lines)


Asked = Mapping[str, Json]
"""A line about something that an episode wanted: the kind with what it is about, and further facts."""


class PastEpisodes:
    """The episodes of a rank in a run that is followed, by iteration.

    Args:
        folder: Folder `episodes` of the run.
        rank: The rank, which was the same there.
        kind: Whether they are of training or of evaluations; then an iteration is that whose weights were evaluated.
        first: Iteration from which the run is followed.
    """

    def __init__(self, folder: Path, rank: int, kind: Kind = "step", first: int = 1) -> None:
        self._folder, self.first = folder, first
        self._files = {
            (file.step, file.what): file.path
            for file in episode_files(folder)
            if file.kind == kind and file.rank == rank
        }

    def asked(self, iteration: int) -> Iterator[Asked]:
        """Requests of episodes until the share of an iteration was complete, in order.

        Raises:
            RecipeError: It is not known any more.
        """
        yield from read_episode_file(self._file(iteration, "asked"))

    def episodes(self, iteration: int) -> Mapping[int, Episode]:
        """The episodes of the share of an iteration, by their numbers; see `asked`."""
        return {
            int(str(line["id"])): replace(one, is_led=not one.answers)
            for line in read_episode_file(self._file(iteration, "played"))
            for one in [episode_of(line)]
        }

    def _file(self, iteration: int, what: What) -> Path:
        path = self._files.get((iteration, what))
        if path is None:
            raise RecipeError.at(
                "run.follow",
                f"needs all episodes of the run that is followed, but {self._folder} has none of iteration "
                f"{iteration} of this rank: let that run keep as many as it has steps, with run.kept_episodes",
            )
        return path


class JournaledEpisodes:
    """Episodes of a run that is followed, which want at each step what they wanted there."""

    tools: ToolSources | None = None

    def __init__(self, requests: EngineRequests, past: PastEpisodes, tokenizer: Tokenizer, seed: int) -> None:
        self._requests, self._past, self.tokenizer, self._seed = requests, past, tokenizer, seed
        self._groups: dict[int, EpisodeGroup] = {}
        self._said: Counter[int] = Counter()  # what the engine has said, and is in no share yet
        self._iteration = past.first
        self._asked = past.asked(past.first)

    def begin(self, group: EpisodeGroup) -> None:
        """Begin the episodes of a group."""
        self._groups[group.number] = group

    def happened(self) -> Iterator[Happening]:
        """Requests of episodes at this step of the engine; weights and canceled groups are no concern of theirs."""
        while (due := self._requests.events.due()) is not None and due[0] not in {"weights", "cancel"}:
            kind, about = cast("EventKind", due[0]), due[1]
            if kind == "forget":
                yield Happening(kind, about)
            elif kind == "drop":
                yield Happening(kind, about, self._requests.oldest(about))
            else:
                facts = self._facts(kind, about)
                yield Happening(kind, about, self._ended(facts) if kind == "end" else self._request(about, facts))

    def _facts(self, kind: EventKind, about: int) -> Asked:
        facts = next(self._asked, None)
        if facts is None or facts.get(kind) != about:
            found = "nothing" if facts is None else next(iter(facts.items()))
            raise RuntimeError(
                f"iteration {self._iteration} of the run that is followed had '{kind} {about}' in its folder "
                f"journal, but {found} in its folder episodes: one of them is damaged"
            )
        return facts

    def _ended(self, facts: Asked) -> EpisodeEnd:
        numbers = cast("Mapping[str, int]", facts)
        return EpisodeEnd(self._groups[numbers["group"]], numbers["responses"], numbers["tokens"])

    def _request(self, sample_id: int, facts: Asked) -> PendingRequest:
        def said(completion: Completion) -> None:
            self._said[_mark(pending.request.prompt, completion)] += 1

        pending = self._requests.noted(sample_id, facts, self._seed, said)
        return pending

    def wait(self) -> None:
        """Refuse to wait.

        Raises:
            RuntimeError: Always, as a journal says at once what happens.
        """
        raise RuntimeError(
            f"after {self._requests.events.steps} steps of the engine, episodes wait for something that the run that "
            "is followed did not wait for: it must have the same recipe, engine and number of threads"
        )

    def cancel(self, group: EpisodeGroup) -> None:
        """Forget a group; that its episodes drop what they have asked for is in the journal."""
        del self._groups[group.number]

    def take(self, groups: Sequence[EpisodeGroup]) -> list[Episode]:
        """Hand over the episodes of a share.

        Raises:
            RuntimeError: The policy has not said the same in one of them.
        """
        known, found = self._past.episodes(self._iteration), list[Episode]()
        for place in (place for group in groups for place in group.places):
            episode = known.get(place.number)
            if episode is None:
                raise self._unlike(place, "is not among those of the run that is followed")
            for node in sampled_in(episode):
                mark = _mark_of_node(node)
                if not self._said[mark]:
                    raise self._unlike(place, "does not go as in the run that is followed")
                self._said[mark] -= 1
            for node in episode.trace.nodes:
                node.images = place.writer.images(node.messages, node.tokens)
            found.append(replace(episode, place=place))
        for group in groups:
            del self._groups[group.number]
        self._said = +self._said
        self._iteration += 1
        self._asked = self._past.asked(self._iteration)
        return found

    def reset(self) -> None:
        """Forget all episodes."""
        self._groups.clear()
        self._said.clear()

    def close(self) -> None:
        """Release nothing."""

    def _unlike(self, place: EpisodePosition, what: str) -> RuntimeError:
        return RuntimeError(
            f"iteration {self._iteration}: episode {place.number} {what}: it must have the same recipe, engine and "
            "number of threads"
        )


def _mark_of_node(node: TraceNode) -> int:
    assert node.said is not None, "only what the policy has said is asked about"
    said = Completion([*node.tokens], [*node.said.log_probs], None, [*node.said.policy_versions])
    return _mark([] if node.parent is None else node.parent.context(), said)


def _mark(prompt: Sequence[int], said: Completion) -> int:
    """A number that stands for a response with all that is trained of it, and what it follows on."""
    log_probs = np.asarray(said.log_probs, np.float32).tobytes()
    return hash((tuple(prompt), tuple(said.tokens), tuple(said.policy_versions), log_probs))
