"""Accuracy on held-out prompts, on all ranks of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from leaderless.config import Json, Recipe
from leaderless.data.batch import make_sample_ids
from leaderless.data.dataset import Dataset, make_batch
from leaderless.data.encode import Tokenizer
from leaderless.data.errors import memory_explained
from leaderless.data.transport import ProcessGroup
from leaderless.planner import Layout
from leaderless.rewards.pool import Graded
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.stages.context import Grader, ModelRole
from leaderless.stages.record import TokenRecorder, describe_sample
from leaderless.stages.reward import reward_inputs, transcripts
from leaderless.stages.rollout import TOO_MUCH
from leaderless.worker.scores import Scores

Record = Callable[[Sequence[Mapping[str, Json]]], None]
"""Writes samples of held-out prompts."""
EVALUATION_SEED_OFFSET = 1 << 31
"""Recipes' seeds are smaller, so evaluation never samples with the noise of training."""


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

    def run(self, progress: Callable[[float], None], record: Record | None = None) -> dict[str, float]:
        """Evaluate. All ranks of the layout call it together.

        Args:
            progress: Function that receives the finished fraction, between 0 and 1.
            record: Function that receives, on the first rank, the samples to keep for people.

        Returns:
            `evaluation/mean@k`, and for several responses to a prompt `evaluation/pass@k` and `evaluation/maj@k`;
            `evaluation/failed` counts the responses that could not be graded, which are left out; see `Scores`.
        """
        config, process_group = self.recipe.evaluation, self.process_group
        rows = self.dataset.rows[: config.max_prompts].tolist()
        shard = self.layout.shard_of(process_group.rank)
        mine = rows[len(rows) * shard // self.layout.dp : len(rows) * (shard + 1) // self.layout.dp]
        graded = self._answer(mine, progress, record if process_group.rank == self.layout.ranks[0] else None)
        k = config.responses_per_prompt
        scores = Scores(self.recipe)
        for index in range(len(mine) if self.layout.represents(process_group.rank) else 0):
            scores.add(graded[index * k : (index + 1) * k])
        return scores.numbers(scores.metrics.reduce(process_group))

    def _answer(self, rows: Sequence[int], progress: Callable[[float], None], record: Record | None) -> list[Graded]:
        """The graded responses to some rows, those to one row next to each other."""
        config, done = self.recipe.evaluation, 0
        k = config.responses_per_prompt
        batch = make_batch(rows, self.dataset.read(rows), has_responses=False)
        ids = make_sample_ids(batch.ids.repeat_interleave(k), torch.arange(k).repeat(len(rows)))
        prompts = batch.jagged("prompt_tokens").to_lists()
        requests = [Request(prompt, ids[i * k : (i + 1) * k].tolist()) for i, prompt in enumerate(prompts)]
        rollout = self.recipe.rollout
        params = SamplingParams(
            config, rollout.max_response_tokens, rollout.stop, self.recipe.seed + EVALUATION_SEED_OFFSET
        )

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(done / len(ids))

        with memory_explained(TOO_MUCH), self.model.generating() as engine:
            groups = generate(engine, requests, params, report)
        completions = [completion for group in groups for completion in group]
        texts = transcripts(self.tokenizer, [c.tokens for c in completions], self.recipe)
        data = self.recipe.data.evaluation
        assert data is not None
        values = [row for row in batch.objects("rows") if isinstance(row, Mapping) for _ in range(k)]
        inputs = reward_inputs([data] * len(values), values, texts, [c.is_truncated for c in completions])
        graded = self.grade(inputs, [str(row[data.source]) if data.source else None for row in values])
        if record is not None:
            recorder = TokenRecorder(self.tokenizer)
            sample_ids = ids.tolist()
            kept = zip(inputs, graded, completions, strict=True)
            record(
                [
                    {"sample_id": sample_ids[index], "group_id": int(batch.ids[index // k])}
                    | describe_sample(sample, one, recorder.describe(c.tokens, {"rollout": c.log_probs}))
                    for index, (sample, one, c) in enumerate(islice(kept, k * self.recipe.run.recorded_prompts))
                ]
            )
        return graded
