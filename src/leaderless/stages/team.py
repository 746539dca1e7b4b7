"""The stages of runs with several roles: they join and select rows of roles, and update the roles one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.algorithms import repeat_per_token
from leaderless.algorithms.team_plays import joint_ratios, rounds_of
from leaderless.data.batch import Batch, Jagged
from leaderless.planner.graph.row_sets import AGENT
from leaderless.planner.workflow import scored_agent
from leaderless.planner.workflow.workflow import Value
from leaderless.stages.context import StageContext
from leaderless.stages.mini_batches import metric_name
from leaderless.stages.update import update, with_temperatures


def join(batch: Batch, context: StageContext) -> Batch:  # noqa: ARG001
    """Return rows, which the databuffer adds to the other nodes' rows."""
    return batch


def select(batch: Batch, context: StageContext) -> Batch:
    """Keep the rows that have one of the asked-for values in every column that the node names."""
    is_kept = torch.ones(len(batch), dtype=torch.bool)
    for column, values in context.node.node.where:
        wanted: Sequence[Value] = [context.agents.index(str(value)) for value in values] if column == AGENT else values
        is_kept &= _has_one_of(batch, column, wanted)
    return batch.select(is_kept)


def _has_one_of(batch: Batch, name: str, values: Sequence[Value]) -> Tensor:
    """[n] bool: rows with one of some values in a dense or object column."""
    column = batch[name]
    if isinstance(column, tuple):
        return torch.tensor([value in values for value in column], dtype=torch.bool)
    if any(isinstance(value, str) for value in values):
        raise ValueError(f"column '{name}' holds numbers, so it cannot be one of {values}: give numbers in `where`")
    return torch.isin(batch.dense(name).double(), torch.tensor([float(value) for value in values], dtype=torch.double))


def own_log_probs(batch: Batch, context: StageContext) -> Batch:
    """Add the log-probabilities of the tokens that a role has sampled, under the role or under its reference.

    Those of other roles stay as another node has written them; without one, they are 0, and nobody reads them.
    """
    (column,) = context.node.writes
    is_own = batch.dense("agent") == context.agents.index(scored_agent(context.node.node) or "")
    scores = context.role.train_engine.log_probs(with_temperatures(batch.select(is_own), context))
    lengths = batch.dense("response_lengths")
    known = batch.jagged(column).values if column in batch else scores.values.new_zeros(int(lengths.sum()))
    known = known.masked_scatter(repeat_per_token(is_own, lengths), scores.values.to(known))
    return batch.with_columns({column: Jagged(known, lengths, "response_tokens")})


def update_in_turn(batch: Batch, context: StageContext) -> Batch:
    """Update a role on its own samples, then scale the advantages of the others by how its probabilities have changed.

    The next role of the team is trained on those.
    """
    engine, role = context.role.train_engine, context.node.node.role
    is_own = batch.dense("agent") == context.agents.index(role or "")
    mine = batch.select(is_own)
    scored, version = with_temperatures(mine, context), engine.policy_version
    before = engine.log_probs(scored)
    update(scored.with_columns(old_log_probs=before), context)
    advantages = batch.jagged("advantages")
    if engine.policy_version == version:
        return batch
    change = engine.log_probs(scored).values - before.values
    is_mine = repeat_per_token(is_own, advantages.lengths)
    log_ratios = torch.zeros_like(advantages.values)
    log_ratios[is_mine] = change.to(log_ratios)
    columns = (batch.dense("joint_ids"), batch.dense("actor"), batch.jagged("turns").values, advantages.lengths)
    ratios = joint_ratios(log_ratios, is_mine, rounds_of(*columns), max_ratio=context.recipe.algorithm.team.max_ratio)
    others = ~is_mine
    context.metrics.mean(metric_name(context, "joint_ratio"), ratios[others].sum(), others.sum())
    scaled = torch.where(is_mine, advantages.values, ratios * advantages.values)
    return batch.with_columns(advantages=Jagged(scaled, advantages.lengths, "response_tokens"))
