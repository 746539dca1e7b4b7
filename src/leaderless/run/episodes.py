"""The episodes of a run, from its journal, to replay or regrade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

from leaderless.base.values import Json
from leaderless.config import LoadedRecipe, Recipe, RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.source import Setting, apply_overrides, read_yaml, with_setting
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.episode import EpisodePosition
from leaderless.environments.journal import JournalDifference, Line, text_of
from leaderless.environments.registry import world_maker
from leaderless.environments.replay import replay
from leaderless.environments.tools.sources import close_tools
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.episode_files import (
    EpisodeFile,
    Kind,
    episode_files,
    read_episode_file,
    write_regraded,
)
from leaderless.planner.workflow import WorkflowRecipe, load_recipe
from leaderless.planner.workflow.builtin_stages import spec_of
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import Failures
from leaderless.rollout.engine import SamplingParams
from leaderless.stages.episode_rollout import reader_of, tools_of, writer_of
from leaderless.stages.reward import RegradedPart, grade_of, parts_of, regrade

Grade = Mapping[str, Json]
"""A line about the rewards of a part of an episode."""


class Comparison(NamedTuple):
    """A part of an episode, with what it was worth in the run, None if that is not known, and is worth now."""

    part: RegradedPart
    old: Grade | None
    new: Graded

    @property
    def before(self) -> float | None:
        """The reward in the run; None if it failed or is unknown."""
        return float(str(self.old["reward"])) if self.old is not None and self.old["is_valid"] else None

    @property
    def now(self) -> float | None:
        """The reward now; None if it failed."""
        return self.new.value if self.new.is_valid else None

    @property
    def is_changed(self) -> bool:
        """Whether it is worth something else now, or has failed only once; of what is known of the run."""
        return self.old is not None and self.before != self.now

    def line(self) -> str:
        """The new grade as a line of JSON, next to the one in the run."""
        before = None if self.old is None else {name: self.old[name] for name in ("reward", "is_valid")}
        return text_of(
            grade_of(self.part.number, self.part.actor, self.new) | {"before": before, "is_changed": self.is_changed}
        )


@dataclass(frozen=True)
class RunEpisodes:
    """The journal of a run, or one file of it."""

    loaded: WorkflowRecipe
    files: Sequence[EpisodeFile]

    @classmethod
    def of(cls, target: Path, overrides: Sequence[str] = ()) -> RunEpisodes:
        """The journal of a run's folder, or the file of a rank and step in it.

        Raises:
            RecipeError: There is no journal, or the run's recipe cannot be read or has no environment.
        """
        folder = target if target.is_dir() else target.parent.parent.parent
        files = episode_files(folder / "episodes")
        if not target.is_dir():
            places = {(*file[:2], file.rank) for file in files if file.path == target}
            files = [file for file in files if (*file[:2], file.rank) in places]
        if not files:
            raise RecipeError.at(
                "", f"{target} holds no episodes: name the folder of a run that has an environment, or one of its files"
            )
        loaded = load_recipe(folder / "config.yaml", list(overrides))
        problem = {
            "online": (
                "online",
                "means that clients led the episodes, which nobody can play again: read their lines in the files",
            ),
            "episodes": None,
        }.get(loaded.recipe.product, ("environment", "is missing: the episodes are from another recipe"))
        if problem is not None:
            raise loaded.locate(RecipeError.at(*problem))
        return cls(loaded, files)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.loaded.recipe

    @property
    def environment(self) -> EnvironmentConfig:
        """The run's environment."""
        assert self.recipe.environment is not None, "checked when it was opened"
        return self.recipe.environment

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that plays."""
        nodes = self.loaded.workflow.nodes
        role = next((node.role for node in nodes if "generate" in spec_of(node).roles.values() and node.role), "policy")
        config = self.recipe.model_of(role)
        if config is None:
            raise RecipeError.at("models", f"has no model for the role '{role}'")
        return load_tokenizer(config, role)

    def steps(self, kind: Kind) -> list[int]:
        """The steps with episodes."""
        return sorted({file.step for file in self.files if file.kind == kind})

    def played(self, kind: Kind, step: int) -> list[Line]:
        """The episodes of a step, by their numbers. If several nodes played an episode, its last line counts.

        Raises:
            ValueError: A file is damaged.
        """
        lines = {int(str(line["id"])): line for line in sorted(self._lines(kind, step, "played"), key=_progress)}
        return [lines[number] for number in sorted(lines)]

    def graded(self, kind: Kind, step: int) -> dict[tuple[int, int], Grade]:
        """The rewards of the parts of a step's episodes, by the numbers of episode and agent; errors as above."""
        lines = self._lines(kind, step, "graded")
        return {(int(str(line["id"])), int(str(line["actor"]))): line for line in lines}

    def replay(
        self, kind: Kind, lines: Sequence[Line], *, from_journal: bool
    ) -> Iterator[tuple[Line, JournalDifference | None]]:
        """Play episodes of some lines again, perhaps with the environment's answers from the journal."""
        recipe, config = self.recipe, self.environment
        open_world = None if from_journal else world_maker(config)
        tools = tools_of(recipe, self.tokenizer)
        reader = reader_of(recipe, self.tokenizer)
        writers = {id(one): writer_of(self.tokenizer, one, tools, reader) for one in recipe.data.train_sets().values()}
        held_out = recipe.data.evaluation
        held_out_writer = writer_of(self.tokenizer, held_out, tools, reader) if held_out is not None else None
        sampling = recipe.rollout if kind == "step" else recipe.evaluation
        params = SamplingParams(sampling, recipe.rollout.max_response_tokens, recipe.rollout.stop, recipe.seed)

        def place_of(line: Line) -> EpisodePosition:
            task = line["task"]
            assert isinstance(task, Mapping), "checked when the line was read"
            writer = held_out_writer if kind == "evaluation" else writers[id(recipe.data.train_set_of(task))]
            assert writer is not None, "who evaluates has a dataset to do so"
            return EpisodePosition(int(str(line["id"])), str(line["seed"]), task, writer, params)

        longest = recipe.data.max_prompt_tokens + config.max_episode_tokens
        try:
            yield from replay(lines, config, open_world, place_of, longest, tools)
        finally:
            close_tools()

    def regrade(self, steps: Sequence[int], rewards: Sequence[str] = ()) -> Iterator[tuple[int, list[Comparison]]]:
        """Grade episodes of training again, step by step, with the rewards as they are now.

        Rewards are another recipe whose `reward` section takes the place of the run's, or settings `reward.x=value`.

        Raises:
            RecipeError: The rewards cannot be read, or a judge is a model of the run.
        """
        recipe = with_rewards(self.loaded, rewards)
        if judge := next(iter(recipe.reward.roles()), None):
            raise RecipeError.at(
                f"reward.{judge}.role",
                "is a model of the run, which does not run now: name a judge at a `url`, or other rewards (--reward)",
            )
        failures = Failures(recipe.guards.hopeless_failures)
        with RewardPool(recipe.reward, recipe.run.reward_processes, failures=failures) as pool:
            for step in steps:
                parts, old = parts_of(self.played("step", step), recipe, self.tokenizer), self.graded("step", step)
                graded = regrade(parts, recipe, pool)
                known = [old.get((part.number, part.actor)) for part in parts]
                yield step, [Comparison(*one) for one in zip(parts, known, graded, strict=True)]

    def write_regraded(self, step: int, compared: Sequence[Comparison], *, has_all: bool) -> Path:
        """Write new grades next to the journal, of which nothing is overwritten; the file."""
        folder = next(file.path.parent for file in self.files if (file.kind, file.step) == ("step", step))
        is_complete = has_all and not any(one.new.is_broken for one in compared)
        return write_regraded(folder, (one.line() for one in compared), is_complete=is_complete)

    def _lines(self, kind: Kind, step: int, what: str) -> Iterator[dict[str, Json]]:
        for file in self.files:
            if (file.kind, file.step, file.what) == (kind, step, what):
                yield from read_episode_file(file.path)


def _progress(line: Line) -> tuple[bool, int]:
    """How far the episode of a line has come. A failed episode, which may have failed early, is never continued."""
    return bool(line["cause"]), len(cast("list[Json]", line["nodes"]))


def with_rewards(loaded: LoadedRecipe, rewards: Sequence[str]) -> Recipe:
    """A recipe with other rewards, as for `RunEpisodes.regrade`; a RecipeError if they cannot be read."""
    source = loaded.source
    for one in rewards:
        if "=" in one:
            source = apply_overrides(source, [one if one.startswith("reward.") else f"reward.{one}"])
        else:
            section: Setting = read_yaml(Path(one)).settings.get("reward", {})
            source = with_setting(source, ("reward",), section, one)
    return load_recipe(source).recipe
