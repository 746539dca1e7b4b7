"""The rollout of language models: responses to prompts, each from its distribution."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Column, Jagged, make_sample_ids
from leaderless.distributed.errors import memory_explained
from leaderless.planner.workflow.columns import EXPERTS, SUPPORT, SUPPORT_SIZES
from leaderless.planner.workflow.workflow import Node
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate, prompts_of
from leaderless.stages.context import StageContext

TOO_MUCH = (
    "the sequences that are sampled at the same time do not fit into memory: lower rollout.max_sequences or "
    "rollout.max_response_tokens"
)


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Sample `batch.responses_per_prompt` responses to each prompt, and decode one more if the node wants that."""
    recipe, role = context.recipe, context.role
    distributions = distributions_of(recipe, has_greedy="is_greedy" in context.node.writes)
    begin = time.perf_counter()
    ids = _places(batch, context, len(distributions))[1].view(len(batch), len(distributions)).tolist()
    prompts = prompts_of(batch)
    results: list[list[Completion]] = [[Completion()] * len(distributions) for _ in prompts]
    done = num_tokens = 0

    def report(count: int, tokens: int) -> None:
        nonlocal done, num_tokens
        done, num_tokens = done + count, num_tokens + tokens
        context.progress(f"generating {done}/{len(prompts) * len(distributions)}, {num_tokens:,} tokens")

    with memory_explained(TOO_MUCH), role.generating() as engine:
        for distribution in dict.fromkeys(distributions):
            places = [place for place, wanted in enumerate(distributions) if wanted == distribution]
            requests = [
                Request(prompt, [sample_ids[place] for place in places], images=images)
                for (prompt, images), sample_ids in zip(prompts, ids, strict=True)
            ]
            params = SamplingParams(distribution, recipe.rollout.max_response_tokens, recipe.rollout.stop, recipe.seed)
            for result, answers in zip(results, generate(engine, requests, params, report), strict=True):
                for place, answer in zip(places, answers, strict=True):
                    result[place] = answer
    completions = [completion for result in results for completion in result]
    return samples_of(completions, batch, context, distributions, time.perf_counter() - begin)


def first_sibling(node: Node, recipe: Recipe) -> int:
    """Number of a node's first response to a prompt: numbers of several nodes differ, and the first begins with 0."""
    return node.sampler * (recipe.batch.responses_per_prompt + 1)


def num_siblings(node: Node, recipe: Recipe) -> int:
    """Number of responses to a prompt for which all nodes that sample have room."""
    return node.num_samplers * (recipe.batch.responses_per_prompt + 1)


def distributions_of(recipe: Recipe, *, has_greedy: bool = False) -> list[SamplingConfig]:
    """The distribution of each response to a prompt; a greedy one may come last."""
    sampled: list[SamplingConfig] = [recipe.rollout] * recipe.batch.responses_per_prompt
    return [*sampled, SamplingConfig(temperature=0.0)] if has_greedy else sampled


