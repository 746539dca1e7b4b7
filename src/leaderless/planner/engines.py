"""Abilities of rollout engines and of training back ends, as far as the planner needs to know. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import get_args

from leaderless.base.devices import find_accelerator
from leaderless.base.named_functions import Declarations, Function, name_of
from leaderless.config.models import ModelConfig, OptimizerType
from leaderless.config.rollout import RolloutConfig
from leaderless.planner.layout import Layout, check_model_axes

ENGINE_KEY = "rollout.engine"
"""Setting that names an engine."""
UPDATES = ("keep", "recompute")
"""Possible treatments of keys and values of responses in progress when new weights come."""


@dataclass(frozen=True)
class RolloutEngineSpec:
    """The contract of a rollout engine: what the planner needs to know to use it.

    Attributes:
        implementation: Function that makes it, as `package.module:function`; only workers import it.
        axes: Axes of a layout other than `dp` along which an engine may have ranks, which take the same requests.
        keeps_weights: Whether it has weights of its own, besides the weights of a trainer on the same ranks.
        may_restart: Whether it may lose its weights and ask for them again, where it has one rank.
        is_probed: Whether it is always given a text with the trainer's log-probabilities, to compare with its own.
        updates: Possible treatments of keys and values when new weights arrive while requests are in progress: `keep`,
            `recompute`; empty if weights can be taken only between requests.
        takes_adapters: Whether it computes with adapters of low rank itself, so that only these are sent to it; else it
            is sent weights with the adapters merged in.
        takes_images: Whether prompts may have images.
        records_experts: Whether it can record which experts it chooses.
        most_support: Largest `top_k` with which it can record the tokens that could be drawn; 0 if it cannot, and None
            if it can whatever leaves tokens out.
        divides_experts: Whether the ranks along `tp` can have whole experts each, in place of a part of every expert.
        is_elsewhere: Whether it was started elsewhere, so that its memory is none of this run's.
        works_in_steps: Whether it works only while it takes a step, so that other ranks may use its device in between.
    """

    implementation: str
    axes: tuple[str, ...] = ()
    keeps_weights: bool = True
    may_restart: bool = False
    is_probed: bool = False
    updates: tuple[str, ...] = ()
    takes_adapters: bool = False
    takes_images: bool = False
    records_experts: bool = False
    most_support: int | None = 0
    divides_experts: bool = False
    is_elsewhere: bool = False
    works_in_steps: bool = True

    def compares(self, *, has_adapters: bool) -> bool:
        """Whether it is given the log-probabilities of a text: always, or if it adds adapters to weights of its own."""
        return self.is_probed or (has_adapters and self.takes_adapters)

    def restarts_on(self, layout: Layout) -> bool:
        """Whether it starts again by itself: ranks that make one engine together can only all start again."""
        return self.may_restart and layout.ranks_per_shard == 1


ENGINES = Declarations("engine", RolloutEngineSpec, "@leaderless.rollout_engine(...)")
BUILTIN_ENGINES = {
    "native": RolloutEngineSpec(
        "leaderless.rollout.make_engine:make_native",
        keeps_weights=False,
        updates=UPDATES,
        takes_adapters=True,
        takes_images=True,
        records_experts=True,
        most_support=None,
    ),
    "vllm": RolloutEngineSpec(
        "leaderless.rollout.make_engine:make_vllm",
        ("tp", "pp"),
        may_restart=True,
        is_probed=True,
        updates=("recompute",),
        takes_adapters=True,
        takes_images=True,
        records_experts=True,
        most_support=256,
        divides_experts=True,
        works_in_steps=False,
    ),
    "sglang": RolloutEngineSpec(
        "leaderless.rollout.make_engine:make_sglang",
        may_restart=True,
        is_probed=True,
        updates=("recompute",),
        takes_adapters=True,
        records_experts=True,
        works_in_steps=False,
    ),
}


def rollout_engine(
    *,
    axes: Sequence[str] = (),
    keeps_weights: bool = True,
    may_restart: bool = False,
    is_probed: bool = False,
    updates: Sequence[str] = (),
    takes_images: bool = False,
) -> Callable[[Function], Function]:
    """Declare a function as one that makes a rollout engine, which recipes name as `package.module:function`.

    The function takes a `RolloutSetup` and returns a `RolloutEngine`.

    Args:
        axes: Axes of a layout, of `tp`, `pp` and `cp`, along which one engine may have several ranks, which are given
            the same requests and return the same tokens.
        keeps_weights: Whether it has weights of its own, besides the weights of a trainer on the same ranks.
        may_restart: Whether it may lose its weights and ask for them again, where it has one rank.
        is_probed: Whether it is given a text with the trainer's log-probabilities, to compare with its own.
        updates: Possible treatments of keys and values when new weights arrive while requests are in progress: `keep`,
            `recompute`; empty if weights can be taken only between requests.
        takes_images: Whether it takes requests whose prompts have images.

    Raises:
        ValueError: An axis or an update is unknown.
    """
    check_model_axes("rollout_engine", axes)
    for update in updates:
        if update not in UPDATES:
            raise ValueError(f"@rollout_engine(updates={list(updates)}): '{update}' is none of {', '.join(UPDATES)}")

    def declare(function: Function) -> Function:
        own = tuple(axes), keeps_weights, may_restart, is_probed, tuple(updates)
        return ENGINES.declare(function, RolloutEngineSpec(name_of(function), *own, takes_images=takes_images))

    return declare


def engine_of(name: str, key: str = ENGINE_KEY) -> RolloutEngineSpec:
    """The contract of an engine, built in or declared with `@rollout_engine`; errors are at the setting `key`."""
    return ENGINES.find(name, key, BUILTIN_ENGINES)


def may_send_differences(rollout: RolloutConfig, engine: str, model: ModelConfig, *, is_on_host: bool) -> bool:
    """Whether new weights may go to an engine on other ranks as differences; if `auto`, only between machines.

    In float32, as AdamW leaves weights, nearly all numbers change. Weights before are in host memory: where others are
    not there (`is_on_host`), to bring both together may take longer than to send all numbers.
    """
    if rollout.weights == "whole" or (model.lora is not None and engine_for(rollout, engine).takes_adapters):
        return False
    return rollout.weights == "difference" or (is_on_host and model.compute_dtype != "float32")


def engine_for(rollout: RolloutConfig, name: str) -> RolloutEngineSpec:
    """The contract of an engine as some settings use it: other engines than the native one may get merged weights."""
    spec, external = engine_of(name), rollout.external
    return replace(
        spec,
        takes_adapters=spec.takes_adapters and not (spec.keeps_weights and external.merge_adapters),
        is_elsewhere=bool(external.addresses),
    )


def choose_engine(rollout: RolloutConfig) -> str:
    """Choose vLLM if it runs elsewhere, or if there are it and a CUDA device here; else the native engine."""
    external = rollout.external
    if external.addresses:
        return "vllm"
    has_vllm = external.python is not None or find_spec("vllm") is not None
    return "vllm" if has_vllm and find_accelerator() == "cuda" else "native"


OPTIMIZERS: tuple[str, ...] = get_args(OptimizerType)
BACKEND_KEY = "training.backend"
"""Setting that names a back end."""


@dataclass(frozen=True)
class BackendSpec:
    """The contract of a training back end: what the planner needs to know to use it.

    Attributes:
        implementation: Function that makes its engines, as `package.module:function`; only workers import it.
        for_bodies: Function that makes engines of policies and critics of bodies; empty if it is the same.
        trains: Whether it changes weights.
        scores: Whether it computes log-probabilities of language models.
        values: Whether it holds value models.
        shards_weights: Whether data-parallel ranks divide weights and optimizer, instead of holding all of them each.
        axes: Axes of a layout other than `dp` along which an engine may have several ranks, which hold the same rows.
        shards_along_axes: Whether the ranks along these axes divide weights and optimizer, too.
        trains_adapters: Whether it can train adapters in place of weights, and hand out weights with these merged in.
        divides_experts: Whether ranks can keep some experts of a layer each, as `layout.<node>.ep` asks.
        knows_experts: Whether its engines replay choices of experts, and balance their loads.
        knows_support: Whether its engines score tokens over the words alone that these could be drawn as.
        distills: Whether its language models can learn the distributions of others, and be learned from.
        lends_weights: Whether engines of several roles with adapters on one model have its other weights once.
        keeps_parts: Whether each rank keeps all of its part along `tp` and `pp`, with its optimizer, whatever `dp` is;
            weights that it hands out are divided all the same.
        reads_parts: Whether each rank reads only its own part of the weights.
        gathers_layers: Whether ranks gather weights as they compute, so that they may keep them whole.
        moves_frozen: Whether weights that are only scored may wait elsewhere, as `training.offload_frozen` asks.
        packs_weights: Whether weights under adapters can have 4 bits.
        optimizers: Values of `optimizer.type` that it follows; only with several, it follows `optimizer.state_dtype`
            and `optimizer.offload`.
    """

    implementation: str
    trains: bool = True
    scores: bool = True
    values: bool = True
    shards_weights: bool = True
    axes: tuple[str, ...] = ()
    shards_along_axes: bool = False
    trains_adapters: bool = False
    divides_experts: bool = False
    knows_experts: bool = False
    knows_support: bool = False
    distills: bool = False
    lends_weights: bool = False
    keeps_parts: bool = False
    reads_parts: bool = False
    gathers_layers: bool = False
    moves_frozen: bool = False
    packs_weights: bool = False
    optimizers: tuple[str, ...] = ("adamw",)
    for_bodies: str = ""

    def num_shards(self, layout: Layout) -> int:
        """Number of parts into which the ranks of a layout divide weights and optimizer."""
        if not self.shards_weights:
            return 1
        if self.keeps_parts:
            return layout.tp * layout.pp
        return len(layout.ranks) if self.shards_along_axes else layout.dp


BACKENDS = Declarations("back end", BackendSpec, "@leaderless.train_backend(...)")
BUILTIN_BACKENDS = {
    "fsdp": BackendSpec(
        "leaderless.training.fsdp:make_engine",
        axes=("cp", "tp", "pp"),
        shards_along_axes=True,
        trains_adapters=True,
        divides_experts=True,
        knows_experts=True,
        knows_support=True,
        lends_weights=True,
        reads_parts=True,
        gathers_layers=True,
        distills=True,
        moves_frozen=True,
        packs_weights=True,
        optimizers=OPTIMIZERS,
        for_bodies="leaderless.embodied.training.policy_engine:make_body_engine",
    ),
    "megatron": BackendSpec(
        "leaderless.training.megatron.engine:make_engine",
        values=False,
        axes=("pp", "tp"),
        divides_experts=True,
        keeps_parts=True,
    ),
}


def train_backend(
    *,
    trains: bool = True,
    scores: bool = True,
    values: bool = False,
    shards_weights: bool = False,
    axes: Sequence[str] = (),
    trains_adapters: bool = False,
    divides_experts: bool = False,
    optimizers: Sequence[str] = ("adamw",),
) -> Callable[[Function], Function]:
    """Declare a function as a training back end, which recipes name as `package.module:function`.

    The function takes an `EngineSetup` and returns a `TrainEngine`, or a `ValueEngine` for a value model.

    Args:
        trains: Whether it changes weights.
        scores: Whether it computes log-probabilities of language models.
        values: Whether it holds value models.
        shards_weights: Whether data-parallel ranks divide weights and optimizer, instead of holding all of them each.
        axes: Axes of a layout, of `tp`, `pp` and `cp`, along which an engine may have several ranks; they hold the same
            rows, and compute or share what it takes to have the same results.
        trains_adapters: Whether its engines of language models are `AdaptedEngine` if `models.ROLE.lora` is given.
        divides_experts: Whether ranks can keep some experts of a layer each, as `layout.<node>.ep` asks.
        optimizers: Values of `optimizer.type` that its engines follow. With more than `adamw`, they also follow
            `optimizer.state_dtype` and `optimizer.offload`; `leaderless.training.optimizers.make_optimizer` follows
            all.

    Raises:
        ValueError: An axis or an optimizer is unknown.
    """
    check_model_axes("train_backend", axes)
    if unknown := [name for name in optimizers if name not in OPTIMIZERS]:
        raise ValueError(f"@train_backend(optimizers=...) names {unknown[0]!r}: it can have {', '.join(OPTIMIZERS)}")

    def declare(function: Function) -> Function:
        own = trains, scores, values, shards_weights, tuple(axes)
        able = BackendSpec(
            name_of(function),
            *own,
            trains_adapters=trains_adapters,
            divides_experts=divides_experts,
            optimizers=tuple(optimizers),
        )
        return BACKENDS.declare(function, able)

    return declare


def backend_of(name: str, key: str = BACKEND_KEY) -> BackendSpec:
    """The contract of a back end, built in or declared with `@train_backend`; errors are at the setting `key`."""
    return BACKENDS.find(name, key, BUILTIN_BACKENDS)
