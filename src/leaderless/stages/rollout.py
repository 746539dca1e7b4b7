"""The stage that samples responses."""

from __future__ import annotations

import time

import torch

from leaderless.data.batch import Batch, Jagged
from leaderless.data.ids import make_sample_ids
from leaderless.rollout.engine import Request, SamplingParams
from leaderless.stages.context import StageContext


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Sample `batch.responses_per_prompt` responses to each prompt.

    Args:
        batch: Prompts.
        context: Whose role generates.

    Returns:
        Samples that point to their prompts.
    """
    recipe, role = context.recipe, context.role
    assert role.rollout_engine is not None
    siblings = recipe.batch.responses_per_prompt
    prompt_index = torch.arange(len(batch)).repeat_interleave(siblings)
    ids = make_sample_ids(batch.ids[prompt_index], torch.arange(siblings).repeat(len(batch)))
    prompts = batch.jagged("prompt_tokens").to_lists()
    requests = [Request(prompt, ids[i * siblings : (i + 1) * siblings].tolist()) for i, prompt in enumerate(prompts)]
    params = SamplingParams(recipe.rollout, recipe.rollout.max_response_tokens, recipe.rollout.stop, recipe.seed)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        context.progress(done / len(ids))

    begin = time.perf_counter()
    with role.train_engine.unsharded():
        groups = role.rollout_engine.generate(requests, params, report)
    seconds = time.perf_counter() - begin
    completions = [completion for group in groups for completion in group]
    tokens = Jagged.from_lists([c.tokens for c in completions], torch.int64, "tokens")
    truncated = torch.tensor([c.is_truncated for c in completions], dtype=torch.bool)
    context.metrics.mean("rollout/response_tokens", tokens.lengths.sum(), len(ids))
    context.metrics.mean("rollout/truncated", truncated.sum(), len(ids))
    context.metrics.total("rollout/tokens_per_s", len(tokens.values) / max(seconds, 1e-9))
    return Batch(
        ids,
        {
            "tokens": tokens,
            "response_mask": Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens"),
            "response_lengths": tokens.lengths,
            "truncated": truncated,
            "policy_versions": torch.full((len(ids),), role.train_engine.policy_version),
            "rollout_log_probs": Jagged.from_lists(
                [c.log_probs for c in completions], torch.float32, "response_tokens"
            ),
        },
        batch,
        prompt_index,
    )
