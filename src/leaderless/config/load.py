"""Reads a recipe from a YAML file and overrides, or raises an error that says where and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from leaderless.algorithms.algorithm import CUSTOM
from leaderless.base.errors import Problem, RecipeError, closest, nearest
from leaderless.base.named_functions import is_function_name, load_class
from leaderless.base.section import Section
from leaderless.config.judges import RewardOptions
from leaderless.config.recipe import Recipe
from leaderless.config.rewards import RewardsConfig, named_type
from leaderless.config.source import RecipeSource, Setting, apply_overrides, merge_settings, read_yaml


def hints_for(
    location: Sequence[int | str], value: object, root: type[BaseModel] = Recipe
) -> dict[tuple[str, ...], str]:
    """Hints for an unknown key at pydantic's location: a sibling, a key of another section, or of another framework.

    The keys of an unknown section are looked up one by one, so there is a hint for each of them, by its path.
    """
    path, sections = follow(location, root)
    if root is Recipe and path[:1] == ("models",) and path[2:] == ("optimizer",):
        return {path: f": a role has its own optimizer as 'roles.{path[1]}.optimizer'"}
    siblings = sorted({name for section in sections for name in section.model_fields})
    hint, has_sibling = nearest(path[-1], siblings), closest(path[-1], siblings) is not None
    if has_sibling and (isinstance(value, Mapping) or root is not Recipe):
        return {path: hint}
    keys = all_keys(root)
    meant = {leaf: _meant(leaf, keys, is_like_sibling=has_sibling) for leaf in _leaves(path, value)}
    known = {leaf: key for leaf, key in meant.items() if key and (root is Recipe or key in keys)}
    return {leaf: f" (did you mean '{key}'?)" for leaf, key in known.items()} or {path: hint}


def _meant(path: tuple[str, ...], keys: Sequence[str], *, is_like_sibling: bool) -> str | None:
    """The setting with the same ending, with that name in another framework, or with a similar last part."""
    ending = "." + ".".join(path[-2:])
    exact = next((key for key in keys if len(path) > 1 and key.endswith(ending)), None) or own_name(path)
    if exact or is_like_sibling:
        return exact
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    similar = closest(path[-1], [*by_name][::-1], similarity=0.8)
    return by_name[similar] if similar else None


def _leaves(path: tuple[str, ...], value: object) -> list[tuple[str, ...]]:
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [leaf for key, inner in value.items() for leaf in _leaves((*path, str(key)), inner)]


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of all settings of a section that have a fixed name, each after a prefix."""
    keys: dict[str, None] = {}
    for name, field in section.model_fields.items():
        inner = [key for child in _sections_in(field.annotation) for key in all_keys(child, f"{prefix}{name}.")]
        keys |= dict.fromkeys(inner or [f"{prefix}{name}"])
    return list(keys)


def follow(
    location: Sequence[int | str], root: type[BaseModel] = Recipe
) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """The keys of a location, without the forms that pydantic puts between them, and the sections around the last."""
    path: list[str] = []
    annotation: object = root
    parents: list[type[BaseModel]] = []
    for part in map(str, location):
        forms = _forms(annotation)
        if part in forms:
            annotation = forms[part]
            continue
        if CUSTOM in forms and is_function_name(part):
            annotation = load_class(part, ".".join(path), Section)
            continue
        path.append(part)
        parents = _sections_in(annotation)
        annotation = _child(annotation, parents, part)
    return tuple(path), parents


def _forms(annotation: object) -> dict[str, object]:
    """The annotations of the forms that a setting may have, by tag."""
    is_union = get_origin(annotation) in {Union, UnionType}
    forms = [get_args(form) for form in get_args(annotation) if is_union and get_origin(form) is Annotated]
    return {mark.tag: form for form, *marks in forms for mark in marks if isinstance(mark, Tag)}


def _child(annotation: object, sections: Sequence[type[BaseModel]], part: str) -> object:
    """The annotation of a key, from the annotation of the section or mapping that contains it."""
    for section in sections:
        if part in section.model_fields:
            return section.model_fields[part].annotation
        if section is RewardsConfig and (":" in part or named_type(part)):
            return named_type(part) or RewardOptions
    arguments = get_args(annotation)
    return arguments[1] if get_origin(annotation) is Mapping else None


def _sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation such as `X | None` allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        return [section for argument in get_args(annotation) for section in _sections_in(argument)]
    return []


