"""Accuracy on held-out prompts, on all ranks of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import cast

import torch

from leaderless.algorithms import majority_is_correct, pass_at_k
from leaderless.base.named_functions import load_own
from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch, make_sample_ids
from leaderless.data.dataset import Dataset, make_batch
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.errors import memory_explained
from leaderless.distributed.transport import ProcessGroup
from leaderless.environments.episode import Episode
from leaderless.environments.journal import text_of
from leaderless.observability.clock import Clock
from leaderless.observability.episode_files import What
from leaderless.observability.metrics import Metrics
from leaderless.planner import Layout, Plan, answering
from leaderless.planner.workflow.metrics import pass_at_sizes
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.planner.workflow.reward_stages import ENVIRONMENT, SUCCESS
from leaderless.rewards.judges.asking import Asker
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import Request, RolloutEngine, SamplingParams, generate, prompts_of
from leaderless.rollout.wrapped_engine import SharedEngine
from leaderless.stages.context import Grader, ModelRole
from leaderless.stages.episode_rollout import play_tasks
from leaderless.stages.episode_samples import Play, Played
from leaderless.stages.recorded_samples import Record, TokenRecorder, describe_sample, thumbnails
from leaderless.stages.reward import (
    grade_of,
    group_of,
    response_in,
    reward_inputs,
    reward_value,
    transcripts,
    with_environment,
)
from leaderless.stages.rollout import TOO_MUCH
from leaderless.worker.asynchronous.episodes import EpisodesInFlight, LiveEpisodes
from leaderless.worker.asynchronous.in_flight import EngineRequests, Events
from leaderless.worker.asynchronous.journal import JournaledEpisodes, PastEpisodes
from leaderless.worker.build.judging import Judging
from leaderless.worker.evaluate.preferences import PreferenceEvaluator

Journal = Callable[[What, Callable[[], Iterable[str]]], None]
"""Writes lines about episodes."""
OwnEvaluation = Callable[[Recipe, ModelRole, Batch, int, Callable[[float], None], Record | None], list[Graded]]
"""Function that evaluates runs of a kind; see `ProductFunctions.evaluation`."""
EVALUATION_SEED_OFFSET = 1 << 31
"""Recipes' seeds are smaller, so evaluation never samples with the noise of training."""


@dataclass(frozen=True)
class EvaluationStep:
    """An evaluation after a step of training.

    Attributes:
        progress: Function that receives how much is done, as text or as a fraction between 0 and 1.
        step: Step whose weights the model has.
        record: Function that receives, on the first rank, the samples to keep for people.
        journal: Function that receives this rank's episodes in an environment.
    """

    progress: Callable[[float | str], None]
    step: int = 0
    record: Record | None = None
    journal: Journal | None = None


