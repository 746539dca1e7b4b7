"""Arguments of vLLM and SGLang that a recipe may not give, since samples would not be those that are trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from pydantic import JsonValue

from leaderless.config import RecipeError
from leaderless.config.low_precision import DRAFTS, FORMATS, PLAIN, formats_of, num_drafts
from leaderless.config.rollout import ExternalConfig
from leaderless.planner.checks.capabilities import Draft
from leaderless.planner.plan_parts import answering

KEY = "rollout.external.arguments"
"""Setting with arguments."""

_MODEL = "the engine has the model, the words and the images that are trained with: set models.{role}.path"
_REVISION = "set models.{role}.revision"
_REMOTE_CODE = "set models.{role}.trust_remote_code"
_TYPE = "the engine computes in the type in which weights are sent: set models.{role}.compute_dtype"
_WEIGHTS = "weights come from the trainer, or under adapters from models.{role}.path: leave it out"
_QUANTIZED = (
    "weights come from the trainer, and are quantized as they arrive by a format that `quantization` names alone: "
    "leave it out"
)
_QUANTIZED_ONCE = (
    "SGLang quantizes weights when it starts, and not those that it is sent later: leave it out, or quantize keys and "
    "values alone, as with kv_cache_dtype: fp8_e5m2"
)
_VERIFIED_OTHERWISE = (
    "whether the tokens that it accepts have exactly the distribution of the model, and which log-probabilities come "
    "with them, depends on its version and its thresholds: leave it out, or set rollout.engine to vllm, which takes "
    "speculative_config"
)
_LENGTH = "it is the longest prompt with its response: set data.max_prompt_tokens and rollout.max_response_tokens"
_SEQUENCES = "set rollout.max_sequences"
_MEMORY = "`leaderless plan` counts the engine's memory: set rollout.external.memory_fraction"
_GRAPHS = "set rollout.external.graphs"
_RANKS = (
    "the layout says which ranks make an engine: set layout.NODE.tp, pp or ep, with the engine vllm, or "
    "layout.NODE.ranks"
)
_SEED = "each response has a seed that is derived from the run's: set seed"
_SAMPLING = (
    "the distribution of tokens is known to training: set rollout.temperature, rollout.top_p, rollout.top_k or "
    "rollout.min_p"
)
_LOG_PROBS = "the run reads log-probabilities of the distribution that tokens are drawn from: leave it out"
_ADAPTERS = "adapters are those that are trained: set models.{role}.lora"
_SLEEP = "the engine gives memory back while others need it, and keeps what they do not: leave it out"
_OLD_KEYS = (
    "keys and values that are kept elsewhere would outlive the weights that they were computed with: leave it out"
)
_TOKENS = "the engine reads tokens and sends each new one once, without a tokenizer: leave it out"
_EXPERTS = "set algorithm.replay_experts"
_ADDRESS = "only the rank that starts the engine can reach it, at an address made for that start: leave it out"
_NAME = "no client asks for the model by a name: leave it out"
_TASK = "the engine generates: leave it out"

DENIED: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "model model_weights model_class_overrides hf_config_path hf_overrides config_format": _MODEL,
        "tokenizer tokenizer_* limit_mm_per_prompt language_model_only mm_processor_kwargs": _MODEL,
        "revision code_revision": _REVISION,
        "trust_remote_code": _REMOTE_CODE,
        "dtype": _TYPE,
        "load_format model_loader_extra_config ignore_patterns weight_transfer_config": _WEIGHTS,
        "quantization_* allow_deprecated_quantization": _QUANTIZED,
        "spec_* per_request_spec_decode_metrics": "set speculative_config in rollout.external.arguments",
        "max_model_len": _LENGTH,
        "max_num_seqs max_num_queued_*": _SEQUENCES,
        "gpu_memory_utilization kv_cache_memory_bytes": _MEMORY,
        "enforce_eager": _GRAPHS,
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size": _RANKS,
        "data_parallel_* enable_expert_parallel enable_elastic_ep elastic_ep_*": _RANKS,
        "nnodes node_rank master_addr master_port device_ids distributed_executor_backend": _RANKS,
        "seed": _SEED,
        "generation_config override_generation_config watermark_config": _SAMPLING,
        "logprobs_mode max_logprobs return_sampling_mask": _LOG_PROBS,
        "enable_lora max_loras max_cpu_loras max_lora_rank lora_* default_mm_loras": _ADAPTERS,
        "enable_sleep_mode sleep_preserve_parameter_names": _SLEEP,
        "kv_transfer_config kv_offloading_*": _OLD_KEYS,
        "skip_tokenizer_init": _TOKENS,
        "enable_return_routed_experts": _EXPERTS,
        "served_model_name": _NAME,
        "runner convert pooler_config": _TASK,
        "disable_log_stats": "nothing reads vLLM's own statistics, and the run has metrics: leave it out",
    },
    "sglang": {
        "model model_path tokenizer_path tokenizer_mode json_model_override_args": _MODEL,
        "revision": _REVISION,
        "trust_remote_code": _REMOTE_CODE,
        "dtype": _TYPE,
        "load_format model_loader_extra_config *weight_loader* checkpoint_engine_* weight_version": _WEIGHTS,
        "*quantization* torchao_config modelopt_*": _QUANTIZED_ONCE,
        "speculative_* enable_*speculative*": _VERIFIED_OTHERWISE,
        "context_length": _LENGTH,
        "max_running_requests max_queued_requests": _SEQUENCES,
        "mem_fraction_static": _MEMORY,
        "disable_cuda_graph": _GRAPHS,
        "tp tp_size tensor_parallel_size pp_size pipeline_parallel_size dp dp_size data_parallel_size": _RANKS,
        "ep ep_size expert_parallel_size nnodes node_rank dist_init_addr device base_gpu_id gpu_id_step": _RANKS,
        "random_seed": _SEED,
        "sampling_defaults preferred_sampling_params": _SAMPLING,
        "*lora*": _ADAPTERS,
        "enable_memory_saver enable_weights_cpu_backup": _SLEEP,
        "enable_hierarchical_cache hicache_* enable_lmcache lmcache_* disaggregation_*": _OLD_KEYS,
        "skip_tokenizer_init stream_output incremental_streaming_output": _TOKENS,
        "enable_return_routed_experts": _EXPERTS,
        "host port api_key admin_api_key ssl_* fastapi_root_path *grpc*": _ADDRESS,
        "served_model_name": _NAME,
        "is_embedding": _TASK,
        "config": "a file would set arguments that are not checked: write them into the recipe",
    },
}
"""Reasons for which arguments are refused, with their remedies, by patterns of names, by engine."""


def check_arguments(draft: Draft) -> None:
    """An engine of another package is given no argument that is refused, whichever version is installed."""
    for instance, seen in draft.seen():
        if instance.has_engine or instance == answering(draft.instances, draft.recipe.evaluation.role):
            key = draft.recipe.key_of(KEY, instance.role)
            check_allowed(instance.engine, seen.rollout.external, instance.role, key)


def check_allowed(engine: str, external: ExternalConfig, role: str, key: str = KEY) -> None:
    """Refuse arguments that the recipe sets elsewhere, or that break what is promised about samples.

    Args:
        engine: Name of the engine.
        external: Section with the arguments.
        role: Role of the model.
        key: Setting at which the arguments are written.

    Raises:
        RecipeError: One of them is refused.
    """
    check_formats(engine, external, key)
    if engine == "vllm" and (drafts := external.given_arguments.get(DRAFTS)) is not None:
        _check_drafting(drafts, f"{key}.{DRAFTS}")
    reasons = {name: why for names, why in DENIED.get(engine, {}).items() for name in names.split()}
    for name, value in external.given_arguments.items():
        why = next((why for pattern, why in reasons.items() if fnmatchcase(name, pattern)), None)
        if why is not None:
            raise RecipeError.at(f"{key}.{name}", f"{engine} is not given this by hand: {why.format(role=role)}")
        if engine == "sglang" and value is False:
            raise RecipeError.at(
                f"{key}.{name}",
                "is false, but flags of SGLang's command line only switch something on: leave it out, or give its "
                "opposite, such as disable_radix_cache: true",
            )


def check_formats(engine: str, external: ExternalConfig, key: str) -> None:
    """Refuse a format of low precision in which an engine cannot have weights that come from the trainer.

    Raises:
        RecipeError: The value of an argument that names a format is no such format.
    """
    known: dict[str, list[str]] = {}
    for one in FORMATS.get(engine, ()):
        known.setdefault(one.argument, []).append(one.value)
    for name, values in known.items():
        value = external.given_arguments.get(name, PLAIN[0])
        if value not in values and value not in PLAIN:
            reason = (
                "weights come from the trainer, so the engine must quantize them as they arrive, and reads none that "
                "were quantized before"
                if name == "quantization"
                else "the difference from the trainer's log-probabilities that it explains is not known"
            )
            raise RecipeError.at(f"{key}.{name}", f"is {json.dumps(value)}, but {reason}: choose {_either(values)}")


DRAFTING = {
    "method": ("ngram", "ngram_gpu", "suffix"),
    "rejection_sample_method": ("standard",),
}
"""Values of `speculative_config` with which the tokens of an engine have exactly the model's distribution."""