_NAMES: Mapping[str, str] = {
    "name": "experiment_name run_name wandb_run_name",
    "steps": "total_training_steps max_steps",
    "loggers": "report_to logger run.tensorboard",
    "run.directory": "default_local_dir output_dir ckpt_path save_path",
    "models.policy": "model pretrain model.path model_name_or_path",
    "models.critic": "critic_pretrain",
    "models.policy.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing",
    "data.train.path": "train_files prompt_data dataset_name",
    "data.train.prompt": "prompt_key input_key",
    "data.train.answer": "label_key",
    "data.evaluation.path": "val_files eval_dataset",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "batch.prompts_per_step": "data.train_batch_size rollout_batch_size",
    "batch.responses_per_prompt": "rollout.n num_generations n_samples_per_prompt group_size",
    "batch.updates_per_step": "ppo_mini_batch_size steps_per_generation",
    "batch.epochs_per_step": "ppo_epochs num_ppo_epochs num_iterations n_epochs",
    "batch.micro_batch_tokens": "ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "train_max_tokens_per_gpu micro_train_batch_size per_device_train_batch_size",
    "rollout.max_response_tokens": "max_response_length max_completion_length generate_max_len max_new_tokens "
    "response_length max_response_tokens",
    "rollout.engine": "rollout.name use_vllm",
    "rollout.external.memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.max_sequences": "max_num_seqs",
    "layout.rollout.tp": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "optimizer.learning_rate": "lr actor_learning_rate",
    "roles.critic.optimizer.learning_rate": "critic.optim.lr critic.lr critic_learning_rate",
    "optimizer.weight_decay": "l2",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "adam_epsilon",
    "optimizer.max_grad_norm": "grad_clip max_norm",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type warmup_style",
    "optimizer.warmup_updates": "warmup_steps warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio",
    "optimizer.final_fraction": "min_lr_ratio",
    "algorithm.advantage.type": "adv_estimator advantage_estimator",
    "algorithm.advantage.discount": "gamma",
    "algorithm.advantage.decay": "lam lambd",
    "algorithm.advantage.normalize_by_std": "norm_adv_by_std_in_grpo scale_rewards no_advantage_std_norm",
    "algorithm.policy_loss.type": "loss_type loss_mode policy_loss_type",
    "algorithm.policy_loss.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.policy_loss.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.policy_loss.dual_clip": "clip_ratio_c delta",
    "algorithm.aggregation": "loss_agg_mode",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef init_kl_coef beta",
    "algorithm.kl.estimator": "kl_penalty kl_loss_type kl_estimator",
    "algorithm.kl.place": "use_kl_loss use_kl_in_reward",
    "algorithm.kl.target": "target_kl kl_target",
    "algorithm.kl.horizon": "kl_horizon",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_loss_coef",
    "algorithm.correction.highest": "vllm_is_truncated_threshold vllm_importance_sampling_cap",
    "algorithm.overlong.buffer_tokens": "overlong_buffer.len overlong_buffer_len",
    "algorithm.overlong.filter": "mask_truncated_completions",
    "algorithm.critic.value_clip": "cliprange_value value_clip",
    "algorithm.critic.warmup_steps": "critic_warmup freezing_actor_steps",
    "evaluation.every_steps": "test_freq eval_steps",
    "evaluation.responses_per_prompt": "val_kwargs.n num_generations_eval eval_n_samples_per_prompt",
    "evaluation.temperature": "eval_temperature",
    "evaluation.max_prompts": "data.evaluation.limit",
    "checkpoint.every_steps": "save_freq save_steps",
    "checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit max_ckpt_num",
}
_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()}


def own_name(path: Sequence[str]) -> str | None:
    """The key of this framework for a setting of another one, such as `actor_rollout_ref`, `actor`, `optim`, `lr`.

    The longest known ending counts; None if there is none.
    """
    endings = (".".join(path[first:]) for first in range(len(path)))
    return next((_KEYS[ending] for ending in endings if ending in _KEYS), None)


AnySection = TypeVar("AnySection", bound=Section)