def samples_of(
    completions: Sequence[Completion],
    batch: Batch,
    context: StageContext,
    distributions: Sequence[SamplingConfig],
    seconds: float,
) -> Batch:
    """Responses to prompts as samples that point to their prompts; they are reported, too.

    Args:
        completions: Responses to the first prompt in the order of the distributions, then those to the next.
        batch: Prompts.
        context: Context of the stage.
        distributions: Distribution of each response to a prompt.
        seconds: Time that sampling has taken.
    """
    siblings = len(distributions)
    prompt_index, ids = _places(batch, context, siblings)
    tokens = Jagged.from_lists([c.tokens for c in completions], torch.int64, "tokens")
    truncated = torch.tensor([c.is_truncated for c in completions], dtype=torch.bool)
    # A greedy response is only a baseline, and in no metric of what the policy samples.
    is_sampled = torch.tensor([sampling.temperature > 0 for sampling in distributions]).repeat(len(batch))
    context.metrics.mean("rollout/response_tokens", tokens.lengths[is_sampled].sum(), int(is_sampled.sum()))
    context.metrics.mean("rollout/truncated", truncated[is_sampled].sum(), int(is_sampled.sum()))
    # Mean speed of an engine times their number: a sum of speeds would grow with the rounds of repeated nodes.
    context.metrics.mean("rollout/tokens_per_s", context.node.layout.dp * len(tokens.values), seconds)
    drafted = sum(c.num_drafted for c in completions)
    context.metrics.mean("rollout/drafts_accepted", sum(c.num_accepted for c in completions), drafted)
    more: dict[str, Column] = {}
    if context.recipe.algorithm.replay_experts:
        more[EXPERTS] = _experts(completions, siblings, batch.jagged("prompt_tokens").lengths)
    if SUPPORT in context.node.writes:
        more |= support_columns([c.support for c in completions], tokens.lengths)
    if any(sampling.temperature == 0 for sampling in distributions):
        more["is_greedy"] = ~is_sampled
    return Batch(
        ids,
        more
        | {
            "tokens": tokens,
            "response_mask": Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens"),
            "response_lengths": tokens.lengths,
            "truncated": truncated,
            "agent": torch.full((len(ids),), context.agents.index(context.node.node.role or "")),
            "policy_versions": Jagged.from_lists(
                [c.policy_versions for c in completions], torch.int32, "response_tokens"
            ),
            "temperatures": Jagged(
                torch.full((len(tokens.values),), context.recipe.rollout.temperature), tokens.lengths, "response_tokens"
            ),
            "rollout_log_probs": Jagged.from_lists(
                [c.log_probs for c in completions], torch.float32, "response_tokens"
            ),
        },
        batch,
        prompt_index,
    )


def support_columns(support: Sequence[Sequence[bytes]], lengths: Tensor) -> dict[str, Column]:
    """The tokens that could be drawn in place of each sampled one, by name of the column.

    Args:
        support: These tokens for each sampled token of each sample, as bytes of int32; none of a sample if they were
            not recorded, as all tokens could be drawn.
        lengths: [n] int64, sampled tokens of each sample.
    """
    rows = [b"".join(one) for one in support]
    words = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32) if any(rows) else torch.empty(0).int()
    each = [
        [len(token) // 4 for token in one] or [0] * count for one, count in zip(support, lengths.tolist(), strict=True)
    ]
    sizes = Jagged.from_lists(each, torch.int32, "response_tokens")
    return {
        SUPPORT: Jagged(words, torch.tensor([len(row) // 4 for row in rows], dtype=torch.int64), SUPPORT),
        SUPPORT_SIZES: sizes,
    }


def recorded_support(batch: Batch) -> list[list[bytes]]:
    """What `support_columns` has been given."""
    found: list[list[bytes]] = []
    for words, sizes in zip(batch.jagged(SUPPORT).rows(), batch.jagged(SUPPORT_SIZES).to_lists(), strict=True):
        found.append([part.numpy().tobytes() for part in torch.split(words, sizes)] if sizes else [])
    return found


def _places(batch: Batch, context: StageContext, siblings: int) -> tuple[Tensor, Tensor]:
    """The prompt of each sample, and its id, [n * siblings] both."""
    first = first_sibling(context.node.node, context.recipe)
    index = torch.arange(len(batch)).repeat_interleave(siblings)
    return index, make_sample_ids(batch.ids[index], torch.arange(first, first + siblings).repeat(len(batch)))


def _experts(completions: Sequence[Completion], siblings: int, prompts: Tensor) -> Jagged:
    """The experts of responses to prompts of some lengths, [n].

    Siblings share their prompt's, as they share all that is computed of it in training. An engine may have read
    it again for some of them, with other weights.
    """
    rows: list[bytes] = []
    for number, length in enumerate(prompts.tolist()):
        group = completions[number * siblings : (number + 1) * siblings]
        rows += [b"".join([*group[0].experts[:length], *one.experts[length:]]) for one in group]
    values = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.empty(0).byte()
    return Jagged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64), EXPERTS)
