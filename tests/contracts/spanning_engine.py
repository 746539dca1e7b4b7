"""A rollout engine over several ranks, as a user might write one: each has the output head of a part of the tokens."""

from __future__ import annotations

import torch
from tests.contracts.plain_engine import PlainEngine
from torch import Tensor

from leaderless import RolloutSetup, rollout_engine
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Delta


class SpanningEngine(PlainEngine):
    """See `RolloutEngine`. What comes before the head is computed on each rank."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        super().load_weights(weights, keep_cache=keep_cache)
        head: Tensor = self.model.lm_head.weight.detach()
        place = self.setup.layout.place_in_shard(self.setup.rank)
        self.head = head.tensor_split(self.setup.shard.size)[place].clone()

    def logits(self, texts: Tensor) -> Tensor:
        hidden = self.model.model(texts).last_hidden_state
        parts = self.setup.shard.gather(self.head @ hidden.flatten(0, 1).T, "logits of other tokens")
        return torch.cat(parts).T.unflatten(0, texts.shape)


class BreakingEngine(SpanningEngine):
    """Its part on the last rank fails in the second iteration."""

    def logits(self, texts: Tensor) -> Tensor:
        if self.policy_version and self.setup.rank == self.setup.shard.ranks[-1]:
            raise EngineError("this part is broken")
        return super().logits(texts)


class DifferingEngine(SpanningEngine):
    """Its part on the last rank reports other tokens than it has sampled."""

    def step(self) -> list[Delta]:
        offset = int(self.setup.rank == self.setup.shard.ranks[-1])
        return [delta._replace(tokens=[token ^ offset for token in delta.tokens]) for delta in super().step()]


@rollout_engine(axes=["tp"])
def make(setup: RolloutSetup) -> SpanningEngine:
    """Make the part of a rank."""
    return SpanningEngine(setup)


@rollout_engine(axes=["tp"])
def make_breaking(setup: RolloutSetup) -> SpanningEngine:
    """Make the part of a rank of an engine that breaks."""
    return BreakingEngine(setup)


@rollout_engine(axes=["tp"])
def make_differing(setup: RolloutSetup) -> SpanningEngine:
    """Make the part of a rank of an engine that samples differently on its ranks."""
    return DifferingEngine(setup)
