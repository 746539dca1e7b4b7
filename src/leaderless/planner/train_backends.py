"""Abilities of training back ends, as far as the planner needs to know. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.base.named_functions import Declarations, Function, name_of
from leaderless.planner.layout import Layout, check_model_axes

if TYPE_CHECKING:
    pass

KEY = "training.backend"
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
        lends_weights: Whether engines of several roles with adapters on one model have its other weights once.
        keeps_parts: Whether each rank keeps all of its part along `tp` and `pp`, with its optimizer, whatever `dp` is;
            weights that it hands out are divided all the same.
        reads_parts: Whether each rank reads only its own part of the weights.
        gathers_layers: Whether ranks gather weights as they compute, so that they may keep them whole.
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
    lends_weights: bool = False
    keeps_parts: bool = False
    reads_parts: bool = False
    gathers_layers: bool = False
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
        lends_weights=True,
        reads_parts=True,
        gathers_layers=True,
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

    Raises:
        ValueError: An axis is unknown.
    """
    check_model_axes("train_backend", axes)

    def declare(function: Function) -> Function:
        own = trains, scores, values, shards_weights, tuple(axes)
        able = BackendSpec(name_of(function), *own, trains_adapters=trains_adapters, divides_experts=divides_experts)
        return BACKENDS.declare(function, able)

    return declare


def backend_of(name: str, key: str = KEY) -> BackendSpec:
    """The contract of a back end: a built-in one, or a function declared with `@train_backend`.

    Raises:
        RecipeError: There is no such back end, or the function cannot be used as one; the error is at the setting
            `key`.
    """
    return BACKENDS.find(name, key, BUILTIN_BACKENDS)
