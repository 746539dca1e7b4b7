"""TRL's configuration (`trl grpo`, `GRPOConfig` of release 1.0 and later) key by key."""

from __future__ import annotations

import math
from collections.abc import Mapping

from leaderless.cli.convert_config.table import (
    Made,
    NotTakenError,
    Row,
    Values,
    absent,
    as_list,
    as_loggers,
    as_name,
    as_number,
    as_optional,
    as_switch,
    as_whole,
    is_on,
    needless,
    number,
    part,
    texts,
    warmup_share,
    whole,
)
from leaderless.config.source import Setting

PROCESSES = "num_processes"
"""Number of processes, which TRL gets from `accelerate launch`."""
LOSSES: Mapping[str, Made] = {
    "grpo": {"algorithm.aggregation": "sequence_mean_token_mean"},
    "bnpo": {"algorithm.aggregation": "token_mean"},
    "dapo": {"algorithm.aggregation": "token_mean"},
    "dr_grpo": {"algorithm.aggregation": "sequence_mean_token_sum_norm"},
    "cispo": {"algorithm.policy_loss.type": "cispo", "algorithm.aggregation": "token_mean"},
    "sapo": {"algorithm.policy_loss.type": "sapo", "algorithm.aggregation": "sequence_mean_token_mean"},
    "vespo": {"algorithm.policy_loss.type": "vespo", "algorithm.aggregation": "token_mean"},
}
LEVELS: Mapping[str, Made] = {"token": {}, "sequence": {"algorithm.policy_loss.type": "gspo"}}
AGGREGATIONS: Mapping[str, Made] = {
    "sum_then_normalize": {},
    "normalize_then_sum": {"algorithm.advantage.type": "gdpo"},
}
SCHEDULES: Mapping[str, Made] = {name: {"optimizer.schedule": name} for name in ("constant", "linear", "cosine")} | {
    "constant_with_warmup": {"optimizer.schedule": "constant"}
}
TYPES: Mapping[str, Made] = {name: {"models.policy.compute_dtype": name} for name in ("float32", "bfloat16")} | {
    "auto": {}
}
REWARDS: Mapping[str, Made] = {
    "accuracy_reward": {"reward.math": 1.0, "data.train.answer": "solution"},
    "think_format_reward": {"reward.format.pattern": r"<think>(?!.*<think>).*?</think>.*"},
}


def sizes(values: Values) -> tuple[int, int, int]:
    """Prompts of a step, updates of a step, and epochs, as `GRPOConfig` derives them.

    Without `num_generations` nothing is generated: each update has rows of its own.

    Raises:
        NotTakenError: They do not divide each other.
    """
    if "num_generations" not in values:
        keys = (PROCESSES, "per_device_train_batch_size", "gradient_accumulation_steps")
        return math.prod(whole(values[key], key) for key in keys), 1, 1
    processes, per_device, accumulated, responses, epochs = (
        whole(values[key], key)
        for key in (
            PROCESSES,
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_generations",
            "num_iterations",
        )
    )
    given = values.get("generation_batch_size")
    generations = values.get("steps_per_generation") or accumulated
    batch = processes * per_device * whole(generations, "steps_per_generation")
    if given is not None:
        batch = whole(given, "generation_batch_size")
    update = processes * per_device * accumulated
    if batch % responses or batch % update:
        raise NotTakenError(
            f"{batch} completions of a generation must be a multiple of num_generations={responses} and of the "
            f"{update} of an update: correct the sizes, or --workers"
        )
    return batch // responses, batch // update * epochs, epochs


def _batch(_: Setting, values: Values) -> Made:
    prompts, updates, epochs = sizes(values)
    return {"batch.prompts_per_step": prompts, "batch.updates_per_step": updates, "batch.epochs_per_step": epochs}


