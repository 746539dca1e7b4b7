"""Back ends and engines that cannot do what a plan asks of them."""

from __future__ import annotations

from leaderless.config import Recipe, RecipeError
from leaderless.planner.checks.draft import Draft
from leaderless.planner.graph.adapters import companions_of
from leaderless.planner.plan_parts import PlannedNode
from leaderless.planner.rollout_engines import BUILTIN_ENGINES, engine_of
from leaderless.planner.rollout_engines import KEY as ENGINE
from leaderless.planner.train_backends import KEY as BACKEND
from leaderless.planner.train_backends import backend_of


def check_backends(draft: Draft) -> None:
    """A back end does what its models are for, and has the settings of the role."""
    for instance, recipe in draft.seen():
        role, training, model = instance.role, recipe.training, recipe.model_of(instance.role)
        key = draft.recipe.key_of(BACKEND, role)
        spec = backend_of(training.backend, key)
        lacking = {
            "train models": instance.is_trained and not spec.trains,
            "score tokens": instance.scores and not instance.is_critic and not spec.scores,
            "hold value models": instance.is_critic and not spec.values,
            "train adapters": model is not None and model.lora is not None and not spec.trains_adapters,
        }
        capability = next((name for name, is_lacking in lacking.items() if is_lacking), None)
        if capability is not None:
            raise RecipeError.at(
                key,
                f"'{training.backend}' cannot {capability}, as role '{role}' needs: use another back end, such as "
                "fsdp, or declare it with @leaderless.train_backend(...) if it can",
            )
        for name, value in (("keep_whole", training.keep_whole), ("compile", training.compile)):
            if value not in {"auto", False} and (recipe.body is not None or not spec.gathers_layers):
                others = "models of bodies" if recipe.body is not None else "other back ends than fsdp"
                raise RecipeError.at(
                    draft.recipe.key_of(f"training.{name}", role), f"'{value}' has no effect on {others}: leave it out"
                )


def check_axes(recipe: Recipe, node: PlannedNode) -> None:
    """The back end of a node's model is declared to have several ranks along its axes, and to divide experts."""
    layout, roles = node.layout, [role for role, use in node.uses if use not in {"generate", "judge"}]
    if layout.ep > 1 and not roles and node.name in recipe.layout:
        raise RecipeError.at(
            f"layout.{node.name}.ep",
            f"ep={layout.ep}: node '{node.name}' neither trains nor scores a model, and only such nodes divide "
            "experts: leave it out, or give it to a node that does",
        )
    for role in roles:
        backend = recipe.as_seen_by(role).training.backend
        spec = backend_of(backend)
        can = ("dp", *spec.axes)
        if layout.ep > 1 and not spec.divides_experts:
            raise RecipeError.at(
                f"layout.{node.name}.ep",
                f"ep={layout.ep}: the back end '{backend}' of '{role}' does not divide experts: leave it out, use "
                "fsdp, or declare it with @leaderless.train_backend(divides_experts=True) if it does",
            )
        if wrong := [axis for axis in layout.axes if axis not in can]:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"{layout}: the back end '{backend}' divides the ranks of a model by {' and '.join(can)} only; "
                f"leave out {' and '.join(wrong)}",
            )


def check_engines(draft: Draft) -> None:
    """An engine sees what it is shown, and is declared to span ranks along the axes of its layout."""
    recipe = draft.recipe
    engines = {instance.role: instance.engine for instance in draft.instances}
    specs = {role: engine_of(name, recipe.key_of(ENGINE, role)) for role, name in engines.items()}
    judges = {instance.role for instance in draft.instances if instance.is_judge}  # they are shown no images
    for role, spec in specs.items():
        if recipe.has_images and not spec.takes_images and role not in judges:
            where = "data" if recipe.data.has_images else "environment.images"
            able = " or ".join(name for name, one in BUILTIN_ENGINES.items() if one.takes_images)
            raise RecipeError.at(
                recipe.key_of(ENGINE, role),
                f"'{engines[role]}' takes no images, which prompts have ({where}): choose {able}",
            )
    for node, role in [(one, role) for one in draft.nodes for role, use in one.uses if use in {"generate", "judge"}]:
        wrong = " and ".join(axis for axis in node.layout.axes if axis not in ("dp", *specs[role].axes))
        if wrong:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"{node.layout}: the engine '{engines[role]}' cannot span ranks along {wrong}: give '{node.name}' a "
                f"layout without {wrong}, or set {recipe.key_of(ENGINE, role)} to one that can; a custom one declares "
                "it with @leaderless.rollout_engine(axes=...)",
            )


def check_vllm(draft: Draft) -> None:
    """Inside the ranks' processes, vLLM needs exactly one engine on every rank, which roles with adapters may share."""
    recipe, num_ranks = draft.recipe, draft.cluster.world_size
    generating = [
        instance
        for instance, seen in draft.seen()
        if instance.has_engine and instance.engine == "vllm" and seen.rollout.external.python is None
    ]
    some = next((instance for instance in generating if len(instance.layout.ranks) < num_ranks), None)
    if len(generating) > 1 and len(companions_of(recipe, draft.instances, generating[0])) < len(generating):
        roles = " and ".join(f"'{instance.role}'" for instance in generating)
        problem = f"several roles generate ({roles}): a process holds one vLLM"
    elif some is not None:
        problem = (
            f"not all ranks generate: '{some.role}' does so on {some.layout} of {num_ranks}, and vLLM inside of the "
            "ranks' processes needs all of them"
        )
    else:
        return
    role = generating[-1].role
    message = f"must be given where {problem}; or set {recipe.key_of(ENGINE, role)}=native"
    raise RecipeError.at(recipe.key_of("rollout.external.python", role), message)
