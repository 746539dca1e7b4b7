"""Weights arrive, provably: complete, of the right version, and never damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.counts import counting_traffic
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_recipe
from torch import Tensor

from leaderless.config import load_recipe
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.transport import ProcessGroup, Round, Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.planner import Cluster, Layout, SyncWeights, make_plan
from leaderless.training import weight_sync
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.weight_sync import sync_weights
from leaderless.workflow import resolve_workflow


def layouts(tmp_path: Path, source: str, target: str, world_size: int) -> SyncWeights:
    """The planner's schedule for two pools."""
    layout = {"rollout": {"ranks": target}, "policy": {"ranks": source}}
    recipe = load_recipe(write_recipe(tmp_path, tiny_model(), {"layout": layout})).recipe
    plan = make_plan(recipe, resolve_workflow("grpo"), Cluster(world_size))
    (action,) = [action for action in plan.schedule if isinstance(action, SyncWeights)]
    return action


def make_engine(layout: Layout, transport: Transport, *, is_trained: bool) -> FsdpEngine | None:
    if transport.rank not in layout:
        return None
    config = ModelConfig(path=tiny_model_of())
    group = transport.process_group(layout.ranks)
    optimizer = OptimizerConfig() if is_trained else None
    engine = FsdpEngine(load_causal_lm(config, "policy"), config, group, torch.device("cpu"), 64, optimizer=optimizer)
    for _, parameter in engine.named_weights():
        with torch.no_grad():
            parameter.mul_(2 if is_trained else 0)
    if is_trained:
        engine.policy_version = 7
    return engine


_MODEL = ""


def tiny_model_of() -> str:
    return _MODEL


def prepare(
    action: SyncWeights, model: str, timeout_s: float
) -> tuple[ProcessGroup, FsdpEngine | None, FsdpEngine | None]:
    global _MODEL  # noqa: PLW0603
    _MODEL = model
    transport = Transport(torch.device("cpu"), timeout_s)
    for ranks in (action.source_layout.ranks, action.target_layout.ranks, action.ranks):
        transport.add_process_group(ranks)
    source = make_engine(action.source_layout, transport, is_trained=True)
    target = make_engine(action.target_layout, transport, is_trained=False)
    group = transport.process_group(action.ranks) if transport.rank in action.ranks else transport.world
    return group, source, target


def bring(action: SyncWeights, model: str, bucket_bytes: int) -> tuple[bool, int, int]:
    """Whether the copy now equals the trained weights; its version; the bytes that this rank has received."""
    group, source, target = prepare(action, model, 60)
    with patch.object(weight_sync, "BUCKET_BYTES", bucket_bytes), counting_traffic() as traffic:
        sync_weights(action, group, source, target)
    if target is None:
        return True, 7, traffic.received
    trained = dict(load_causal_lm(ModelConfig(path=model), "policy").model.named_parameters())
    is_equal = all(torch.equal(weight, 2 * trained[name]) for name, weight in target.full_weights())
    return is_equal, target.policy_version, traffic.received


@pytest.mark.parametrize(
    ("source", "target", "world_size"),
    [("0", "1", 2), ("0-1", "2-3", 4), ("0-2", "3", 4), ("0", "1-3", 4), ("1-2", "0,2-3", 4)],
)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 28])
def test_every_row_reaches_the_copy_once(
    ranks: RankPool, tmp_path: Path, source: str, target: str, world_size: int, bucket_bytes: int
) -> None:
    action = layouts(tmp_path, source, target, world_size)
    results = ranks.run(world_size, bring, action, tiny_model(), bucket_bytes)
    assert all(is_equal and version == 7 for is_equal, version, _ in results)
    model = load_causal_lm(ModelConfig(path=tiny_model()), "policy")
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    received = sum(count for _, _, count in results)
    if not set(action.source_layout.ranks) & set(action.target_layout.ranks):
        num_rows = sum(len(parameter) for parameter in model.parameters())
        overhead = 16 * (num_rows if bucket_bytes == 1 else 4 * 4)
        assert num_bytes <= received <= num_bytes + overhead, "no byte crosses twice"


def bring_damaged(action: SyncWeights, model: str) -> str:
    """The error if one byte changes during the transfer."""
    group, source, target = prepare(action, model, 5)
    exchange_rounds = group.exchange_rounds

    def damage(rounds: Iterable[Round], what: str) -> None:
        arrived: list[Tensor] = []

        def watched() -> Iterator[Round]:
            for sent, received in rounds:
                arrived.extend(message for _, message in received)
                yield sent, received

        exchange_rounds(watched(), what)
        for message in arrived:
            message[len(message) // 2] ^= 1

    group.exchange_rounds = damage  # type: ignore[method-assign]
    try:
        sync_weights(action, group, source, target)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_damaged_message_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    action = layouts(tmp_path, "0", "1", 2)
    sender, receiver = ranks.run(2, bring_damaged, action, tiny_model())
    assert sender == ""
    assert "rank 1: weights of role 'policy' from rank 0 arrived damaged" in receiver


def bring_mixed_versions(action: SyncWeights, model: str) -> str:
    """The error if the trained ranks are not at the same update."""
    group, source, target = prepare(action, model, 5)
    if source is not None:
        source.policy_version = 7 + group.rank
    try:
        sync_weights(action, group, source, target)
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_of_several_versions_are_never_mixed(ranks: RankPool, tmp_path: Path) -> None:
    action = layouts(tmp_path, "0-1", "2", 3)
    messages = ranks.run(3, bring_mixed_versions, action, tiny_model())
    assert "rank 2: weights of role 'policy' are of policy versions 7 and 8" in messages[2]