@dataclass(frozen=True)
class Evaluator:
    """Answers held-out prompts, divided among the ranks of the model that answers, and grades the responses."""

    recipe: Recipe
    dataset: Dataset
    model: ModelRole
    layout: Layout
    process_group: ProcessGroup
    tokenizer: Tokenizer
    grade: Grader

    def run(self, at: EvaluationStep) -> dict[str, float]:
        """Evaluate. All ranks of the layout call it together.

        Returns:
            `evaluation/mean@k`, and for several responses to a prompt `evaluation/pass@k` and `evaluation/maj@k`;
            `evaluation/failed` counts the responses that could not be graded, which are left out; see `ResponseScores`.
            For language models also the share of responses that were cut, and the mean of their sampled tokens.
        """
        config, rank, layout = self.recipe.evaluation, self.process_group.rank, self.layout
        rows, shard = self.dataset.rows[: config.max_prompts].tolist(), layout.shard_of(rank)
        mine = rows[len(rows) * shard // layout.dp : len(rows) * (shard + 1) // layout.dp]
        k, scores = config.responses_per_prompt, ResponseScores(self.recipe)
        graded = self._answer(mine, at if rank == layout.ranks[0] else replace(at, record=None), scores.metrics)
        for index in range(len(mine) if layout.represents(rank) else 0):
            scores.add(graded[index * k : (index + 1) * k])
        return scores.numbers(scores.metrics.reduce(self.process_group))

    def _answer(self, rows: Sequence[int], at: EvaluationStep, metrics: Metrics) -> list[Graded]:
        """The graded responses to some rows, those to one row next to each other."""
        has_images = self.dataset.encoder.images is not None
        batch = make_batch(rows, self.dataset.read(rows), has_responses=False, has_images=has_images)
        if own := PRODUCTS[self.recipe.product].evaluation:
            evaluate = cast("OwnEvaluation", load_own(own))
            return evaluate(self.recipe, self.model, batch, self._seed, at.progress, at.record)
        with memory_explained(TOO_MUCH), self.model.generating() as engine:
            answers = self._answers(engine, batch, at)
        whole = [answer for answer in answers if answer.failure is None]
        metrics.mean("truncated", sum(answer.is_truncated for answer in whole), len(whole))
        metrics.mean("response_tokens", sum(sum(answer.is_sampled) for answer in whole), len(whole))
        k, data = self.recipe.evaluation.responses_per_prompt, self._data
        values = [row for row in batch.objects("rows") if isinstance(row, Mapping) for _ in range(k)]
        texts = transcripts(self.tokenizer, [a.tokens for a in answers], self.recipe, [a.is_sampled for a in answers])
        groups = [group_of(number) for number in batch.ids.tolist() for _ in range(k)]
        inputs = reward_inputs([data] * len(values), values, texts, [a.is_truncated for a in answers], groups)
        sources = [str(row[data.source]) if data.source else None for row in values]
        graded = self._grade(inputs, answers, sources, at)
        if at.record is not None:
            recorder, pictures = TokenRecorder(self.tokenizer), thumbnails(batch)
            kept = zip(inputs, graded, answers, strict=True)
            at.record(
                [
                    {"sample_id": answer.sample_id, "group_id": int(batch.ids[index // k]), **answer.facts}
                    | ({"images": shown} if (shown := pictures.pop(int(batch.ids[index // k]), None)) else {})
                    | describe_sample(
                        sample, one, recorder.describe(answer.tokens, {"rollout": answer.log_probs}, answer.is_sampled)
                    )
                    for index, (sample, one, answer) in enumerate(islice(kept, k * self.recipe.run.recorded_prompts))
                ]
            )
        return graded

    def _grade(
        self,
        inputs: Sequence[RewardInput],
        answers: Sequence[_Answer],
        sources: Sequence[str | None],
        at: EvaluationStep,  # noqa: ARG002 - of episodes
    ) -> list[Graded]:
        assert len(inputs) == len(answers)
        return self.grade(inputs, sources)

    def _answers(self, engine: RolloutEngine, batch: Batch, at: EvaluationStep) -> list[_Answer]:
        """Continuations of each prompt, `evaluation.responses_per_prompt` of them."""
        config, rollout, ids, done = self.recipe.evaluation, self.recipe.rollout, self._ids(batch), 0
        k, num_tokens = config.responses_per_prompt, 0
        requests = [
            Request(prompt, ids[i * k : (i + 1) * k], images=images)
            for i, (prompt, images) in enumerate(prompts_of(batch))
        ]
        params = SamplingParams(config, rollout.max_response_tokens, rollout.stop, self._seed)

        def report(count: int, tokens: int) -> None:
            nonlocal done, num_tokens
            done, num_tokens = done + count, num_tokens + tokens
            at.progress(f"{done}/{len(ids)}, {num_tokens:,} tokens")

        groups = generate(engine, requests, params, report)
        completions = zip(ids, (completion for group in groups for completion in group), strict=True)
        return [
            _Answer(number, c.tokens, [True] * len(c.tokens), c.log_probs, is_truncated=c.is_truncated)
            for number, c in completions
        ]

    def _ids(self, batch: Batch) -> list[int]:
        k = self.recipe.evaluation.responses_per_prompt
        ids: list[int] = make_sample_ids(batch.ids.repeat_interleave(k), torch.arange(k).repeat(len(batch))).tolist()
        return ids

    @property
    def _data(self) -> DatasetConfig:
        assert self.recipe.data.evaluation is not None, "checked when the recipe was read"
        return self.recipe.data.evaluation

    @property
    def _seed(self) -> int:
        return self.recipe.seed + EVALUATION_SEED_OFFSET


class EpisodeEvaluator(Evaluator):
    """Plays held-out tasks in an environment; of several conversations of an episode, the last to end counts."""

    def _answers(self, engine: RolloutEngine, batch: Batch, at: EvaluationStep) -> list[_Answer]:
        k = self.recipe.evaluation.responses_per_prompt
        play = Play([self.recipe.evaluation] * k, 0, k, self._seed)
        if isinstance(engine, SharedEngine):  # it works on what is generated continuously, too
            played = self._play_meanwhile(engine, play, batch, at)
        else:
            sets = [self._data] * len(batch)
            played = play_tasks(engine, play, batch, sets, self.recipe, self.tokenizer, at.progress)
        if at.journal is not None:
            at.journal("played", played.journal)
        return [_answer_of(number, one) for number, one in zip(self._ids(batch), played.episodes, strict=True)]

    def _play_meanwhile(self, engine: SharedEngine, play: Play, tasks: Batch, at: EvaluationStep) -> Played:
        """The episodes of an engine that works on training episodes, too.

        The steps that it takes count for both, so what they ask is noted as well, and asked again where a run is
        followed.
        """
        requests, follow = EngineRequests(engine.view(), Events(), play.distributions), self.recipe.run.follow
        source: LiveEpisodes | JournaledEpisodes
        if at.journal is None or follow is None:
            source = LiveEpisodes(self.recipe, self.tokenizer, Clock(), self._data)
        else:
            folder = Path(self.recipe.run.directory) / follow / "episodes"
            past = PastEpisodes(folder, self.process_group.rank, "evaluation", at.step)
            (events,) = (line["events"] for line in past.asked(at.step) if "events" in line)
            requests.events.expected = cast("Sequence[Sequence[int | str]]", events)
            source = JournaledEpisodes(requests, past, self.tokenizer, play.seed)
        in_flight, num_done = EpisodesInFlight(requests, source, self.recipe, play, None, self._data), 0
        try:
            in_flight.begin(tasks)
            while in_flight.is_busy:
                num_done += sum(advance.is_finished for advance in in_flight.step())
                at.progress(num_done / len(tasks))
        finally:
            in_flight.close()
        if at.journal is not None:
            noted = [*requests.events.facts, {"events": cast("Json", requests.events.happened)}]
            at.journal("asked", lambda: map(text_of, noted))
        return in_flight.played(tasks, [self._data] * len(tasks), self.tokenizer)

    def _grade(
        self,
        inputs: Sequence[RewardInput],
        answers: Sequence[_Answer],
        sources: Sequence[str | None],
        at: EvaluationStep,
    ) -> list[Graded]:
        """The grades of all answers: of the environment, with rewards of the recipe for the last message."""
        whole = [place for place, answer in enumerate(answers) if answer.failure is None]
        found: dict[int, Graded] = {}
        if self.recipe.reward.options():
            said = [replace(one, response=response_in(one.transcript, is_last=True)) for one in inputs]
            graded = self.grade([said[place] for place in whole], [sources[place] for place in whole])
            found = dict(zip(whole, graded, strict=True))
        grades = [with_environment(found.get(place), one.reward, one.failure) for place, one in enumerate(answers)]
        if at.journal is not None:
            lines = [text_of(grade_of(a.sample_id, a.actor, one)) for a, one in zip(answers, grades, strict=True)]
            at.journal("graded", lambda: lines)
        return grades


@dataclass(frozen=True)
class _Answer:
    """Continuation of a prompt: a response, or a conversation.

    Attributes:
        is_sampled: Mask over the tokens: those that the model sampled, which have `log_probs`.
        is_truncated: Whether it was cut at a limit.
        reward: Reward of the environment.
        failure: Reason why the episode has failed; None if it has not.
        actor: Place of the agent that ended it among the environment's agents.
        facts: Further facts for people.
    """

    sample_id: int
    tokens: Sequence[int]
    is_sampled: Sequence[bool]
    log_probs: Sequence[float]
    is_truncated: bool
    reward: float = 0.0
    failure: Json = None
    actor: int = 0
    facts: Mapping[str, Json] = field(default_factory=dict)


def _answer_of(sample_id: int, episode: Episode) -> _Answer:
    facts, samples = {"joint_id": sample_id}, [] if episode.cause else episode.trace.samples()
    if not samples:
        failure = {"cause": episode.cause, "error": episode.error}
        return _Answer(sample_id, [], [], [], is_truncated=False, failure=failure, facts=facts)
    last, head = samples[-1], samples[-1].head_length
    rewards = (node.said.reward for node in episode.trace.said() if node.said and node.said.agent == last.agent)
    return _Answer(
        sample_id,
        last.tokens[head:],
        last.is_trained[head:],
        last.log_probs,
        is_truncated=episode.is_cut or last.is_truncated,
        reward=sum(rewards),
        actor=episode.agents.index(last.agent),
        facts=facts,
    )


def make_evaluator(
    recipe: Recipe, plan: Plan, held_out: Dataset, judging: Judging
) -> Evaluator | PreferenceEvaluator | JudgeHelper | None:
    """Make the evaluator of this rank; None if it takes no part in evaluations under the plan."""
    instance, transport, roles = answering(plan.instances, recipe.evaluation.role), judging.transport, judging.roles
    is_compared = held_out.encoder.config.preferences is not None
    if transport.rank not in instance.layout:
        askers = [] if is_compared else judging.askers_of_judge(instance)
        return JudgeHelper(askers) if askers else None
    own, model = recipe.as_seen_by(instance.role), roles.of(instance.role, instance.layout)
    if is_compared:
        ranks = transport.process_group(instance.layout.ranks)
        return PreferenceEvaluator(own, held_out, model, instance.layout, ranks)
    assert isinstance(model, ModelRole), "checked by the planner"
    kind = EpisodeEvaluator if recipe.product == "episodes" else Evaluator
    layout, grade = instance.serving_layout, judging.grader_of_evaluation(instance)
    return kind(own, held_out, model, layout, transport.process_group(layout.ranks), roles.tokenizer, grade)


@dataclass(frozen=True)
class JudgeHelper:
    """The part in evaluations of ranks that do not answer, but judge what others have answered."""

    askers: Sequence[Asker]

    def run(self, at: EvaluationStep) -> dict[str, float]:
        """Judge; those that answer have the scores. All ranks that answer or judge call it together."""
        for asker in self.askers:
            asker.ask([], lambda part: at.progress(part.removeprefix(", ")))
        return {}


class ResponseScores:
    """Adds up the responses of one rank, prompt by prompt.

    A response is correct when the reward `evaluation.metric`, else the one of largest weight that applies to its row,
    else the environment's (of a body, whether it has done its task), is at least `evaluation.correct_at`.
    Responses that could not be graded, or that a named metric does not apply to, are left out and counted. The majority
    is a vote of the answers which the reward finds in the responses; a prompt without any counts as wrong.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.k = recipe, recipe.evaluation.responses_per_prompt
        self.powers = pass_at_sizes(self.k)
        self.metrics = Metrics()
        # All ranks report the same names, those without prompts too.
        for name in (f"mean@{self.k}", *(f"pass@{j}" for j in self.powers), f"maj@{self.k}"):
            self.metrics.mean(name, 0.0, 0)
        for name in ("failed", "not_applicable", "answered"):
            self.metrics.total(name, 0)

    def add(self, graded: Sequence[Graded]) -> None:
        """Add the responses to one prompt."""
        valid = [g for g in graded if g.is_valid]
        self.metrics.total("failed", len(graded) - len(valid))
        judged = [(g, name) for g in valid if (name := self._metric_of(g)) is not None]
        self.metrics.total("not_applicable", len(valid) - len(judged))
        if not judged:
            return
        threshold = self.recipe.evaluation.correct_at
        correct = [(reward_value(g.details, name) or 0.0) >= threshold for g, name in judged]
        self.metrics.mean(f"mean@{self.k}", sum(correct) / len(correct), 1)
        for k in self.powers:
            if k <= len(correct):
                self.metrics.mean(f"pass@{k}", pass_at_k(len(correct), sum(correct), k), 1)
        answers = [_vote_of(g, name) for g, name in judged]
        self.metrics.total("answered", sum(answer is not None for answer in answers))
        self.metrics.mean(f"maj@{self.k}", majority_is_correct(answers, correct), 1)

    def numbers(self, reduced: Mapping[str, float]) -> dict[str, float]:
        """The scores from the metrics of all ranks, by name as `evaluation/mean@4`.

        There is no majority where no response has an answer, or where there is only one response.
        """
        hidden = {"answered"}
        if not reduced["answered"] or self.k == 1:
            hidden.add(f"maj@{self.k}")
        if not reduced["not_applicable"]:
            hidden.add("not_applicable")
        return {f"evaluation/{name}": value for name, value in reduced.items() if name not in hidden}

    def _metric_of(self, graded: Graded) -> str | None:
        """The reward that decides whether a response is correct; None where a named one does not apply."""
        named, weights = self.recipe.evaluation.metric, self.recipe.reward.options()
        if named is not None:
            return named if named in graded.details else None
        applying = [name for name in weights if name in graded.details]
        environment = next((name for name in (SUCCESS, ENVIRONMENT) if name in graded.details), None)
        return max(applying, key=lambda name: weights[name].weight, default=environment)


def _vote_of(graded: Graded, metric: str) -> str | None:
    outcome = graded.details.get(metric)
    answer = outcome.get("answer") if isinstance(outcome, Mapping) else None
    return answer if isinstance(answer, str) else None
