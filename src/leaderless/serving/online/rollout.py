"""The rollout of an online run: clients are answered until there is enough feedback, which becomes samples."""

from __future__ import annotations

import time
from collections.abc import Sequence

from leaderless.data.batch import SIBLING_BITS, Batch
from leaderless.distributed.errors import memory_explained
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.protocol import ONLY_AGENT
from leaderless.observability.metrics import Metrics
from leaderless.rollout.engine import RolloutEngine, SamplingParams
from leaderless.serving.online.feedback_ledger import OnlineReply, ReplyChoice, percentile_95
from leaderless.serving.online.server import OnlineService
from leaderless.stages.context import StageContext
from leaderless.stages.episode_rollout import play_of, samples_of, writer_of
from leaderless.stages.episode_samples import EpisodeIndex, Play, Played
from leaderless.stages.rollout import TOO_MUCH

SWEEP_EVERY_S = 1.0
"""Time between two looks for responses that are to be dropped."""


def rollout(batch: Batch, context: StageContext) -> Batch:
    """Answer clients until there are `batch.responses_per_prompt` responses with feedback for each task."""
    with memory_explained(TOO_MUCH), context.role.generating() as engine:
        begin = time.perf_counter()
        played = collect(engine, play_of(context.node, context.recipe), batch, context)
        seconds = time.perf_counter() - begin
    return samples_of(played, context, seconds)


def collect(engine: RolloutEngine, play: Play, tasks: Batch, context: StageContext) -> Played:
    """Answer clients until there is a group with feedback for each task; tasks have no content."""
    desk, version = context.source, context.role.policy_version
    assert isinstance(desk, OnlineService), "ranks that sample in an online run have clients"
    num_wanted = len(tasks) * len(play.distributions)

    next_sweep_s = 0.0

    def is_done() -> bool:
        nonlocal next_sweep_s
        has_enough = desk.ledger.num_groups() >= len(tasks)
        if has_enough or time.monotonic() >= next_sweep_s:  # it looks at every reply, and this is asked for every token
            desk.ledger.sweep(version)
            next_sweep_s = time.monotonic() + SWEEP_EVERY_S
        return has_enough and desk.ledger.num_groups() >= len(tasks)

    def beat() -> None:
        num_judged = min(desk.ledger.num_judged(), num_wanted)
        context.progress(f"waiting for feedback {num_judged}/{num_wanted}")

    desk.pump.serve(engine, is_done, beat)
    groups = desk.ledger.take(len(tasks))
    _report(context.metrics, desk, groups)
    return _played(play, tasks, groups, desk, context)


def _played(
    play: Play,
    tasks: Batch,
    groups: Sequence[Sequence[tuple[OnlineReply, int, ReplyChoice]]],
    desk: OnlineService,
    context: StageContext,
) -> Played:
    """Responses as episodes of one message, which their clients have led."""
    tokenizer, recipe = context.tokenizer, context.recipe
    assert tokenizer.eos_token_id is not None
    (data,) = recipe.data.train_sets().values()
    writer, rollout = writer_of(tokenizer, data), recipe.rollout
    params = SamplingParams(rollout, rollout.max_response_tokens, rollout.stop, play.seed)
    episodes: list[Episode] = []
    seats: list[EpisodeIndex] = []
    for task, (group_id, group) in enumerate(zip(tasks.ids.tolist(), groups, strict=True)):
        for place, (reply, index, choice) in enumerate(group):
            assert choice.reward is not None, "groups have feedback"
            choice.said.reward = choice.reward
            seats.append(EpisodeIndex(task, place, play.first + place))
            number = (group_id << SIBLING_BITS) + seats[-1].begin
            where = EpisodePosition(number, f"{play.seed}/{group_id}", {}, writer, params)
            episode = Episode(choice.trace, (ONLY_AGENT,), is_led=True, place=where)
            episode.seconds["model"] = choice.model_s
            episode.info = {"id": reply.id, "choice": index, "feedback": choice.feedback}
            episodes.append(episode)
    return Played(play, tasks, episodes, seats, desk.pump, tokenizer.eos_token_id, [writer] * len(tasks), None)


def _report(
    metrics: Metrics, desk: OnlineService, groups: Sequence[Sequence[tuple[OnlineReply, int, ReplyChoice]]]
) -> None:
    counts = desk.ledger.counts.take()
    for name in ("requests", "failed", "without_feedback", "stale", "interrupted"):
        metrics.total(f"online/{name}", getattr(counts, name))
    metrics.total("online/waiting", desk.ledger.num_judged())
    rewards = [choice.reward or 0.0 for group in groups for _, _, choice in group]
    metrics.mean("online/acceptance", sum(rewards), len(rewards))
    for name, seconds in (("latency", counts.latencies_s), ("latency_training", counts.latencies_training_s)):
        metrics.mean(f"online/{name}_s", sum(seconds), len(seconds))
        metrics.max(f"online/{name}_p95_s", percentile_95(seconds))
