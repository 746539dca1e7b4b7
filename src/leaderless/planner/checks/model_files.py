"""Facts from the files of a model that are on this machine: its type, and its words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner.checks.capabilities import Draft
from leaderless.planner.engines import backend_of
from leaderless.planner.memory.model_size import model_file
from leaderless.planner.plan_parts import PlannedNode, RoleInstance, answering

# fmt: off
UNDIVIDED = {
    "apertus", "apertus1p5_text", "bamba", "beam", "bert-generation", "biogpt", "bitnet", "codegen", "ctrl", "dbrx",
    "dots3_note", "dots3_note_text", "emu3", "falcon_h1", "falcon_mamba", "flint", "fuyu", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm", "glm4",
    "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite_swa", "hunyuan_v1_dense", "jetmoe", "lfm2",
    "lfm2_moe", "lfm3", "llama4", "llama4_text", "longcat_flash", "mamba", "mamba2", "minicpm3", "moshi",
    "moss_transcribe_diarize", "nanochat", "olmo2", "olmo3", "olmo_hybrid", "opt", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen3_5", "qwen3_5_text", "stablelm", "starcoder2", "vaultgemma", "whisper", "youtu",
}
# fmt: on
"""Families that are supported, but whose layers ranks cannot divide along `tp`: `models/parallel/tensor.py`."""
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "paligemma")
"""Types of the models of images and text that are supported."""
REWARD_MODELS = ("update_reward_model", "model_reward")
"""Stages whose models score whole responses."""
BOTH_WAYS = ("paligemma",)
"""Types of the models whose tokens of a prompt attend to all of it."""
ONE_WAY_ENGINES = ("vllm", "sglang")
"""Engines whose tokens attend to those before them alone."""
LONGER_IN_VLLM = ("cohere2", "cohere2_moe")
"""Types whose windows have one token more in vLLM 0.32 than in `transformers`, which only longer texts show."""


def family_of(model: ModelConfig | None) -> str | None:
    """The type of a model; None where no file on this machine says it."""
    family = _read(model, "config.json").get("model_type")
    return family if isinstance(family, str) else None


def _read(model: ModelConfig | None, name: str) -> dict[str, Any]:
    """A file of a model in JSON; empty where there is none on this machine, or no object in it."""
    path = None if model is None else model_file(model, name)
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def quantization_of(about: Mapping[str, Any]) -> str:
    """Why the weights that a `config.json` describes cannot be used; empty if they are not quantized."""
    if not (found := about.get("quantization_config")):
        return ""
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else getattr(found, "quant_method", "")
    method = str(getattr(method, "value", method))
    return (
        f"has weights that are quantized ({method}), which cannot be trained: name the model that they were made of, "
        f"often the same name without -{method.upper()}, or a GGUF file, which is unpacked; adapters can be trained on "
        "weights that are quantized here (models.ROLE.lora.base_dtype=nf4)"
    )


def check_quantized(draft: Draft) -> None:
    """Quantized weights are left to engines that read them on their own."""
    for instance in draft.instances:
        model = draft.recipe.model_of(instance.role)
        if instance.is_engine_only and instance.engine in ONE_WAY_ENGINES:
            continue
        if model and (reason := quantization_of(_read(model, "config.json"))):
            raise RecipeError.at(f"models.{instance.role}", f"'{model.path}' {reason}")


def check_divisible(draft: Draft) -> None:
    """Ranks along `tp` divide only families whose layers can be divided."""
    for instance, recipe in draft.seen():
        role, tp = instance.role, instance.layout.tp
        if instance.is_engine_only or tp == 1 or not backend_of(recipe.training.backend).shards_along_axes:
            continue
        if (family := family_of(recipe.model_of(role))) in UNDIVIDED:
            raise RecipeError.at(
                f"layout.{draft.node_of(instance)}.tp",
                f"tp={tp}: the model of '{role}' is of type {family}, whose layers cannot be divided: leave out "
                "tp; ranks along dp divide the weights, and those along cp the tokens",
            )


def check_kinds(draft: Draft) -> None:
    """Models take the turns of the environment, see what they are shown, and are divided as their type allows."""
    recipe = draft.recipe
    engines = {instance.role: instance.engine for instance in draft.instances if not instance.is_critic}
    for role in players_of(recipe, draft.nodes, draft.instances):
        if (family := family_of(recipe.model_of(role))) is not None:
            check_player(recipe, role, family)
            if family in BOTH_WAYS and engines.get(role) in ONE_WAY_ENGINES:
                raise RecipeError.at(
                    recipe.key_of("rollout.engine", role),
                    f"'{engines[role]}' is not supported for models of type {family}, which read a prompt in both "
                    "directions: set it to native",
                )
            if family in LONGER_IN_VLLM and engines.get(role) == "vllm":
                raise RecipeError.at(
                    recipe.key_of("rollout.engine", role),
                    f"'vllm' is not supported for models of type {family}: its windows have one token more than those "
                    "that are trained: set it to native",
                )
    for role in scorers_of(draft.nodes):
        if (family := family_of(recipe.model_of(role))) is not None:
            check_scorer(recipe, role, family)
    # A layout that is written is blamed before one that follows from it.
    for node in sorted(draft.nodes, key=lambda node: node.name not in recipe.layout):
        sizes = (*node.layout.sizes.items(), ("ep", node.layout.ep))
        axes = [axis for axis, size in sizes if axis != "dp" and size > 1]
        for role in (role for role, use in node.uses if use != "generate" and axes):
            if (family := family_of(recipe.model_of(role))) in BOTH_WAYS:
                raise RecipeError.at(
                    f"layout.{node.name}.{axes[0]}",
                    f"the model of '{role}' is of type {family} and reads a prompt in both directions, and ranks "
                    f"divide such a model along dp alone: leave out {' and '.join(axes)}",
                )


def players_of(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> list[str]:
    """The roles that play episodes: the roles of nodes that sample, and the one that answers held-out prompts."""
    roles = [role for node in nodes if node.spec.samples and (role := node.node.role) is not None]
    if instances and (recipe.evaluation.every_steps or not roles):
        roles.append(answering(instances, recipe.evaluation.role).role)
    return list(dict.fromkeys(roles))


def check_player(recipe: Recipe, role: str, family: str) -> None:
    """Refuse a model, by its type, that cannot take turns, or reads text alone where it is shown images."""
    model = recipe.model_of(role)
    assert model is not None
    where = {"episodes": "an environment", "online": "clients"}.get(recipe.product)
    if family in BOTH_WAYS and where is not None:
        raise RecipeError.at(
            f"models.{role}",
            f"'{model.path}' reads a prompt in both directions and what follows in one, so that it cannot take the "
            f"turns of {where}: choose a model that reads in one direction, as of type qwen3_vl, or prompts of a "
            "dataset without an environment",
        )
    if recipe.has_later_images and family not in SEEING:
        raise RecipeError.at(
            f"models.{role}",
            f"models of type {family} read text alone, but environment.images is set: choose one that sees images, as "
            "qwen3_vl, or leave environment.images out",
        )


def scorers_of(nodes: Sequence[PlannedNode]) -> list[str]:
    """The roles whose models score whole responses."""
    return list(dict.fromkeys(node.node.role for node in nodes if node.node.role and node.node.run in REWARD_MODELS))


def check_scorer(recipe: Recipe, role: str, family: str) -> None:
    """Refuse a reward model, by its type, that reads text alone where prompts have images."""
    if recipe.data.has_images and family not in SEEING:
        raise RecipeError.at(
            f"models.{role}",
            f"models of type {family} read text alone, so that the reward model would see no images, which prompts "
            "have (data): choose one that sees images, as qwen3_vl, or give prompts of text",
        )


def check_vocabularies(draft: Draft) -> None:
    """The roles of a node, those that it uses and those that sampled its rows, work with the same token ids.

    Teachers that are asked by text may have others.
    """
    known: dict[str, dict[str, int]] = {}
    for node in draft.nodes:
        is_taught = node.node.run == "teach"
        if is_taught and draft.recipe.algorithm.distillation.align == "text":
            continue
        used = [role for role, use in node.uses if use != "judge"]  # judges read text
        roles = list(dict.fromkeys([*used, *(node.node.agents if used else ())]))
        for first, second in combinations(roles, 2):
            mine, others = draft.recipe.model_of(first), draft.recipe.model_of(second)
            if mine is None or others is None or mine.path == others.path:
                continue
            for model in (mine, others):
                if model.path not in known:
                    known[model.path] = _vocabulary(model)
            one, other = known[mine.path], known[others.path]
            if one and other and one != other:
                token = min(token for token in one.keys() | other.keys() if one.get(token) != other.get(token))
                raise RecipeError.at(
                    f"models.{second}",
                    f"node '{node.name}' uses role '{first}' ({mine.path}) and role '{second}' ({others.path}), which "
                    f"have different vocabularies: they differ in the id of {token!r}; all roles of a node need one "
                    f"tokenizer{', unless algorithm.distillation.align is text' if is_taught else ''}",
                )


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """The id of every token of a model's tokenizer; empty where no file on this machine says it."""
    tokenizer = _read(model, "tokenizer.json")
    try:
        vocabulary = tokenizer["model"]["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens", ())}
        if isinstance(vocabulary, list):
            return {str(token): place for place, (token, _) in enumerate(vocabulary)} | added
        return {str(token): int(place) for token, place in vocabulary.items()} | added
    except (ValueError, KeyError, TypeError):
        return {}
