"""One model, and the adapters that clients have on it.

All instances use the memory of the same weights, which never change; each has adapters of its own:

    weights of the model (once) <- trainer of client A: adapters, gradient, optimizer
                                <- trainer of client B
                                <- engines that generate, each with the adapters of one client at a time
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.base.devices import release_memory
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig, TrainingConfig
from leaderless.config.rollout import RolloutConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.causal_lm import CausalLM
from leaderless.models.lora.linear import adapted_layers
from leaderless.planner import Layout
from leaderless.planner.graph.adapters import A
from leaderless.planner.memory.limits import CachePool
from leaderless.rollout.make_engine import RolloutSetup, make_native
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.training.engine import EngineSetup, PassByPassEngine, ShardingSetup, make_train_engine
from leaderless.training.micro_batches import MicroBatch

WEIGHTS = "weights."
"""Start of the names of weights in the state of an engine."""
ROLE = "policy"
MOST_ENGINES = 8
"""Idle engines that are kept for later requests."""

Weights = Mapping[str, Tensor]
"""Matrices of adapters by name."""


@dataclass(frozen=True)
class AdapterShape:
    """Which layers have adapters, and of which rank.

    Attributes:
        rank: Rank of all of them.
        attention: Whether layers of attention have some.
        others: Whether all other linear layers have some.
    """

    rank: int
    attention: bool = True
    others: bool = True


@dataclass
class AdaptedModel:
    """The model that all clients share.

    Attributes:
        name: Name for clients.
        config: Model, without adapters.
        tokenizer: Its tokenizer.
        end_tokens: Tokens that end a response.
        max_context: Most tokens of a sequence.
        max_sequences: Responses that an engine samples at a time.
        pass_tokens: Most tokens of a pass, if no sequence is longer.
        device: Device that computes.
        logs: Folder for output of engines.
        pool: Memory of an engine for keys and values; None to take it as needed.
        say: Function that shows a message to the user.
        arch: Family of the model.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    max_context: int
    max_sequences: int
    pass_tokens: int
    device: torch.device
    logs: Path
    pool: CachePool | None
    say: Callable[[str], None]
    arch: str = ""
    _idle: list[tuple[AdapterShape, NativeEngine]] = field(default_factory=list)
    _scorers: dict[AdapterShape, PassByPassEngine] = field(default_factory=dict)
    _generating: CausalLM | None = None

    def __post_init__(self) -> None:
        """Load the model."""
        self._donor = self._instance(LoraConfig(rank=1), None, None)
        self.base_weights = snapshot(self._donor)
        """Adapters that add nothing, of rank 1 on all layers."""
        if self._donor.is_plain:  # else engines compute in another type than the weights of a trainer have
            self._generating = self._donor.model

    @property
    def vocabulary(self) -> int:
        """Number of tokens with an embedding."""
        return self._donor.vocab_size

    def adapted(self, shape: AdapterShape) -> ModelConfig:
        """The model with adapters of a shape, whose scale is 32 / rank.

        Raises:
            ValueError: No layer would have any.
        """
        return self.config.model_copy(update={"lora": LoraConfig(rank=shape.rank, targets=self._targets(shape))})

    def _targets(self, shape: AdapterShape) -> str | tuple[str, ...]:
        if shape.attention and shape.others:
            return "all-linear"
        names = [name for name, _ in adapted_layers(self._donor.model.model)]
        chosen = [name for name in names if _is_attention(name) == shape.attention]
        if not chosen or (shape.attention == shape.others):
            raise ValueError("no layer would have adapters: set train_attn or train_mlp")
        return tuple(sorted({name.rpartition(".")[2] for name in chosen}))

    def trainer(self, shape: AdapterShape, seed: int | None) -> PassByPassEngine:
        """A new instance to train, whose adapters add nothing yet.

        Args:
            shape: Layers with adapters, and their rank.
            seed: Seed of A; None for the numbers with which a run begins.
        """
        engine = self._instance(self.adapted(shape).lora, OptimizerConfig(), self._donor)
        if seed is not None:
            for name, matrix in engine.state().items():
                if name.endswith(A):
                    _local(matrix).copy_(_drawn(f"{seed}/{name.removeprefix(WEIGHTS)}", matrix.shape))
        return engine

    def _instance(
        self, lora: LoraConfig | None, optimizer: OptimizerConfig | None, donor: PassByPassEngine | None
    ) -> PassByPassEngine:
        setup = EngineSetup(
            role=ROLE,
            model=self.config.model_copy(update={"lora": lora}),
            is_critic=False,
            layout=Layout((0,), 1),
            process_group=ALONE,
            axis_groups={"dp": ALONE},
            device=self.device,
            optimizer=optimizer,
            num_updates=0,
            micro_batch_tokens=self.pass_tokens,
            sharding=ShardingSetup(donor=donor),
        )
        return cast("PassByPassEngine", make_train_engine(TrainingConfig().backend, setup))

    def scorer(self, shape: AdapterShape, weights: Weights) -> PassByPassEngine:
        """An instance with some adapters, to score tokens until it is asked for again."""
        if shape not in self._scorers:
            self._scorers[shape] = self._instance(self.adapted(shape).lora, None, self._donor)
        set_weights(self._scorers[shape], weights)
        return self._scorers[shape]

    def engine(self, shape: AdapterShape, weights: Weights) -> NativeEngine:
        """An engine with some adapters, which ends no response by itself; to be given back."""
        place = next((place for place, (own, _) in enumerate(self._idle) if own == shape), None)
        found = self._new_engine(shape) if place is None else self._idle.pop(place)[1]
        found.load_weights(WeightStream(iter(weights.items()), 0))
        return found

    def _new_engine(self, shape: AdapterShape) -> NativeEngine:
        setup = RolloutSetup(
            role=ROLE,
            rollout=RolloutConfig(max_sequences=self.max_sequences),
            model=self.adapted(shape),
            max_tokens=self.max_context,
            tokenizer=self.tokenizer,
            layout=Layout((0,), 1),
            shard=ALONE,
            world_size=1,
            device=self.device,
            logs=self.logs,
            report=self.say,
            donor=self._generating,
            pool=self.pool,
        )
        engine = make_native(setup)
        assert isinstance(engine, NativeEngine)
        self._generating = self._generating or engine.model
        engine.end_tokens = frozenset()  # each request has its own
        return engine

    def give_back(self, shape: AdapterShape, engine: NativeEngine) -> None:
        """Take back an engine without responses in progress."""
        engine.sleep(keep_weights=False)
        self._idle.append((shape, engine))
        for _, old in self._idle[:-MOST_ENGINES]:
            old.close()
        del self._idle[:-MOST_ENGINES]
        release_memory(self.device)


