"""Policies of bodies that are computed in pieces: ranks whose episodes have other lengths gather layers together."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_bodies import played, setup, share_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.small_bodies import Bins, Worth
from torch import Tensor, nn

from leaderless.config.environment import PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import Transport
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.embodied.training.policy_engine import BodyPolicyEngine, BodyValueEngine, make_body_engine


class Layer(nn.Linear):
    """A layer that is gathered alone."""


class Layered(Bins):
    """A policy with layers that are gathered one by one."""

    _no_split_modules: ClassVar = ["Layer"]

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.inner = Layer(self.inner.in_features, self.inner.out_features)


class LayeredWorth(Worth):
    """A critic of the same."""

    _no_split_modules: ClassVar = ["Layer"]

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.inner = Layer(self.inner.in_features, self.inner.out_features)


def train(micro_batch_tokens: int) -> Numbers:
    """Scores, values, the gradient's norm and weights of an update, in pieces."""
    transport, numbers = Transport(torch.device("cpu"), timeout_s=30), Numbers()
    batch = share_of(played("token"), transport)
    gains = batch.jagged("rollout_log_probs").values.cos()

    def engine_of(kind: str, *, is_critic: bool) -> object:
        own = setup(transport, "token", "Bins", micro_batch_tokens, is_critic=is_critic)
        model = ModelConfig(body=PolicyConfig(type=f"{__name__}:{kind}"), gradient_checkpointing=True)
        return make_body_engine(replace(own, model=model))

    policy, critic = engine_of("Layered", is_critic=False), engine_of("LayeredWorth", is_critic=True)
    assert isinstance(policy, BodyPolicyEngine)
    assert isinstance(critic, BodyValueEngine)
    assert len(policy.units) == len(critic.units) == (0 if transport.world.size == 1 else 2)
    for row, scores, values in zip(
        batch.ids.tolist(), policy.log_probs(batch).rows(), critic.values(batch).rows(), strict=True
    ):
        numbers[f"scores.{row}"], numbers[f"values.{row}"] = scores, values
    for engine in (policy, critic):
        for micro_batch in engine.micro_batches(batch):
            loss_of(engine, micro_batch, gains[micro_batch.response_index]).backward()
        numbers[f"norm.{type(engine).__name__}"] = torch.tensor(engine.optimizer_step().grad_norm)
        numbers |= {f"{type(engine).__name__}.{name}": value.clone() for name, value in engine.full_weights()}
    return numbers


def loss_of(engine: BodyPolicyEngine | BodyValueEngine, micro_batch: object, gains: Tensor) -> Tensor:
    if isinstance(engine, BodyValueEngine):
        values = engine.forward(micro_batch)  # type: ignore[arg-type]
        return (gains * values).sum() + 0.0 * values.sum()
    outputs = engine.forward(micro_batch, "gradient")  # type: ignore[arg-type]
    return (gains * (outputs.log_probs + 0.3 * outputs.entropies)).sum() + 0.0 * outputs.log_probs.sum()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_whose_episodes_have_other_lengths_learn_like_one(ranks: RankPool, size: int) -> None:
    (expected,) = ranks.run(1, train, 1 << 20)
    assert largest_difference(ranks.run(1, train, 2), expected) < 1e-5
    for micro_batch_tokens in (2, 8):  # one decision at once, and four
        assert largest_difference(ranks.run(size, train, micro_batch_tokens), expected) < 1e-5
