"""Models of known size that cannot be divided, adapted or replayed as a plan asks."""

from __future__ import annotations

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig
from leaderless.planner.checks.draft import Draft
from leaderless.planner.graph.adapters import lora_of
from leaderless.planner.memory.pipeline_stages import check_adapted_stages, check_pipeline
from leaderless.planner.memory.vision_size import sees
from leaderless.planner.rollout_engines import BUILTIN_ENGINES, engine_for, engine_of
from leaderless.planner.rollout_engines import KEY as ENGINE
from leaderless.planner.train_backends import KEY as BACKEND
from leaderless.planner.train_backends import backend_of

MOST_EXPERTS = 255
"""Experts whose numbers fit into one byte, of which one says that none was recorded."""
REPLAY, BALANCE = "algorithm.replay_experts", "algorithm.expert_balance"


def check_heads(draft: Draft) -> None:
    """Ranks along `tp`, `pp` and `ep` divide heads, layers and experts."""
    for instance, recipe in draft.seen():
        size, layout = draft.sizes.get(instance.role), instance.layout
        if size is None or instance.is_engine_only or layout.tp * layout.pp * layout.ep == 1:
            continue
        key, divides = f"layout.{draft.node_of(instance)}", backend_of(recipe.training.backend).shards_along_axes
        counts = size.num_heads, size.num_kv_heads, size.intermediate_size
        check_divides(f"{key}.tp", instance.role, layout.tp, counts)
        if layout.pp > 1 and divides:
            num_added = size.vision.num_added if size.vision else 0
            check_pipeline(f"{key}.pp", layout.pp, size.num_layers, num_added=num_added)
        if layout.tp > 1 and layout.ep == 1 and size.num_experts and divides:
            raise RecipeError.at(f"{key}.ep", whole_experts(layout.tp))
        if layout.ep > 1:
            check_experts(f"{key}.ep", instance.role, layout.ep, size.num_experts)


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
    """Problem with layers that ranks along `tp` divide, but not their experts."""
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


def check_adapters(draft: Draft) -> None:
    """Engines, stages and dropout can have the adapters; the latter for models whose size is known."""
    for instance, recipe in draft.seen():
        key, size, pp = f"models.{instance.role}", draft.sizes.get(instance.role), instance.layout.pp
        model = recipe.model_of(instance.role)
        lora = None if model is None else lora_of(model, key)
        if lora is None:
            continue
        engine = engine_for(recipe.rollout, instance.engine)
        if instance.has_engine and engine.takes_adapters and engine.keeps_weights:
            check_sendable(lora, key)
        if size is not None and lora.expert_rank is not None and not size.num_experts:
            raise RecipeError.at(f"{key}.lora.{_where(lora)}", "the model has no experts: leave it out")
        if size is None or instance.is_engine_only:
            continue
        if lora.dropout and (others := [name for name in size.adapted if sees(name)]):
            raise RecipeError.at(f"{key}.lora.dropout", only_for_text(others[0]))
        if pp > 1 and backend_of(recipe.training.backend).shards_along_axes:
            check_adapted_stages(f"{key}.lora.targets", pp, size.num_layers, size.adapted)


def check_sendable(lora: LoraConfig, key: str) -> None:
    """Refuse adapters of experts for an engine that computes with adapters, and is outside of this package.

    Args:
        lora: Settings of the adapters.
        key: Key of the model's settings, for errors.

    Raises:
        RecipeError: Experts have adapters.
    """
    if lora.expert_rank is not None:
        raise RecipeError.at(
            f"{key}.lora.{_where(lora)}",
            "experts have adapters, which vLLM and SGLang cannot be sent alone: set rollout.external.merge_adapters, "
            "so that they are sent weights with the adapters merged in, or rollout.engine=native",
        )


def _where(lora: LoraConfig) -> str:
    """The setting that gives experts adapters."""
    return "expert_rank" if lora.adapter is None else "adapter"


def only_for_text(name: str) -> str:
    """Problem with dropout where a layer of this name has an adapter."""
    return (
        f"{name} is in no decoder layer for text, and adapters can have dropout only there: set it to 0, or name other "
        "targets"
    )


def check_experts_settings(draft: Draft) -> None:
    """Models have experts where choices of them are replayed or balanced, and engines and back ends follow."""
    for instance, recipe in draft.seen():
        role, size, backend = instance.role, draft.sizes.get(instance.role), recipe.training.backend
        is_replayed = recipe.algorithm.replay_experts and instance.generates
        is_balanced = recipe.algorithm.expert_balance > 0 and instance.is_trained and not instance.is_critic
        if not (is_replayed or is_balanced):
            continue
        key, problem = draft.recipe.key_of(REPLAY if is_replayed else BALANCE, role), ""
        engine = draft.recipe.key_of(ENGINE, role)
        if size is not None and not size.num_experts:
            problem = f"the model of '{role}' has no experts: "
        elif is_replayed and size is not None and size.num_experts > MOST_EXPERTS:
            count = f"has {size.num_experts} experts, and a record can tell {MOST_EXPERTS} apart"
            problem = f"the model of '{role}' {count}: "
        elif is_replayed and not engine_of(instance.engine, engine).records_experts:
            able = " or ".join(name for name, spec in BUILTIN_ENGINES.items() if spec.records_experts)
            lacks = f"the engine '{instance.engine}' of '{role}' does not record which experts it chooses"
            problem = f"{lacks}: set {engine} to {able}, or "
        elif not (instance.is_engine_only or backend_of(backend, draft.recipe.key_of(BACKEND, role)).knows_experts):
            problem = f"the back end '{backend}' of '{role}' does not know experts: use another, or "
        if problem:
            raise RecipeError.at(key, f"is set, but {problem}leave it out")
