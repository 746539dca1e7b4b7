"""Abilities of rollout engines, as far as the planner needs to know. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leaderless.base.named_functions import Declarations, Function, name_of
from leaderless.config.rollout import RolloutConfig
from leaderless.planner.layout import Layout, check_model_axes

if TYPE_CHECKING:
    pass

KEY = "rollout.engine"
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
    ),
    "vllm": RolloutEngineSpec(
        "leaderless.rollout.make_engine:make_vllm",
        ("tp",),
        may_restart=True,
        is_probed=True,
        updates=("recompute",),
        takes_adapters=True,
        takes_images=True,
        records_experts=True,
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


def engine_of(name: str, key: str = KEY) -> RolloutEngineSpec:
    """The contract of an engine: a built-in one, or a function declared with `@rollout_engine`. `key` names it.

    Raises:
        RecipeError: There is no such engine, or the function cannot be used as one.
    """
    return ENGINES.find(name, key, BUILTIN_ENGINES)


def engine_for(rollout: RolloutConfig, name: str) -> RolloutEngineSpec:
    """The contract of an engine as some settings use it: other engines than the native one may get merged weights."""
    spec = engine_of(name)
    return replace(
        spec, takes_adapters=spec.takes_adapters and not (spec.keeps_weights and rollout.external.merge_adapters)
    )
