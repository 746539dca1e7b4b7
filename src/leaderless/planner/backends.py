"""What training back ends can do, as far as the planner needs to know. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.config import Recipe, RecipeError
from leaderless.config.functions import Declarations, Function, name_of
from leaderless.planner.layout import Layout, check_model_axes
from leaderless.planner.pipeline import check_pipeline

if TYPE_CHECKING:
    from leaderless.planner.model_size import ModelSize
    from leaderless.planner.parts import PlannedNode, RoleInstance

KEY = "training.backend"
"""Setting that names a back end."""


@dataclass(frozen=True)
class BackendSpec:
    """The contract of a training back end: what the planner needs to know to use it.

    Attributes:
        implementation: Function that makes its engines, as `package.module:function`; only workers import it.
        for_bodies: Function that makes those of policies and critics of bodies; empty if it is the same.
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
        for_bodies="leaderless.training.bodies:make_body_engine",
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
        spec = BackendSpec(
            name_of(function),
            trains,
            scores,
            values,
            shards_weights,
            tuple(axes),
            trains_adapters=trains_adapters,
            divides_experts=divides_experts,
        )
        return BACKENDS.declare(function, spec)

    return declare


def backend_of(name: str, key: str = KEY) -> BackendSpec:
    """The contract of a back end: a built-in one, or a function declared with `@train_backend`.

    Raises:
        RecipeError: There is no such back end, or the function cannot be used as one; the error is at the setting
            `key`.
    """
    return BACKENDS.find(name, key, BUILTIN_BACKENDS)


def check_backends(recipe: Recipe, instances: Sequence[RoleInstance]) -> None:
    """Refuse back ends that cannot do what the models of a plan are for.

    Raises:
        RecipeError: There is no such back end, or it lacks a capability.
    """
    for instance in instances:
        role, name = instance.role, recipe.as_seen_by(instance.role).training.backend
        key = recipe.key_of(KEY, role)
        spec, model = backend_of(name, key), recipe.model_of(role)
        has_adapters = model is not None and model.lora is not None
        lacking = {
            "train models": instance.is_trained and not spec.trains,
            "score tokens": instance.scores and not instance.is_critic and not spec.scores,
            "hold value models": instance.is_critic and not spec.values,
            "train adapters": has_adapters and not spec.trains_adapters,
        }
        for capability, is_lacking in lacking.items():
            if is_lacking:
                raise RecipeError.at(
                    key,
                    f"'{name}' cannot {capability}, as role '{role}' needs: use another back end, such as fsdp, or "
                    "declare it with @leaderless.train_backend(...) if it can",
                )
        _check_settings(recipe, role, spec)


def _check_settings(recipe: Recipe, role: str, spec: BackendSpec) -> None:
    """Refuse settings that only layers of language models have, which the package's own back end holds."""
    training = recipe.as_seen_by(role).training
    for name, value in (("keep_whole", training.keep_whole), ("compile", training.compile)):
        if value not in {"auto", False} and (recipe.body is not None or not spec.gathers_layers):
            others = "models of bodies" if recipe.body is not None else "other back ends than fsdp"
            key = recipe.key_of(f"training.{name}", role)
            raise RecipeError.at(key, f"'{value}' has no effect on {others}: leave it out")


def check_axes(recipe: Recipe, node: PlannedNode) -> None:
    """Refuse a layout of a node with a model that the model's back end cannot have.

    Raises:
        RecipeError: The back end is not declared to have several ranks along an axis, or to divide experts; or the node
            has experts to divide, but no model that a back end holds.
    """
    roles = [role for role, use in node.uses if use not in {"generate", "judge"}]
    if node.layout.ep > 1 and not roles and node.name in recipe.layout:
        raise RecipeError.at(
            f"layout.{node.name}.ep",
            f"ep={node.layout.ep}: node '{node.name}' neither trains nor scores a model, and only such nodes divide "
            "experts: leave it out, or give it to a node that does",
        )
    for role in roles:
        backend = recipe.as_seen_by(role).training.backend
        spec = backend_of(backend)
        can = ("dp", *spec.axes)
        if node.layout.ep > 1 and not spec.divides_experts:
            raise RecipeError.at(
                f"layout.{node.name}.ep",
                f"ep={node.layout.ep}: the back end '{backend}' of '{role}' does not divide experts: leave it out, use "
                "fsdp, or declare it with @leaderless.train_backend(divides_experts=True) if it does",
            )
        wrong = [axis for axis in node.layout.axes if axis not in can]
        if wrong:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"{node.layout}: the back end '{backend}' divides the ranks of a model by {' and '.join(can)} only; "
                f"leave out {' and '.join(wrong)}",
            )


def check_heads(
    recipe: Recipe,
    nodes: Sequence[PlannedNode],
    instances: Sequence[RoleInstance],
    sizes: Mapping[str, ModelSize | None],
) -> None:
    """Refuse tensor, pipeline and expert parallelism that do not divide a model whose size is known.

    Raises:
        RecipeError: A number of the model is no multiple of `tp`, or that of its experts of `ep`; or there are too few
            layers for `pp`.
    """
    for instance in instances:
        size, layout = sizes.get(instance.role), instance.layout
        if size is None or instance.is_engine_only or layout.tp * layout.pp * layout.ep == 1:
            continue
        node = next(one.name for one in nodes if one.layout == layout and instance.role in dict(one.uses))
        counts = size.num_heads, size.num_kv_heads, size.intermediate_size
        check_divides(f"layout.{node}.tp", instance.role, layout.tp, counts)
        backend = backend_of(recipe.as_seen_by(instance.role).training.backend)
        if layout.pp > 1 and backend.shards_along_axes:
            num_added = size.vision.num_added if size.vision else 0
            key = f"layout.{node}.pp"
            check_pipeline(key, layout.pp, size.num_layers, num_added=num_added)
        if layout.tp > 1 and layout.ep == 1 and size.num_experts and backend.shards_along_axes:
            raise RecipeError.at(f"layout.{node}.ep", whole_experts(layout.tp))
        if layout.ep > 1:
            check_experts(f"layout.{node}.ep", instance.role, layout.ep, size.num_experts)


def check_divides(key: str, role: str, tp: int, counts: tuple[int, int, int]) -> None:
    """Refuse tensor parallelism that does not divide attention heads, heads of keys or inner features of a model.

    Raises:
        RecipeError: One of these counts is no multiple of `tp`; the error is at the key.
    """
    names = "attention heads", "heads of keys", "inner features"
    for name, count in zip(names, counts, strict=True):
        if count % tp:
            able = ", ".join(str(one) for one in range(1, min(counts) + 1) if not any(count % one for count in counts))
            raise RecipeError.at(key, f"tp={tp} does not divide the {count} {name} of '{role}': it can be {able}")


def whole_experts(tp: int) -> str:
    """What is wrong with layers that ranks along `tp` divide, but not their experts."""
    return (
        f"ranks along tp={tp} divide attention, but each would have all experts: set ep, as to {tp}, so that they "
        "divide these, too; or leave out tp"
    )


def check_experts(key: str, role: str, ep: int, count: int) -> None:
    """Refuse expert parallelism that does not divide the experts of a model.

    Raises:
        RecipeError: The model has none, or their count is no multiple of `ep`; the error is at the key.
    """
    if not count:
        raise RecipeError.at(key, f"ep={ep}: the model of '{role}' has no experts that ranks can divide: leave it out")
    if count % ep:
        able = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
        raise RecipeError.at(key, f"ep={ep} does not divide the {count} experts of '{role}': it can be {able}")