def _steps(value: Setting, values: Values) -> Made:
    updates = whole(value, "max_steps")
    return {} if updates < 0 else {"steps": max(1, updates // sizes(values)[1])}


def _saving(value: Setting, values: Values) -> Made:
    if values.get("save_strategy", "steps") != "steps":
        return {}
    return {"checkpoint.every_steps": max(1, whole(value, "save_steps") // sizes(values)[1])}


def _evaluating(value: Setting, values: Values) -> Made:
    if str(value) in {"no", "False"}:
        return {}
    if str(value) != "steps":
        raise NotTakenError(f"eval_strategy={value}: set evaluation.every_steps")
    split = str(values.get("dataset_test_split", "test"))
    path = values.get("dataset_name")
    if path is None:
        raise NotTakenError("eval_strategy=steps needs dataset_name: set data.evaluation.path")
    given = values.get("eval_steps")
    made: dict[str, Setting] = {"data.evaluation.path": path, "data.evaluation.split": split}
    if values.get("dataset_config") is not None:
        made["data.evaluation.subset"] = values["dataset_config"]
    every = whole(values.get("logging_steps", 10) if given is None else given, "eval_steps")
    return made | {"evaluation.every_steps": max(1, every // sizes(values)[1])}


def _scaling(value: Setting, values: Values) -> Made:
    if str(values.get("multi_objective_aggregation")) == "normalize_then_sum":
        return {}  # each reward is divided by its deviation, whatever this says
    key = "algorithm.advantage.normalize_by_std"
    names = {"group": True, "true": True, "none": False, "false": False}
    if str(value).lower() not in names:
        raise NotTakenError(f"scale_rewards={value!r} has no counterpart; there is one for group and none")
    return {key: names[str(value).lower()]}


def _reward(value: Setting, values: Values) -> Made:
    """Rewards by name, or functions as `package.module.function`, with weights."""
    names = texts(value) if value is not None else []
    given = values.get("reward_weights")
    weights = [1.0] * len(names) if given is None else [number(one, "reward_weights") for one in as_list(given)]
    if len(weights) != len(names):
        raise NotTakenError(f"reward_weights has {len(weights)} entries for {len(names)} reward_funcs")
    made: dict[str, Setting] = {}
    for name, weight in zip(names, weights, strict=True):
        module, _, function = name.rpartition(".")
        if name in REWARDS:
            made |= REWARDS[name]
            part = next(key for key in REWARDS[name] if key.startswith("reward.")).split(".")[1]
            made = {key: one for key, one in made.items() if key != f"reward.{part}"} | {
                f"reward.{part}.weight": weight
            }
        elif module:
            made[f"reward.{module}:{function}"] = weight
        else:
            raise NotTakenError(f"reward_funcs: {name} has no counterpart; name a function as package.module.function")
    return made


def _engine(value: Setting, _: Values) -> Made:
    return {"rollout.engine": "vllm" if is_on(value) else "native"}


def _adapters(value: Setting, values: Values) -> Made:
    if not is_on(value):
        return {}
    targets = values.get("lora_target_modules") or "all-linear"
    names, dropout = texts(targets), number(values.get("lora_dropout", 0.05), "lora_dropout")
    return {
        "models.policy.lora.rank": whole(values.get("lora_r", 16), "lora_r"),
        "models.policy.lora.alpha": number(values.get("lora_alpha", 32), "lora_alpha"),
        "models.policy.lora.targets": "all-linear" if names == ["all-linear"] else names,
        **({"models.policy.lora.dropout": dropout} if dropout else {}),
    }


def _warmup(value: Setting, values: Values) -> Made:
    found = number(value, "warmup_steps")
    if found >= 1 or found == 0:
        return {"optimizer.warmup_updates": int(found)} if found else {}
    return _share(found, values)


def _share(value: Setting, values: Values) -> Made:
    total = whole(values["max_steps"], "max_steps")
    return warmup_share("warmup_ratio", number(value, "warmup_ratio"), None if total < 0 else total)


def _unbiased(value: Setting, values: Values) -> Made:
    return {"algorithm.kl.unbiased_gradient": is_on(value)} if number(values["beta"], "beta") else {}


def _clip(value: Setting, values: Values) -> Made:
    low = number(value, "epsilon")
    high = values.get("epsilon_high")
    return {
        "algorithm.policy_loss.clip_low": low,
        "algorithm.policy_loss.clip_high": low if high is None else number(high, "epsilon_high"),
    }


_SIZES = "batch.prompts_per_step, batch.updates_per_step"
ROWS: tuple[Row, ...] = (
    Row("run_name", "name", "trl"),
    Row("output_dir", "run.directory"),
    Row("max_steps", "steps", -1, "updates become steps; without it, epochs times rows / prompts per step", _steps),
    Row("model_name_or_path", "models.policy.path"),
    Row("model_revision", "models.policy.revision"),
    as_name("dtype", "models.policy.compute_dtype", TYPES, None, "weights are kept in float32"),
    as_name("torch_dtype", "models.policy.compute_dtype", TYPES, None, "as `dtype`"),
    as_switch("trust_remote_code", "models.policy.trust_remote_code"),
    as_switch("gradient_checkpointing", "models.policy.gradient_checkpointing", True),
    Row("use_peft", "models.policy.lora", False, "with `lora_r`, `lora_alpha`, `lora_target_modules`", _adapters),
    part("lora_r", "models.policy.lora.rank"),
    part("lora_alpha", "models.policy.lora.alpha"),
    part("lora_target_modules", "models.policy.lora.targets"),
    part("lora_dropout", "models.policy.lora.dropout"),
    Row("dataset_name", "data.train.path"),
    Row("dataset_config", "data.train.subset"),
    Row("dataset_train_split", "data.train.split", "train"),
    part("dataset_test_split", "data.evaluation.split", "test", "with `eval_strategy`"),
    as_switch("shuffle_dataset", "data.shuffle", True),
    as_whole("seed", "seed", 42),
    Row("reward_funcs", "reward.module:function", None, "called as TRL calls it; `accuracy_reward` is `math`", _reward),
    part("reward_weights", "reward.NAME.weight"),
    Row("per_device_train_batch_size", _SIZES, 8, "with the sizes below", _batch),
    part("gradient_accumulation_steps", "batch", 1, "a part of these sizes"),
    part("steps_per_generation", "batch", None, "a part of these sizes"),
    part("generation_batch_size", "batch", None, "a part of these sizes"),
    part(PROCESSES, "batch", 1, "`--workers` of the conversion"),
    part("num_iterations", "batch.epochs_per_step", 1, "and more updates"),
    as_whole("num_generations", "batch.responses_per_prompt", 8),
    as_whole("max_completion_length", "rollout.max_response_tokens", 512),
    Row("use_vllm", "rollout.engine", False, "`vllm`, else `native`", _engine),
    as_number("vllm_gpu_memory_utilization", "rollout.external.memory_fraction"),
    as_whole("vllm_tensor_parallel_size", "layout.rollout.tp"),
    as_number("temperature", "rollout.temperature", 1.0),
    as_number("top_p", "rollout.top_p"),
    as_whole("top_k", "rollout.top_k"),
    as_optional("min_p", "rollout.min_p"),
    as_name("loss_type", "algorithm.aggregation", LOSSES, "dapo", "`cispo`, `sapo` and `vespo` are losses, too"),
    as_name("importance_sampling_level", "algorithm.policy_loss.type", LEVELS, "token", "`sequence` is `gspo`"),
    Row("epsilon", "algorithm.policy_loss.clip_low, algorithm.policy_loss.clip_high", 0.2, "", _clip),
    part("epsilon_high", "algorithm.policy_loss.clip_high"),
    as_optional("delta", "algorithm.policy_loss.dual_clip"),
    as_number("vespo_k_pos", "algorithm.policy_loss.power_positive", None, "for the loss `vespo`"),
    as_number("vespo_lambda_pos", "algorithm.policy_loss.rate_positive", None, "for the loss `vespo`"),
    as_number("vespo_k_neg", "algorithm.policy_loss.power_negative", None, "for the loss `vespo`"),
    as_number("vespo_lambda_neg", "algorithm.policy_loss.rate_negative", None, "for the loss `vespo`"),
    as_number("beta", "algorithm.kl.coefficient", 0.0, "in the loss, by `k3`"),
    as_name(
        "multi_objective_aggregation",
        "algorithm.advantage.type",
        AGGREGATIONS,
        "sum_then_normalize",
        "`normalize_then_sum` is `gdpo`, else `grpo`",
    ),
    Row("scale_rewards", "algorithm.advantage.normalize_by_std", "group", "without effect in `gdpo`", _scaling),
    as_switch("mask_truncated_completions", "algorithm.overlong.filter"),
    as_number("entropy_coef", "algorithm.entropy_coefficient"),
    Row("use_bias_correction_kl", "algorithm.kl.unbiased_gradient", True, "with `beta` above 0", _unbiased),
    as_number("learning_rate", "optimizer.learning_rate", 1e-6),
    as_number("weight_decay", "optimizer.weight_decay"),
    as_number("adam_beta1", "optimizer.beta1"),
    as_number("adam_beta2", "optimizer.beta2"),
    as_number("adam_epsilon", "optimizer.epsilon"),
    as_number("max_grad_norm", "optimizer.max_grad_norm", 1.0),
    as_name("lr_scheduler_type", "optimizer.schedule", SCHEDULES, "linear", ""),
    Row("warmup_steps", "optimizer.warmup_updates", 0, "a share of `max_steps` if it is below 1", _warmup),
    Row("warmup_ratio", "optimizer.warmup_updates", None, "a share of `max_steps`", _share),
    Row("eval_strategy", "data.evaluation, evaluation.every_steps", "no", "`steps`, with `eval_steps`", _evaluating),
    part("eval_steps", "evaluation.every_steps"),
    as_optional("num_generations_eval", "evaluation.responses_per_prompt", whole),
    Row("save_steps", "checkpoint.every_steps", 500, "updates become steps", _saving),
    part("save_strategy", "checkpoint.every_steps", "steps"),
    as_optional("save_total_limit", "checkpoint.keep", whole),
    as_loggers("report_to", ("none",), "project"),
    part("project", "loggers", None, "their project"),
    *needless(
        "`metrics.jsonl` and the report are always written",
        "logging_steps log_completions num_completions_to_print logging_first_step logging_dir",
    ),
    *needless("on accelerators models compute in bfloat16", "bf16 fp16 tf32"),
    *needless(
        "placed by the planner",
        "vllm_mode vllm_enable_sleep_mode ddp_find_unused_parameters remove_unused_columns dataloader_num_workers "
        "dataset_num_proc attn_implementation use_liger_kernel torch_compile",
    ),
    *needless("samples are corrected where `algorithm.correction` says so", "vllm_importance_sampling_correction"),
    *absent("set `steps`, where 100 is a placeholder: epochs x rows / batch.prompts_per_step", "num_train_epochs"),
    *absent(
        "no such penalty; `rollout` has temperature, top_p, top_k and min_p", "repetition_penalty generation_kwargs"
    ),
    *absent("the reference stays as it is", "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"),
    *absent("all tokens count alike", "top_entropy_quantile off_policy_mask_threshold"),
    *absent(
        "start `leaderless engine` there, and name it in `rollout.external.addresses`",
        "vllm_server_base_url vllm_server_host vllm_server_port",
    ),
    *absent("export to a folder, and push it yourself", "push_to_hub hub_model_id"),
)