def _is_attention(layer: str) -> bool:
    """Whether a layer is part of attention, by its name."""
    return any("attn" in part or "attention" in part for part in layer.split("."))


def _drawn(key: str, shape: torch.Size) -> Tensor:
    """A matrix A, uniform as in `add_adapters`, from a key."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def _local(value: Tensor) -> Tensor:
    """The memory of a tensor, of which one rank has all."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_state(engine: PassByPassEngine) -> dict[str, Tensor]:
    """Weights and what the optimizer keeps, in the memory that training changes."""
    return {name: _local(value) for name, value in engine.state().items()}


def snapshot(engine: PassByPassEngine) -> dict[str, Tensor]:
    """Copies of the adapters."""
    state = local_state(engine).items()
    return {name.removeprefix(WEIGHTS): value.clone() for name, value in state if name.startswith(WEIGHTS)}


def set_weights(engine: PassByPassEngine, weights: Weights) -> None:
    """Write adapters into an instance."""
    with torch.no_grad():
        for name, value in local_state(engine).items():
            if name.startswith(WEIGHTS):
                value.copy_(weights[name.removeprefix(WEIGHTS)])
    engine.state_loaded(0)


def packed(tokens: list[Tensor], targets: list[Tensor]) -> MicroBatch:
    """A pass over whole sequences, one after the other, which scores a target after each token."""
    lengths = torch.tensor([len(one) for one in tokens])
    count = int(lengths.sum())
    return MicroBatch(
        tokens=torch.cat(tokens),
        positions=torch.cat([torch.arange(len(one)) for one in tokens]),
        families=[Family(len(one), ()) for one in tokens],
        select=torch.arange(count),
        targets=torch.cat(targets),
        response_index=torch.arange(count),
        response_lengths=lengths,
    )


def cut(lengths: list[int], most: int) -> Iterator[range]:
    """Cut sequences into passes of at most some tokens, in their order; a longer one has a pass of its own."""
    begin = num_tokens = 0
    for place, length in enumerate(lengths):
        if place > begin and num_tokens + length > most:
            yield range(begin, place)
            begin, num_tokens = place, 0
        num_tokens += length
    if lengths:
        yield range(begin, len(lengths))