def _check_drafting(drafts: JsonValue, key: str) -> None:
    """Refuse drafts that would change the distribution of tokens, or that come from weights that nothing sends."""
    if not isinstance(drafts, Mapping) or not isinstance(drafts.get("num_speculative_tokens"), int):
        raise RecipeError.at(
            key,
            f"is {json.dumps(drafts)}: it must be a mapping with method and num_speculative_tokens, as "
            "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4}",
        )
    if "model" in drafts or drafts.get("method") not in DRAFTING["method"]:
        raise RecipeError.at(
            f"{key}.method",
            f"is {json.dumps(drafts.get('method'))}: a model that drafts would have weights of its own, and nothing "
            f"sends or keeps them: leave out `model`, and choose {_either(DRAFTING['method'])}, which find drafts in "
            "the text",
        )
    for name, values in DRAFTING.items():
        if name in drafts and drafts[name] not in values:
            raise RecipeError.at(
                f"{key}.{name}",
                f"is {json.dumps(drafts[name])}: tokens would not have the distribution that training takes them to "
                f"have: set {_either(values)}, or leave it out",
            )


def check_expert_formats(draft: Draft) -> None:
    """A format for the weights of experts alone is given to a model with experts, if the model's size is known."""
    for instance, seen in draft.seen():
        size = draft.sizes.get(instance.role)
        if size is None or size.num_experts or not instance.has_engine:
            continue
        for one in formats_of(instance.engine, seen.rollout.external.given_arguments):
            if one.is_for_experts:
                raise RecipeError.at(
                    f"{draft.recipe.key_of(KEY, instance.role)}.{one.argument}",
                    f"is {one.value}, which quantizes experts alone, and the model of '{instance.role}' has none: "
                    "choose another format, or leave it out",
                )


def check_drafts(draft: Draft) -> None:
    """Tokens are drafted with no setting or model for which vLLM cannot do that, if the size of the model is known."""
    for instance, seen in draft.seen():
        if not (instance.has_engine and num_drafts(instance.engine, seen.rollout.external.given_arguments)):
            continue
        size, key = draft.sizes.get(instance.role), f"{draft.recipe.key_of(KEY, instance.role)}.{DRAFTS}"
        settings = {"rollout": seen.rollout, "evaluation": draft.recipe.evaluation}
        given = {
            f"{section}.{name} is {value:g}": True
            for section, config in settings.items()
            for name, value in config.truncations.items()
        } | {
            f"the model of '{instance.role}' sees images": size is not None and size.vision is not None,
            "algorithm.replay_experts is set": seen.algorithm.replay_experts,
        }
        for what in (what for what, is_given in given.items() if is_given):
            raise RecipeError.at(key, f"is given, but {what}, and vLLM cannot do both: leave out one of the two")


def _either(values: Sequence[str]) -> str:
    """Alternatives, in words."""
    *rest, last = values
    return f"{', '.join(rest)} or {last}" if rest else last
