"""Held-out episodes on a rank that generates continuously, whose engine works on those of training meanwhile.

The steps that they take count for both, so they are noted as well, and done again where a run is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from leaderless.config import Json, Recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch
from leaderless.data.encode import Tokenizer
from leaderless.environments.episode import Episode
from leaderless.environments.journal import text_of
from leaderless.observability.clock import Clock
from leaderless.rollout.shared import SharedEngine
from leaderless.stages.continuous import Events
from leaderless.stages.continuous_episodes import EpisodeField
from leaderless.stages.continuous_followed import Asked, FollowedField, Past
from leaderless.stages.continuous_orders import EngineWork
from leaderless.stages.played import Play


@dataclass(frozen=True)
class HeldOut:
    """Held-out tasks of a rank, and the episodes to play.

    Attributes:
        recipe: The recipe, as seen by the role that samples.
        data: Dataset of the tasks.
        tokenizer: Tokenizer of the policy.
        play: Episodes of each task.
        tasks: The tasks.
    """

    recipe: Recipe
    data: DatasetConfig
    tokenizer: Tokenizer
    play: Play
    tasks: Batch

    def played(
        self,
        engine: SharedEngine,
        step: int,
        rank: int,
        progress: Callable[[float], None],
        journal: Callable[[Callable[[], Iterable[str]]], None] | None,
    ) -> tuple[list[Episode], EngineWork]:
        """Play the episodes, or do so again.

        Args:
            engine: Engine that is awake and has weights.
            step: Step of training whose weights these are.
            rank: This rank.
            progress: Function that gets the finished fraction.
            journal: Function that gets what has to be known to do it again; None outside of a run.
        """
        events, view = Events(), engine.view()
        follow = None if journal is None else self.recipe.run.follow
        common = self.recipe, self.play, self.tokenizer, None, events
        field: EpisodeField | FollowedField
        if follow is None:
            field = EpisodeField(view, *common, Clock(), self.data)
        else:
            past = Past(Path(self.recipe.run.directory) / follow / "episodes", rank, "evaluation", step)
            events.expected = _events_in(past.asked(step))
            field = FollowedField(view, *common, past, self.data)
        try:
            episodes = self._all(field, progress)
        finally:
            field.close()
        if journal is not None:
            journal(lambda: map(text_of, [*events.facts, {"events": cast("Json", events.happened)}]))
        return episodes, field.take_work()

    def _all(self, field: EpisodeField | FollowedField, progress: Callable[[float], None]) -> list[Episode]:
        num_done, groups = 0, self.tasks.ids.tolist()
        field.begin(self.tasks)
        while field.is_busy:
            num_done += sum(advance.is_finished for advance in field.step())
            progress(num_done / len(groups))
        return field.take(groups)


def _events_in(lines: Iterator[Asked]) -> Sequence[Sequence[int | str]]:
    """What happened between the steps of an evaluation."""
    (events,) = (line["events"] for line in lines if "events" in line)
    return cast("Sequence[Sequence[int | str]]", events)
