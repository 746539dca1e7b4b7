"""Instances of a plan: their engines, how their weights are divided and sent, and whether they take images alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import product
from pathlib import Path

import torch

from leaderless.config import Recipe, RecipeError
from leaderless.config.rollout import ExternalConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import Placement, Pool, Shape, everything, shard_rows
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.sent import SentWeights
from leaderless.distributed.weights.tensor_parallel import stage_rows
from leaderless.models.decoder import load_model_config
from leaderless.models.loading.support import sees_images
from leaderless.models.vision.image_readers import FamilyImageReader, open_reader
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Layout, Plan, RoleInstance, answering
from leaderless.planner.checks.engine_arguments import KEY
from leaderless.planner.checks.model_files import check_scorer, scorers_of
from leaderless.planner.engines import backend_of, engine_for, may_send_differences
from leaderless.planner.graph.adapters import companions_of
from leaderless.planner.memory.offload import where_frozen
from leaderless.planner.memory.rank import Room
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.rollout.external.arguments import check_installed
from leaderless.rollout.external.lora_slots import Sharing, shared_by
from leaderless.training.engine import ApartSetup, ShardingSetup, Trainable
from leaderless.worker.rank_info import RankInfo


def instances_of(role: str, plan: Plan, recipe: Recipe) -> dict[RoleInstance, tuple[bool, Sharing]]:
    """The instances of a role in a plan: whether each has an engine, if only for held-out prompts; who shares it."""
    every = plan.instances
    answers, own = answering(every, recipe.evaluation.role), [one for one in every if one.role == role]
    return {one: (one.has_engine or one == answers, shared_by(companions_of(recipe, every, one))) for one in own}


def check_engines(recipe: Recipe, plan: Plan, place: RankInfo, say: Callable[[str], None]) -> None:
    """Compare arguments for engines with those that they take, once on each machine that has them, and say which.

    Raises:
        RecipeError: The installed version of an engine does not have an argument, or cannot be asked.
    """
    first, compared = place.rank - place.local_rank, list[tuple[str, ExternalConfig]]()
    here = range(first, first + place.local_world_size)
    for one in plan.instances:
        external = recipe.as_seen_by(one.role).rollout.external
        answers = one.has_engine or one == answering(plan.instances, recipe.evaluation.role)
        own = [rank for rank in here if rank in one.layout]
        if answers and own[:1] == [place.rank] and (one.engine, external) not in compared:
            compared.append((one.engine, external))
            if said := check_installed(one.engine, external, one.role, recipe.key_of(KEY, one.role)):
                say(said)


def is_merged(instance: RoleInstance, recipe: Recipe) -> bool:
    """Whether the engine of an instance is given weights with adapters merged in."""
    config = recipe.model_of(instance.role)
    spec = engine_for(recipe.rollout, instance.engine)
    return config is not None and config.lora is not None and not spec.takes_adapters


def trains_like(old: RoleInstance, new: RoleInstance) -> bool:
    """Whether what trains or scores one instance can do so for another one, whatever generates."""
    fields = ("role", "layout", "is_trained", "is_critic", "num_updates", "is_engine_only")
    return all(getattr(old, name) == getattr(new, name) for name in fields)


def apart_setup(recipe: Recipe, logs: Path) -> ApartSetup | None:
    """How a back end starts processes of its own."""
    config = recipe.training.megatron
    if config.python is None:
        return None
    return ApartSetup(config.python, config.start_timeout_s, config.answer_timeout_s, logs)


def sharding_setup(
    recipe: Recipe, plan: Plan, instance: RoleInstance, room: Room, donor: Trainable | None
) -> ShardingSetup:
    """How a back end divides the weights of an instance, and where it keeps what is not used."""
    training = recipe.as_seen_by(instance.role).training
    return ShardingSetup(
        donor,
        room.keeps if training.keep_whole == "auto" else training.keep_whole,
        training.compile,
        room.max_logits,
        RunDirectory.offload_of(recipe),
        where_frozen(recipe, plan.instances, instance),
    )


def placement_of(recipe: Recipe, names: Iterable[str]) -> Placement:
    """How the back end of a role divides its weights, which have these names."""
    backend = backend_of(recipe.training.backend)
    if not backend.shards_weights or recipe.algorithm.sac is not None:
        return everything
    return stage_rows(names) if backend.shards_along_axes else shard_rows


def type_of_engines(role: str, recipe: Recipe) -> torch.dtype:
    """The type of weights that are sent to ranks that only generate."""
    config = recipe.model_of(role)
    assert config is not None, "checked by the planner"
    # Engines of a kind of run's own convert weights themselves.
    return torch.float32 if PRODUCTS[recipe.product].rollout_engine else getattr(torch, config.compute_dtype)


def way_to_engines(
    taker: RoleInstance, plan: Plan, recipe: Recipe, source: Layout, shapes: Mapping[str, Shape], world: ProcessGroup
) -> WeightRoute:
    """The way of weights from the ranks that train a role to ranks that only generate with it."""
    role, pools = taker.role, (Pool(source, placement_of(recipe, shapes)), Pool(taker.layout, everything))
    dtype = type_of_engines(role, recipe)
    route = WeightRoute(f"weights of role '{role}'", shapes, *pools, dtype, world.rank, is_gathered=True)
    hosts = {world.hosts[rank] for rank in route.ranks}
    is_on_host = world.payload_device.type == "cpu" or any(one.feeds(taker) for one in plan.channels)
    if _sends_differences(taker, recipe, hosts, is_on_host=is_on_host):
        route.sent = SentWeights()
    return route


def _sends_differences(taker: RoleInstance, recipe: Recipe, hosts: AbstractSet[int], *, is_on_host: bool) -> bool:
    """Whether weights are sent to an instance as differences, between ranks on some machines."""
    config = recipe.model_of(taker.role)
    assert config is not None, "checked by the planner"
    own_engine = PRODUCTS[recipe.product].rollout_engine
    if own_engine or (recipe.rollout.weights == "auto" and len(hosts) == 1):
        return False
    return may_send_differences(recipe.rollout, taker.engine, config, is_on_host=is_on_host)


_SIDES = (20, 56, 224, 333, 640, 1000, 2240, 6000)
"""Widths and heights in pixels of the images with which readers are compared."""


def check_readers(recipe: Recipe, plan: Plan) -> None:
    """Refuse models that would see no images, or would give them other tokens than the prompts have.

    Prompts are written once, for the model that answers; all other models but judges read the same tokens.

    Raises:
        RecipeError: A reward model reads text alone, or a model gives some image another number of tokens, or another
            token.
    """
    if not recipe.has_images:
        return
    scorers, first = scorers_of(plan.nodes), answering(plan.instances).role
    readers: dict[str, FamilyImageReader] = {}
    # Judges are asked in texts of their own.
    for role in dict.fromkeys((first, *(instance.role for instance in plan.instances if not instance.is_judge))):
        config = recipe.model_of(role)
        assert config is not None, "checked by the planner"
        described = load_model_config(config, role)
        if role in scorers:
            check_scorer(recipe, role, described.model_type)
        if sees_images(described):
            readers[role] = open_reader(config, role)
    for role, reader in readers.items():
        if first in readers and (problem := _difference(readers[first], reader)):
            raise RecipeError.at(
                f"models.{role}",
                f"{problem} for '{first}': give both models the same settings of images (preprocessor_config.json)",
            )


def _difference(first: FamilyImageReader, other: FamilyImageReader) -> str:
    """How another model takes images otherwise than the first one; empty if it does not."""
    if other.token != first.token:
        return f"images are token {other.token} for this model, but {first.token}"
    for height, width in product(_SIDES, _SIDES):
        wanted, found = _grid(first, height, width), _grid(other, height, width)
        if found != wanted:
            shapes = (f"{one[0]} x {one[1]} tokens" if one else "refused" for one in (found, wanted))
            return f"an image of {width} x {height} pixels is {' for this model, but '.join(shapes)}"
    return ""


def _grid(reader: FamilyImageReader, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of tokens of an image; None if the model does not take its shape."""
    try:
        return reader.grid(height, width)
    except ValueError:
        return None