_RULES = {
    "model_type": "must be a section of settings",
    "dict_type": "must be a section of settings",
    "mapping_type": "must be a section of settings",
    "tuple_type": "must be a list",
    "invalid_key": "a key must be text; put it in quotes",
    "missing": "must be given",
    "union_tag_not_found": "must be a section of settings",
}
"""Rules by pydantic's kinds of errors, in terms of YAML; pydantic's own are in terms of Python."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe together with where its settings were written."""

    recipe: Recipe
    source: RecipeSource

    def locate(self, error: RecipeError) -> RecipeError:
        """An error that was raised for this recipe after it was read, with file and line filled in."""
        return error.placed(self._place_of)

    def _place_of(self, key: str) -> str:
        # Nodes are not in the recipe, but it names the workflow that they are in.
        return self.source.place_of("workflow" if key.partition(".")[0] in {"nodes", "repeat"} else key)


def load_recipe(
    recipe: str | Path | RecipeSource,
    overrides: Sequence[str] = (),
    defaults_of: Callable[[str], Mapping[str, Setting]] = lambda _: {},
) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        recipe: YAML file, or settings that have been read already.
        overrides: `section.key=value` each, applied on top of it in order.
        defaults_of: Function from the name of a workflow to its settings, which hold where the recipe has none.

    Raises:
        RecipeError: Something in it is wrong; all problems are named, each with its place.
    """
    written = recipe if isinstance(recipe, RecipeSource) else read_yaml(Path(recipe))
    source = apply_overrides(written, overrides)
    workflow = source.settings.get("workflow")
    try:
        defaults = defaults_of(workflow) if isinstance(workflow, str) else {}
    except RecipeError as error:
        raise error.placed(source.place_of) from error
    return LoadedRecipe(check_section(Recipe, source, merge_settings(defaults, source.settings)), source)


def load_section(path: Path, section: type[AnySection]) -> AnySection:
    """Read and check a YAML file that is not a recipe, with a model of its settings, by the same rules."""
    return check_section(section, read_yaml(path))


def check_section(
    section: type[AnySection], source: RecipeSource, settings: Mapping[str, Setting] | None = None
) -> AnySection:
    """Check the settings of a source, or others that are mostly its, with a model of them."""
    try:
        return section.model_validate(source.settings if settings is None else settings)
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in _problems(details, source, section)]
        raise RecipeError([problem for problem in problems if not _is_inherited(problem, problems)]) from error


def _is_inherited(problem: Problem, problems: Sequence[Problem]) -> bool:
    """Whether a problem of a role's settings is one of the general settings that they are written on top of."""
    section, _, rest = problem.key.partition(".")
    general = replace(problem, key=rest.partition(".")[2])
    return section == "roles" and general in problems


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML with all defaults; `load_recipe` reads it back to an equal recipe."""
    settings = recipe.model_dump(mode="json")
    # PyYAML's writer in C is four times as fast, but escapes or cannot write some characters that are not ASCII.
    is_plain = json.dumps(settings, ensure_ascii=False).isascii()
    dumper = _FAST_DUMPER if is_plain else _Dumper
    return yaml.dump(settings, Dumper=dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Escapes the line breaks of Unicode, which YAML would fold into spaces on reading."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Text, in double quotes where it needs escapes."""
        style = '"' if set(data) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_FAST_DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", _Dumper)


def _problems(details: ErrorDetails, source: RecipeSource, root: type[Section]) -> list[Problem]:
    """One pydantic error in terms of the recipe."""
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        hints = hints_for(details["loc"], value, root)
        return [Problem(".".join(path), f"unknown key{hint}", source.place_of(path)) for path, hint in hints.items()]
    path, _ = follow(details["loc"], root)
    if kind == "invalid_key":
        path = (*path[:-1], str(value))  # pydantic calls the key `true` 1
    key = ".".join(path)
    rule = re.sub(r"^\w+ should ", "must ", details["msg"].removeprefix("Value error, "))
    message = _RULES.get(kind, rule)
    if kind == "union_tag_invalid":
        wrong, known = details["ctx"]["tag"], re.findall(r"'([^']+)'", details["ctx"]["expected_tags"])
        path, key, message = (*path, "type"), f"{key}.type={wrong!r}", f"unknown type{nearest(wrong, known)}"
    elif kind == "value_error" and (not path or isinstance(value, Mapping)):
        mentioned = message.split("=")[0].split(" ")[0]
        role = path[:2] if path[:1] == ("roles",) else ()
        if "." in mentioned:
            path, key = (*role, *mentioned.split(".")), ".".join(role)
    elif kind != "missing" and isinstance(value, str | int | float | bool | None):
        key = f"{key}={value!r}"
    return [Problem(key, message, source.place_of(path))]
