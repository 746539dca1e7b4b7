"""Back ends, engines and models that cannot do what a plan asks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import LoraConfig
from leaderless.planner.engines import (
    BACKEND_KEY,
    BUILTIN_ENGINES,
    ENGINE_KEY,
    backend_of,
    engine_for,
    engine_of,
)
from leaderless.planner.graph.adapters import companions_of, lora_of
from leaderless.planner.layout import Cluster
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.layers import check_adapted_stages, check_packed, check_pipeline, sees
from leaderless.planner.memory.offload import is_only_scored
from leaderless.planner.plan_parts import PlannedNode, RoleInstance, answering
from leaderless.planner.workflow import Workflow
from leaderless.planner.workflow.columns import SUPPORT


@dataclass(frozen=True)
class Draft:
    """Known facts of a plan so far: the settings and the nodes, then the models, then their sizes."""

    recipe: Recipe
    workflow: Workflow
    cluster: Cluster
    nodes: Sequence[PlannedNode]
    instances: Sequence[RoleInstance] = ()
    sizes: Mapping[str, ModelSize | None] = field(default_factory=dict)

    def seen(self) -> Iterator[tuple[RoleInstance, Recipe]]:
        """The models, each with the recipe as its role sees it."""
        return ((instance, self.recipe.as_seen_by(instance.role)) for instance in self.instances)

    def node_of(self, instance: RoleInstance) -> str:
        """Name of the node that gives a model its layout."""
        return next(one.name for one in self.nodes if one.layout == instance.layout and instance.role in dict(one.uses))


def check_backends(draft: Draft) -> None:
    """A back end does what its models are for, and has the settings of the role."""
    comparing = [node for node in draft.nodes if node.node.run in {"teach", "distill"}]
    compared = {role for node in comparing for role, _ in node.uses}
    for instance, recipe in draft.seen():
        role, training, model = instance.role, recipe.training, recipe.model_of(instance.role)
        has_words = recipe.body is None
        key = draft.recipe.key_of(BACKEND_KEY, role)
        spec = backend_of(training.backend, key)
        lacking = {
            "train models": instance.is_trained and not spec.trains,
            "score tokens": instance.scores and not instance.is_critic and not spec.scores,
            "compare distributions over words": role in compared and not (spec.distills and has_words),
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
        settings = {f"training.{name}": getattr(training, name) for name in ("keep_whole", "compile", "offload_frozen")}
        if model is not None and model.offload_activations:
            settings[f"models.{role}.offload_activations"] = True
        for name, value in settings.items():
            others = "" if spec.gathers_layers else "other back ends than fsdp"
            others = others if has_words else "models of bodies"
            if others and value not in {"auto", False, "none"}:
                where = name if name.startswith("models.") else draft.recipe.key_of(name, role)
                raise RecipeError.at(where, f"'{value}' has no effect on {others}: leave it out")


def check_stages_of_teachers(draft: Draft) -> None:
    """Ranks along `pp` would not know the divergences and words that the last one finds."""
    for node in draft.nodes:
        if node.node.run in {"teach", "distill"} and node.layout.pp > 1:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"divides a model along pp={node.layout.pp}, but distributions are compared on ranks with all layers: "
                "leave out pp, and use tp or more ranks along dp",
            )


def check_words_of_teachers(draft: Draft) -> None:
    """Where all words are compared, student and teacher have logits for as many: some vocabularies are padded."""
    for node in draft.nodes:
        if node.node.run != "distill" or draft.recipe.algorithm.distillation.top_k is not None:
            continue
        known = {role: size.vocab_size for role, _ in node.uses if (size := draft.sizes.get(role)) is not None}
        if len({*known.values()}) > 1:
            counts = " and ".join(f"{count:,} of '{role}'" for role, count in known.items())
            raise RecipeError.at(
                "algorithm.distillation.top_k",
                f"is null, which compares all words, but models have logits for different numbers of words, {counts}: "
                "set it, such as 64, so that the teacher gives its likeliest words",
            )


def check_frozen(draft: Draft) -> None:
    """Where weights are to be elsewhere while they do not score, there are weights that only score."""
    wanted = [instance for instance, recipe in draft.seen() if recipe.training.offload_frozen != "none"]
    if wanted and not any(is_only_scored(draft.recipe, draft.instances, one) for one in wanted):
        role = wanted[0].role
        raise RecipeError.at(
            draft.recipe.key_of("training.offload_frozen", role),
            f"is {draft.recipe.as_seen_by(role).training.offload_frozen}, but no model that it is for is only scored: "
            "each is trained, generates, or has the weights of another one; leave it out",
        )


def check_axes(recipe: Recipe, node: PlannedNode) -> None:
    """The back end of a node's model is declared to have several ranks along its axes, and to divide experts."""
    layout, roles = node.layout, [role for role, use in node.uses if use not in {"generate", "judge"}]
    if layout.ep > 1 and not node.uses and node.name in recipe.layout:
        raise RecipeError.at(
            f"layout.{node.name}.ep",
            f"ep={layout.ep}: node '{node.name}' has no model whose experts could be divided: leave it out, or give "
            "it to a node that has one",
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
    specs = {role: engine_of(name, recipe.key_of(ENGINE_KEY, role)) for role, name in engines.items()}
    judges = {instance.role for instance in draft.instances if instance.is_judge}  # they are shown no images
    for role, spec in specs.items():
        if recipe.has_images and not spec.takes_images and role not in judges:
            where = "data" if recipe.data.has_images else "environment.images"
            able = " or ".join(name for name, one in BUILTIN_ENGINES.items() if one.takes_images)
            raise RecipeError.at(
                recipe.key_of(ENGINE_KEY, role),
                f"'{engines[role]}' takes no images, which prompts have ({where}): choose {able}",
            )
    for node, role in [(one, role) for one in draft.nodes for role, use in one.uses if use in {"generate", "judge"}]:
        wrong = " and ".join(axis for axis in node.layout.axes if axis not in ("dp", *specs[role].axes))
        if wrong:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"{node.layout}: the engine '{engines[role]}' cannot span ranks along {wrong}: give '{node.name}' a "
                f"layout without {wrong}, or set {recipe.key_of(ENGINE_KEY, role)} to one that can; a custom one "
                "declares it with @leaderless.rollout_engine(axes=...)",
            )


