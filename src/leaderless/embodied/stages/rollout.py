"""Episodes of bodies as samples: one row for each episode, in which the numbers of its decisions stand for tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.config.environment import BodyConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Column, Jagged, make_sample_ids
from leaderless.embodied.policies.observations import frame_bytes
from leaderless.embodied.policies.protocol import BodyPolicy
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyEpisode, BodyTask
from leaderless.embodied.stages.films import describe_episode
from leaderless.embodied.training.decision_units import DecisionUnits, grained
from leaderless.environments.protocol import Task
from leaderless.observability.clock import Clock
from leaderless.planner.workflow.columns import TAKEN_COLUMNS
from leaderless.rewards.pool import Graded
from leaderless.stages.context import ModelRole, StageContext
from leaderless.stages.recorded_samples import Record
from leaderless.stages.reward import with_environment, with_success
from leaderless.stages.rollout import distributions_of, first_sibling

SEED_STRIDE = 1 << 32
"""Distance of the seeds of tasks that follow from different seeds of a run."""


def play_bodies(batch: Batch, context: StageContext) -> Batch:
    """Play `batch.responses_per_prompt` episodes of each task, and one more greedily if the node wants that.

    Those of a task begin in the same state.
    """
    recipe, config = context.recipe, context.recipe.body
    assert config is not None
    distributions = distributions_of(recipe, has_greedy="is_greedy" in context.node.writes)
    first = first_sibling(context.node.node, recipe)
    siblings = torch.arange(first, first + len(distributions)).repeat(len(batch))
    ids = make_sample_ids(batch.ids.repeat_interleave(len(distributions)), siblings)
    tasks = body_tasks(batch, ids, distributions, recipe.seed)
    begin = time.perf_counter()
    with context.role.generating() as engine:
        assert isinstance(engine, BodyEngine)
        episodes = engine.play(
            tasks,
            seed=recipe.seed,
            temperature=recipe.rollout.temperature,
            progress=context.progress,
            clock=context.clock,
        )
        keeps = recipe.algorithm.sac is not None
        rows = BodyRows(engine.policy, config, recipe.rollout.temperature, engine.policy_version or 0, keeps)
    seconds = time.perf_counter() - begin
    _report(context, [one for one, task in zip(episodes, tasks, strict=True) if not task.is_greedy], seconds)
    number = context.agents.index(context.node.node.role or "")
    samples = rows.samples(batch, ids, episodes).with_columns(agent=torch.full((len(ids),), number))
    if any(task.is_greedy for task in tasks):
        samples = samples.with_columns(is_greedy=torch.tensor([task.is_greedy for task in tasks]))
    return samples


def body_tasks(batch: Batch, ids: Tensor, distributions: Sequence[SamplingConfig], seed: int) -> list[BodyTask]:
    """The episodes of tasks, one from each distribution; the numbers of their samples are `ids` [n]."""
    values = [row for row in batch.objects("rows") if isinstance(row, Mapping)]
    tasks: list[BodyTask] = []
    for place, number in enumerate(ids.tolist()):
        task, sibling = divmod(place, len(distributions))
        is_greedy = distributions[sibling].temperature == 0
        tasks.append(BodyTask(number, values[task], task_seed(values[task], int(batch.ids[task]), seed), is_greedy))
    return tasks


def task_seed(task: Task, group: int, seed: int) -> int:
    """Seed of a task's start: its own, where the row has a whole number as `seed`; else from its place in the run."""
    own = task.get("seed")
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    return int(np.random.SeedSequence([seed, group]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def graded_episode(episode: BodyEpisode) -> Graded:
    """Reward of an episode by its environment."""
    failure = None if episode.failure is None else {"cause": "environment", "error": episode.failure}
    return with_success(with_environment(None, sum(episode.rewards), failure), is_done=episode.is_success)


def _report(context: StageContext, episodes: Sequence[BodyEpisode], seconds: float) -> None:
    whole = [episode for episode in episodes if episode.failure is None]
    num_steps = sum(sum(episode.num_steps) for episode in whole)
    means = {
        "success": sum(episode.is_success for episode in whole),
        "steps": num_steps,
        "decisions": sum(len(episode.num_steps) for episode in whole),
        "truncated": sum(not episode.is_terminated for episode in whole),
    }
    for name, total in means.items():
        context.metrics.mean(f"body/{name}", total, len(whole))
    context.metrics.mean("body/failed", len(episodes) - len(whole), len(episodes))
    # Mean speed of a rank times their number.
    context.metrics.mean("body/steps_per_s", context.node.layout.dp * num_steps, seconds)
    error = next((episode.failure for episode in episodes if episode.failure is not None), None)
    if error is not None:
        context.run_directory.note_reward_error(context.step, context.process_group.rank, "environment", error)


@dataclass(frozen=True)
class BodyRows:
    """Makes rows of episodes.

    Attributes:
        policy: Policy that decided.
        config: Settings of the body.
        temperature: Temperature at which it decided.
        policy_version: Version of its weights.
        keeps_taken: Whether rows say what was done in each decision; see `TAKEN_COLUMNS`.
    """

    policy: BodyPolicy
    config: BodyConfig
    temperature: float
    policy_version: int
    keeps_taken: bool = False

    def samples(self, tasks: Batch, ids: Tensor, episodes: Sequence[BodyEpisode]) -> Batch:
        """The episodes as samples of tasks, in the order of these, with as many for each."""
        siblings = len(ids) // max(1, len(tasks))
        task = torch.arange(len(tasks)).repeat_interleave(siblings)
        groups = [episodes[first : first + siblings] for first in range(0, len(episodes), max(1, siblings))]
        # An episode that failed before it began has no instruction; its siblings may have one.
        told = [next((one.instruction for one in group if one.instruction), "") for group in groups]
        prompts = [self.policy.instruction_ids(words) or [0] for words in told]
        table = tasks.with_columns(prompt_tokens=Jagged.from_lists(prompts, torch.int64, "prompt_tokens"))
        columns = {**self._decided(episodes), **self._seen(episodes), **_outcomes(episodes)}
        return Batch(ids, columns | (self._taken(episodes) if self.keeps_taken else {}), table, task)

    def _decided(self, episodes: Sequence[BodyEpisode]) -> dict[str, Column]:
        """Decisions, unit by unit; see `BodyConfig.log_prob`."""
        grain = self.config.log_prob
        units = DecisionUnits.of(grain, [episode.num_steps for episode in episodes], self.policy.score_dim)
        scores = [one for episode in episodes for one in episode.log_probs]
        log_probs = grained(torch.stack(scores), grain, units.decisions, units.places) if scores else torch.zeros(0)
        by_step = torch.tensor([reward for episode in episodes for reward in episode.rewards], dtype=torch.float32)
        num_steps = torch.tensor([len(episode.rewards) for episode in episodes], dtype=torch.int64)
        total = len(units.places)

        def of_units(values: Tensor) -> Jagged:
            return Jagged(values, units.lengths, "response_tokens")

        return {
            "tokens": Jagged(units.places, units.lengths, "tokens"),
            "response_mask": Jagged(torch.ones(total, dtype=torch.bool), units.lengths, "tokens"),
            "response_lengths": units.lengths,
            "policy_versions": of_units(torch.full((total,), self.policy_version, dtype=torch.int32)),
            "temperatures": of_units(torch.full((total,), self.temperature)),
            "rollout_log_probs": of_units(log_probs),
            "turns": of_units(units.turns.int()),
            "env_steps": of_units(units.steps.int()),
            "turn_rewards": of_units(units.rewards(by_step, num_steps)),
            "env_rewards": Jagged(by_step, num_steps, "steps"),
        }

    def _seen(self, episodes: Sequence[BodyEpisode]) -> dict[str, Column]:
        """Observations before each decision, and at the end."""
        spaces = self.policy.spaces
        seen = torch.tensor([len(episode.frames) for episode in episodes], dtype=torch.int64)
        decisions = torch.tensor([len(episode.choices) for episode in episodes], dtype=torch.int64)
        frames = [frame for episode in episodes for frame in episode.frames]
        states = [state for episode in episodes for state in episode.states]
        choices = [choice for episode in episodes for choice in episode.choices]
        pixels = np.stack(frames) if frames else np.zeros((0, frame_bytes(spaces)), dtype=np.uint8)
        values = np.stack(states) if states else np.zeros((0, spaces.state_size), dtype=np.float32)
        chosen = torch.stack(choices) if choices else torch.zeros(0, self.policy.choice_size)
        return {
            "frames": Jagged(torch.from_numpy(pixels), seen, "observations"),
            "states": Jagged(torch.from_numpy(values), seen, "observations"),
            "choices": Jagged(chosen, decisions, "decisions"),
        }

    def _taken(self, episodes: Sequence[BodyEpisode]) -> dict[str, Column]:
        """Actions of each decision."""
        lengths = torch.tensor([len(one.num_steps) for one in episodes], dtype=torch.int64)
        num_steps = [count for one in episodes for count in one.num_steps]
        chunk, numbers = self.policy.chunk, self.policy.choice_size
        rewards = np.zeros((len(num_steps), chunk), np.float32)
        is_executed = np.arange(chunk) < np.array(num_steps, np.int64).reshape(-1, 1)
        rewards[is_executed] = [reward for one in episodes for reward in one.rewards]
        actions = np.array([one for episode in episodes for one in episode.taken], np.float32)
        helped = np.array([one for episode in episodes for one in episode.intervened], np.bool_).reshape(-1, chunk)
        columns: dict[str, Column] = {}
        values = (actions.reshape(-1, numbers), rewards, np.array(num_steps, np.int64), helped)
        for name, found in zip(TAKEN_COLUMNS, values, strict=True):
            columns[name] = Jagged(torch.from_numpy(np.ascontiguousarray(found)), lengths, "decisions")
        return columns


def _outcomes(episodes: Sequence[BodyEpisode]) -> dict[str, Column]:
    failures = [None if one.failure is None else {"cause": "environment", "error": one.failure} for one in episodes]
    return {
        "truncated": torch.tensor([not one.is_terminated and one.failure is None for one in episodes]),
        "success": torch.tensor([one.is_success for one in episodes]),
        "environment_rewards": torch.tensor([sum(one.rewards) for one in episodes], dtype=torch.float32),
        "environment_failed": tuple(failures),
    }


def evaluate_bodies(
    recipe: Recipe, model: ModelRole, batch: Batch, seed: int, progress: Callable[[float], None], record: Record | None
) -> list[Graded]:
    """Play the episodes of held-out tasks, task after task, and grade them."""
    config = recipe.evaluation
    k = config.responses_per_prompt
    ids = make_sample_ids(batch.ids.repeat_interleave(k), torch.arange(k).repeat(len(batch)))
    tasks = body_tasks(batch, ids, [config] * k, seed)
    num_shown = k * recipe.run.recorded_prompts if record is not None else 0
    # Held-out episodes may be many: only those that are shown keep their frames.
    tasks = [replace(task, keeps_frames=place < num_shown) for place, task in enumerate(tasks)]
    with model.generating() as engine:
        assert isinstance(engine, BodyEngine)
        episodes = engine.play(
            tasks, seed=seed, temperature=config.temperature or 1.0, progress=progress, clock=Clock()
        )
        spaces = engine.spaces
    graded = [graded_episode(episode) for episode in episodes]
    if record is not None:
        shown = list(zip(ids.tolist(), episodes, graded, strict=True))[:num_shown]
        places = zip(shown, batch.ids.repeat_interleave(k).tolist(), strict=False)
        record(
            [
                {"sample_id": number, "group_id": group} | describe_episode(episode, one, spaces)
                for (number, episode, one), group in places
            ]
        )
    return graded
