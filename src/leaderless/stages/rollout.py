"""The stages that sample responses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.errors import memory_explained
from leaderless.environments.registry import agents_of
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate, prompts_of
from leaderless.stages.bodies import play_bodies
from leaderless.stages.context import StageContext
from leaderless.stages.earlier import Earlier, earlier_episodes
from leaderless.stages.online import collect
from leaderless.stages.play import play_tasks, played_before
from leaderless.stages.played import Play, Played
from leaderless.workflow.columns import EXPERTS
from leaderless.workflow.reward_stage import ENVIRONMENT

TOO_MUCH = (
    "the sequences that are sampled at the same time do not fit into memory: lower rollout.max_sequences or "
    "rollout.max_response_tokens"
)


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Sample `batch.responses_per_prompt` responses to each prompt."""
    return _generate(batch, context, distributions_of(context.recipe))


def rollout_with_greedy(batch: Batch, context: StageContext) -> Batch:
    """Sample `batch.responses_per_prompt` responses to each prompt, and decode one more greedily."""
    distributions = distributions_of(context.recipe, has_greedy=True)
    samples = _generate(batch, context, distributions)
    if "is_greedy" in samples:
        return samples
    is_greedy = torch.tensor([False] * (len(distributions) - 1) + [True]).repeat(len(batch))
    return samples.with_columns(is_greedy=is_greedy)


def distributions_of(recipe: Recipe, *, has_greedy: bool = False) -> list[SamplingConfig]:
    """The distribution of each response to a prompt; a greedy one may come last."""
    sampled: list[SamplingConfig] = [recipe.rollout] * recipe.batch.responses_per_prompt
    return [*sampled, SamplingConfig(temperature=0.0)] if has_greedy else sampled


def _generate(batch: Batch, context: StageContext, distributions: Sequence[SamplingConfig]) -> Batch:
    """Sample one response from each distribution for each prompt; samples point to their prompts."""
    siblings, node = len(distributions), context.node.node
    # Samples of several nodes differ in their ids, and those of the first have the ids they would have alone.
    places = context.recipe.batch.responses_per_prompt + 1
    first = node.sampler * places
    if context.recipe.body is not None:
        return play_bodies(batch, context, distributions, first)
    if context.recipe.has_episodes:
        return _play(batch, context, Play(distributions, first, node.num_samplers * places, context.recipe.seed))
    prompt_index = torch.arange(len(batch)).repeat_interleave(siblings)
    ids = make_sample_ids(batch.ids[prompt_index], torch.arange(first, first + siblings).repeat(len(batch)))
    begin = time.perf_counter()
    if context.generated is None:
        completions = _complete(batch, context, distributions, ids.view(len(batch), siblings).tolist())
        seconds = time.perf_counter() - begin
    else:
        completions, seconds = context.generated.responses(batch.ids.tolist()), context.generated.seconds
    tokens = Jagged.from_lists([c.tokens for c in completions], torch.int64, "tokens")
    truncated = torch.tensor([c.is_truncated for c in completions], dtype=torch.bool)
    # A greedy response is only a baseline, and in no metric of what the policy samples.
    is_sampled = torch.tensor([sampling.temperature > 0 for sampling in distributions]).repeat(len(batch))
    context.metrics.mean("rollout/response_tokens", tokens.lengths[is_sampled].sum(), int(is_sampled.sum()))
    context.metrics.mean("rollout/truncated", truncated[is_sampled].sum(), int(is_sampled.sum()))
    # Mean speed of an engine times their number: a sum of speeds would grow with the rounds of repeated nodes.
    context.metrics.mean("rollout/tokens_per_s", context.node.layout.dp * len(tokens.values), seconds)
    is_recorded = context.recipe.algorithm.replay_experts
    return Batch(
        ids,
        ({EXPERTS: _experts(completions, siblings, batch.jagged("prompt_tokens").lengths)} if is_recorded else {})
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


def _experts(completions: Sequence[Completion], siblings: int, prompts: Tensor) -> Jagged:
    """The experts of responses to prompts of some lengths, [n].

    Siblings share those of their prompt, as they share all that is computed of it in training. An engine may have read
    it again for some of them, with other weights.
    """
    rows: list[bytes] = []
    for number, length in enumerate(prompts.tolist()):
        group = completions[number * siblings : (number + 1) * siblings]
        rows += [b"".join([*group[0].experts[:length], *one.experts[length:]]) for one in group]
    values = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if any(rows) else torch.empty(0).byte()
    return Jagged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64), EXPERTS)


def play_on(batch: Batch, context: StageContext) -> Batch:
    """Continue the episodes of other roles, up to where an agent of yet another role is to act.

    The samples of all agents come out, with what the environment has answered since.
    """
    config, node, siblings = context.recipe.environment, context.node.node, context.recipe.batch.responses_per_prompt
    assert config is not None
    assert batch.prompts is not None
    play = Play([context.recipe.rollout] * siblings, 0, node.num_samplers * (siblings + 1), context.recipe.seed)
    return _play(batch.prompts, context, play, earlier_episodes(batch, agents_of(config), siblings + 1))


def _play(batch: Batch, context: StageContext, play: Play, earlier: Sequence[Earlier] | None = None) -> Batch:
    """Play an episode from each distribution for each task, or continue earlier ones; online, clients lead them."""
    own, role = context.node.node.role or "", context.role
    data = [context.recipe.data.train_set_of(row) for row in batch.objects("rows") if isinstance(row, Mapping)]
    if context.generated is not None:
        episodes, work = context.generated.episodes(batch.ids.tolist())
        played = played_before(play, batch, data, context.recipe, context.tokenizer, episodes, work)
        return _samples_of(played, context, context.generated.seconds)
    with memory_explained(TOO_MUCH), role.generating() as engine:
        begin = time.perf_counter()
        if context.recipe.online is not None:
            played = collect(engine, play, batch, context)
        else:
            played = play_tasks(
                engine,
                play,
                batch,
                data,
                context.recipe,
                context.tokenizer,
                context.progress,
                role=own,
                earlier=earlier,
                clock=context.clock,
            )
        seconds = time.perf_counter() - begin
    return _samples_of(played, context, seconds)


def _samples_of(played: Played, context: StageContext, seconds: float) -> Batch:
    """The samples of episodes that took some seconds; they are reported and written down, too."""
    config, own = context.recipe.environment, context.node.node.role or ""
    played.report(context.metrics, context.node.layout.dp, seconds)
    if context.episodes is not None:
        context.episodes.write("step", context.step, "played", played.journal)
    error = played.first_error()
    if error is not None:
        context.run_directory.note_reward_error(context.step, context.process_group.rank, ENVIRONMENT, error)
    samples = played.samples()
    context.facts["waits"] = played.waits()
    roles = [own] if config is None else [config.agents.get(agent, own) for agent in agents_of(config)]
    numbers = torch.tensor([context.agents.index(role) if role in context.agents else 0 for role in roles])
    own_experts = {EXPERTS: played.experts()} if context.recipe.algorithm.replay_experts else {}
    return samples.with_columns(own_experts, agent=numbers[samples.dense("actor")])


def _complete(
    batch: Batch, context: StageContext, distributions: Sequence[SamplingConfig], ids: Sequence[Sequence[int]]
) -> list[Completion]:
    """The responses to the first prompt in the order of the distributions, then those to the next."""
    recipe, role = context.recipe, context.role
    prompts = prompts_of(batch)
    results: list[list[Completion]] = [[Completion()] * len(distributions) for _ in prompts]
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        context.progress(done / (len(prompts) * len(distributions)))

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
    return [completion for result in results for completion in result]