def check_vllm(draft: Draft) -> None:
    """Inside the ranks' processes, vLLM needs exactly one engine on every rank, which roles with adapters may share."""
    recipe, num_ranks = draft.recipe, draft.cluster.world_size
    generating = [
        instance
        for instance, seen in draft.seen()
        if instance.has_engine and instance.engine == "vllm" and seen.rollout.external.is_in_process
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
    message = f"must be given where {problem}; or set {recipe.key_of(ENGINE_KEY, role)}=native"
    raise RecipeError.at(recipe.key_of("rollout.external.python", role), message)


def check_addresses(draft: Draft) -> None:
    """Each rank that generates has an engine of its own elsewhere, if any has, and that is vLLM."""
    owners = dict[str, RoleInstance]()
    for instance, seen in draft.seen():
        external = seen.rollout.external
        answers = instance == answering(draft.instances, draft.recipe.evaluation.role)
        if not (external.addresses and (instance.has_engine or answers)):
            continue
        key = draft.recipe.key_of("rollout.external.addresses", instance.role)
        if instance.engine != "vllm":
            message = f"are of vLLM, but role '{instance.role}' generates with '{instance.engine}'"
            remedy = f"set roles.{instance.role}.rollout.external.addresses: [], or rollout.engine: vllm"
            raise RecipeError.at(key, f"{message}: {remedy}")
        layout = instance.serving_layout
        if layout.ranks_per_shard > 1:
            raise RecipeError.at(
                key,
                f"are engines of one rank each, but {layout.ranks_per_shard} ranks make one of role "
                f"'{instance.role}': leave out tp and pp of its layout",
            )
        if len(external.addresses) != len(layout.ranks):
            raise RecipeError.at(
                key,
                f"has {len(external.addresses)} engines, and {len(layout.ranks)} ranks generate with role "
                f"'{instance.role}': name one for each, or set layout.NODE.ranks",
            )
        for address in external.addresses:
            other = owners.setdefault(address, instance)
            if other != instance and instance not in companions_of(draft.recipe, draft.instances, other):
                where = f"set roles.{instance.role}.rollout.external.addresses"
                raise RecipeError.at(key, f"'{address}' generates with role '{other.role}', too: {where}")


def check_support(draft: Draft) -> None:
    """Where tokens are left out, engines record those that could be drawn, and back ends score these alone."""
    readers = [node for node in draft.nodes if SUPPORT in node.reads and node.spec.role_use in {"score", "train"}]
    scoring = {role for node in readers for role, _ in node.uses}
    agents = {agent for node in readers for agent in node.node.agents}
    for instance, recipe in draft.seen():
        role, config, backend = instance.role, recipe.rollout, recipe.training.backend
        left_out = [name for name in ("top_p", "top_k", "min_p") if name in config.truncations]
        if role in agents and instance.generates and left_out:
            key = draft.recipe.key_of(f"rollout.{left_out[0]}", role)
            engine, most = draft.recipe.key_of(ENGINE_KEY, role), engine_of(instance.engine).most_support
            value = f"is {config.truncations[left_out[0]]:g}"
            if most == 0:
                raise RecipeError.at(
                    key,
                    f"{value}, but the engine '{instance.engine}' of '{role}' does not record which tokens it could "
                    f"have drawn, over which training has to normalize: leave out {' and '.join(left_out)}, or set "
                    f"{engine} to native",
                )
            if most is not None and not 0 < config.top_k <= most:
                raise RecipeError.at(
                    key,
                    f"{value}, but the engine '{instance.engine}' of '{role}' records the tokens that it could have "
                    f"drawn only if top_k bounds their number by 1 to {most}, and it is {config.top_k}: set top_k, or "
                    f"set {engine} to native",
                )
        if role in scoring and not instance.is_engine_only and not backend_of(backend).knows_support:
            raise RecipeError.at(
                draft.recipe.key_of(BACKEND_KEY, role),
                f"'{backend}' cannot score tokens of '{role}' over those alone that top_p, top_k and min_p leave: use "
                "fsdp, or leave these out of `rollout`",
            )


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


def check_engine_parts(draft: Draft) -> None:
    """The ranks of one engine can have a layer each, and whole experts if they are asked to."""
    engines = {instance.role: instance.engine for instance in draft.instances}
    for node, role in [(one, role) for one in draft.nodes for role, use in one.uses if use in {"generate", "judge"}]:
        layout, size, key = node.layout, draft.sizes.get(role), f"layout.{node.name}"
        if size is not None and layout.pp > size.num_layers:
            raise RecipeError.at(
                f"{key}.pp",
                f"pp={layout.pp}: the model of '{role}' has {size.num_layers} layers, fewer than stages: set fewer",
            )
        if layout.pp > 1 and draft.recipe.as_seen_by(role).algorithm.replay_experts:
            raise RecipeError.at(
                f"{key}.pp",
                f"pp={layout.pp}: a stage of an engine knows the experts of its own layers alone, and {REPLAY} needs "
                "those of all: set pp: 1, or leave out replay_experts",
            )
        if layout.ep == 1:
            continue
        if not engine_of(engines[role]).divides_experts:
            message = f"ep={layout.ep}: the engine '{engines[role]}' of '{role}' does not divide experts: leave it out"
            raise RecipeError.at(f"{key}.ep", f"{message}, or set {draft.recipe.key_of(ENGINE_KEY, role)}: vllm")
        if layout.ep != layout.tp:
            raise RecipeError.at(
                f"{key}.ep",
                f"ep={layout.ep}, tp={layout.tp}: vLLM divides experts among all ranks along tp: set both alike, or "
                "leave out ep",
            )
        if size is not None:
            check_experts(f"{key}.ep", role, layout.ep, size.num_experts)


def check_divides(key: str, role: str, tp: int, counts: tuple[int, int, int]) -> None:
    """Refuse a `tp` that does not divide attention heads, heads of keys or inner features; the error is at the key."""
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
    """Refuse an `ep` that does not divide the experts of a model, or a model without; the error is at the key."""
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
        if lora.packed_block:
            check_packable(lora, key, instance, recipe, size)
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


def check_packable(lora: LoraConfig, key: str, instance: RoleInstance, recipe: Recipe, size: ModelSize | None) -> None:
    """Refuse weights of 4 bits for back ends, engines and models that cannot have them."""
    where, backend, engine = f"{key}.lora.base_dtype", recipe.training.backend, instance.engine
    if instance.has_engine and engine_of(engine).keeps_weights and engine_for(recipe.rollout, engine).takes_adapters:
        check_sendable(lora, key)
    if not backend_of(backend).packs_weights:
        raise RecipeError.at(where, f"nf4 is not for the back end '{backend}': use fsdp, or leave it out")
    if size is None or instance.is_engine_only:
        return
    has_others = size.num_recurrent_layers > 0 or size.indexer is not None
    if reason := unpackable(has_experts=size.num_experts > 0, has_others=has_others):
        raise RecipeError.at(where, f"nf4 is not for the model of '{instance.role}'{reason}")
    tp = instance.layout.tp if backend_of(backend).shards_along_axes else 1
    check_packed(key, lora.packed_block, size.linears, tp)


def unpackable(*, has_experts: bool, has_others: bool) -> str:
    """Why the weights of a model cannot have 4 bits; empty if they can."""
    if has_experts:
        return (
            ", whose experts are most of its weights, but no linear layers, and would stay in float32: leave it out; "
            "ranks along ep divide experts"
        )
    return ", some of whose layers read by recurrence or choose keys: leave it out" if has_others else ""


def check_sendable(lora: LoraConfig, key: str) -> None:
    """Refuse what an engine outside of this package cannot add: adapters of experts, or to weights of 4 bits."""
    if lora.packed_block:
        raise RecipeError.at(
            f"{key}.lora.base_dtype",
            "nf4: vLLM and SGLang would read the weights as they are saved, and add adapters that were trained on "
            "rounded ones: set rollout.external.merge_adapters, so that they are sent the rounded weights with the "
            "adapters merged in, or rollout.engine=native",
        )
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
        engine = draft.recipe.key_of(ENGINE_KEY, role)
        if size is not None and not size.num_experts:
            problem = f"the model of '{role}' has no experts: "
        elif is_replayed and size is not None and size.num_experts > MOST_EXPERTS:
            count = f"has {size.num_experts} experts, and a record can tell {MOST_EXPERTS} apart"
            problem = f"the model of '{role}' {count}: "
        elif is_replayed and not engine_of(instance.engine, engine).records_experts:
            able = " or ".join(name for name, spec in BUILTIN_ENGINES.items() if spec.records_experts)
            lacks = f"the engine '{instance.engine}' of '{role}' does not record which experts it chooses"
            problem = f"{lacks}: set {engine} to {able}, or "
        elif not (instance.is_engine_only or backend_of(backend, draft.recipe.key_of(BACKEND_KEY, role)).knows_experts):
            problem = f"the back end '{backend}' of '{role}' does not know experts: use another, or "
        if problem:
            raise RecipeError.at(key, f"is set, but {problem}leave it out")
