"""Episodes of a run that is followed: the engine is asked the same again, and neither environment nor tools are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from leaderless.config import Json, Recipe, RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch
from leaderless.data.encode import Tokenizer
from leaderless.environments.episode import Episode, Place
from leaderless.environments.journal import episode_of
from leaderless.environments.trace import TraceNode
from leaderless.observability.episode_files import Kind, What, episode_files, read_episode_file
from leaderless.rollout.engine import Completion
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.continuous import Advance, Events, Tally
from leaderless.stages.continuous_orders import EngineWork, Orders
from leaderless.stages.play import places_of
from leaderless.stages.played import Play, sampled_in

Asked = Mapping[str, Json]
"""What is known of something that an episode wanted: the kind with what it is about, and further facts."""


class Past:
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
        """What episodes wanted of the engine until the share of an iteration was complete, in order.

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


@dataclass
class _Group:
    """The episodes of a task: what was to be played, and how many of them have not ended."""

    places: Sequence[Place]
    num_left: int
    num_tokens: int = field(default=0)


class FollowedField:
    """See `EpisodeField`. What episodes want comes from the journal, and so does what was played.

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
        past: Past,
        data: DatasetConfig | None = None,
    ) -> None:
        """Have nothing under way.

        Args:
            engine: View of an engine that is awake and has weights.
            recipe: The recipe, as seen by the role that samples.
            play: Episodes of each task.
            tokenizer: Tokenizer of the policy.
            role: Role that samples; None if it plays all agents.
            events: Record of events between the steps of the engine, and the events that must follow.
            past: Episodes of the run that is followed.
            data: Dataset of all tasks; None for those of training.
        """
        self._recipe, self._play, self._tokenizer, self._role = recipe, play, tokenizer, role
        self._events, self._past, self._data = events, past, data
        self._orders = Orders(engine, events, play.distributions)
        self._groups: dict[int, _Group] = {}
        self._begun: list[int] = []
        self._said: Counter[int] = Counter()  # what the engine has said, and is in no share yet
        self._iteration = past.first
        self._asked = past.asked(past.first)
        self.tally = Tally()

    @property
    def is_busy(self) -> bool:
        """Whether an episode is under way."""
        return any(group.num_left for group in self._groups.values())

    def begin(self, prompts: Batch) -> None:
        """Begin the episodes of some tasks."""
        places = places_of(self._play, prompts, self._recipe, self._tokenizer, None, self._role, self._data)
        siblings = len(self._play.distributions)
        for row, number in enumerate(prompts.ids.tolist()):
            self._groups[number] = _Group(places[row * siblings : (row + 1) * siblings], siblings)
            self._begun.append(number)

    def step(self) -> list[Advance]:
        """Do what episodes wanted at this step, and let the engine take it."""
        advances = [Advance(group, has_begun=True, is_finished=False) for group in self._begun]
        self._begun.clear()
        has_done = bool(advances)
        while (due := self._events.due()) is not None:
            kind, about = due
            if kind in {"weights", "cancel"}:
                return advances
            advances += self._do(kind, about)
            has_done = True
        if self._orders.is_busy:
            self._orders.step()
        elif not has_done:
            raise RuntimeError(
                f"after {self._events.steps} steps of the engine, episodes wait for something that the run that is "
                "followed did not wait for: it must have the same recipe, engine and number of threads"
            )
        return advances

    def _do(self, kind: str, about: int) -> Sequence[Advance]:
        """Do what an episode wanted."""
        if kind == "drop":
            self.tally.voided += self._orders.drop(self._orders.oldest(about))
        elif kind == "forget":
            self._orders.forget(about)
        else:
            facts = next(self._asked, None)
            if facts is None or facts.get(kind) != about:
                found = "nothing" if facts is None else next(iter(facts.items()))
                raise RuntimeError(
                    f"iteration {self._iteration} of the run that is followed had '{kind} {about}' in its folder "
                    f"journal, but {found} in its folder episodes: one of them is damaged"
                )
            if kind == "end":
                return self._end(about, facts)
            self._ask(about, facts)
        return ()

    def _ask(self, sample_id: int, facts: Asked) -> None:
        def said(completion: Completion) -> None:
            self._said[_mark(wish.request.prompt, completion)] += 1

        wish = self._orders.wish_of(sample_id, facts, self._play.seed, said)
        self._orders.ask(wish)

    def _end(self, number: int, facts: Asked) -> Sequence[Advance]:
        about = cast("Mapping[str, int]", {name: facts[name] for name in ("group", "responses", "tokens")})
        self._events.note("end", number, about)
        group = self._groups[about["group"]]
        group.num_left -= 1
        group.num_tokens += about["tokens"]
        self.tally.responses += about["responses"]
        self.tally.tokens += about["tokens"]
        return [Advance(about["group"], has_begun=False, is_finished=True)] if not group.num_left else ()

    def collect(self) -> list[Advance]:
        """See `EpisodeField`."""
        self._orders.collect()
        return []

    def give_up(self, number: int) -> None:
        """Forget all of a group; that its episodes drop what they have asked for is in the journal."""
        self.tally.voided += self._groups.pop(number).num_tokens

    def take(self, groups: Sequence[int]) -> list[Episode]:
        """Hand over the episodes of groups that are finished, group by group.

        Raises:
            RuntimeError: The policy has not said the same in one of them.
        """
        known, found = self._past.episodes(self._iteration), list[Episode]()
        for place in (place for group in groups for place in self._groups.pop(group).places):
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
        self._said = +self._said
        self._iteration += 1
        self._asked = self._past.asked(self._iteration)
        return found

    def take_work(self) -> EngineWork:
        """See `EpisodeField`."""
        work, self._orders.work = self._orders.work, EngineWork()
        return work

    def reset(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._begun.clear()
        self._said.clear()
        self._orders.reset()

    def close(self) -> None:
        """Let go of what is under way, which the engine forgets when it is closed."""

    def _unlike(self, place: Place, what: str) -> RuntimeError:
        return RuntimeError(
            f"iteration {self._iteration}: episode {place.number} {what}: it must have the same recipe, engine and "
            "number of threads"
        )


def _mark_of_node(node: TraceNode) -> int:
    """See `_mark`; of what was said in an episode."""
    assert node.said is not None, "only what the policy has said is asked about"
    said = Completion([*node.tokens], [*node.said.log_probs], None, [*node.said.policy_versions])
    return _mark([] if node.parent is None else node.parent.context(), said)


def _mark(prompt: Sequence[int], said: Completion) -> int:
    """A number that stands for a response with all that is trained of it, and what it follows on."""
    log_probs = np.asarray(said.log_probs, np.float32).tobytes()
    return hash((tuple(prompt), tuple(said.tokens), tuple(said.policy_versions), log_probs))
