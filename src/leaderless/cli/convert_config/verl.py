"""verl's configuration (`verl.trainer.main_ppo`, releases 0.7 to 0.9) key by key."""

from __future__ import annotations

from pathlib import PurePosixPath

from leaderless.cli.convert_config.table import (
    Made,
    NotTakenError,
    Row,
    Values,
    absent,
    as_limit,
    as_loggers,
    as_name,
    as_number,
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
from leaderless.cli.convert_config.verl_names import AGGREGATIONS, ENGINES, ESTIMATORS, LOSSES, PENALTIES, SCHEDULES
from leaderless.config.source import Setting

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
ARGUMENTS = "rollout.external.arguments"
_LOSS, _LOW, _HIGH = (f"{ACTOR}.{key}" for key in ("policy_loss.loss_mode", "clip_ratio_low", "clip_ratio_high"))
_CORRECTION = "algorithm.rollout_correction"
_KINDS = "`mse` is `k2`, `low_var_kl` is `k3`; `+` at the end: `unbiased_gradient`"
_MANAGERS = {"naive", "dapo", "gdpo"}
"""Ways to call rewards that give what the other settings say."""
MATH_REWARD = "leaderless.rewards.trl_and_verl:math_of_verl"
"""Reward for verl's rows without a custom function."""


def _path(value: Setting, key: str) -> str:
    files = texts(value)
    if len(files) != 1:
        raise NotTakenError(f"{key} names {len(files)} files: put them into one folder, or mix them as data.train.NAME")
    return files[0]


def _files(ours: str, key: str) -> Row:
    def convert(value: Setting, _: Values) -> Made:
        return {} if value is None else {ours: _path(value, key)}

    return Row(key, ours, meaning="one file, or a list of one", convert=convert)


def _updates_per_step(values: Values) -> tuple[int, int]:
    """Updates of a step, and the epochs that they make."""
    batch, size, epochs = (
        whole(values[key], key)
        for key in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")
    )
    if size < 1 or batch % size:
        raise NotTakenError(f"ppo_mini_batch_size={size} must divide data.train_batch_size={batch}")
    return batch // size * epochs, epochs


def _mini_batch(_: Setting, values: Values) -> Made:
    updates, epochs = _updates_per_step(values)
    return {"batch.updates_per_step": updates, "batch.epochs_per_step": epochs}


def _kl_in_loss(value: Setting, values: Values) -> Made:
    if not is_on(value):
        return {}
    kind = str(values[f"{ACTOR}.kl_loss_type"])
    if kind.removesuffix("+") not in PENALTIES:
        raise NotTakenError(f"kl_loss_type={kind} has no counterpart; there is one for {', '.join(PENALTIES)}")
    if PENALTIES.get(kind) == "k1":
        raise NotTakenError(f"kl_loss_type={kind} has a gradient of 0 on average: use {kind}+, mse or low_var_kl")
    return {
        "algorithm.kl.coefficient": number(values[f"{ACTOR}.kl_loss_coef"], "kl_loss_coef"),
        "algorithm.kl.place": "loss",
        "algorithm.kl.estimator": PENALTIES[kind.removesuffix("+")],
        **({"algorithm.kl.unbiased_gradient": True} if kind.endswith("+") else {}),
    }


def _clip_low(value: Setting, values: Values) -> Made:
    """The lower bound, or of DPPO the threshold, which is one for both directions here."""
    low, high = (number(one, key) for one, key in ((value, "clip_ratio_low"), (values[_HIGH], "clip_ratio_high")))
    if str(values[_LOSS]).startswith("dppo_"):
        if low != high:
            raise NotTakenError(
                f"DPPO has one threshold here, but clip_ratio_low={low:g} and clip_ratio_high={high:g}: set "
                "algorithm.policy_loss.threshold"
            )
        return {"algorithm.policy_loss.threshold": low}
    return {"algorithm.policy_loss.clip_low": low}


def _clip(value: Setting, values: Values) -> Made:
    """Nothing: verl itself takes the two bounds, which have defaults of their own."""
    bounds = {number(values[_LOW], "clip_ratio_low"), number(values[_HIGH], "clip_ratio_high")}
    if number(value, "clip_ratio") not in bounds:
        raise NotTakenError(
            "verl takes clip_ratio_low and clip_ratio_high, whose defaults are 0.2, and so does this recipe: correct "
            "algorithm.policy_loss if you meant otherwise"
        )
    return {}


def _largest_ratio(value: Setting, values: Values) -> Made:
    key = "max_ratio" if str(values[_LOSS]).startswith("dppo_") else "dual_clip"
    return {f"algorithm.policy_loss.{key}": number(value, "clip_ratio_c")}


def _by_std(value: Setting, values: Values) -> Made:
    if values["algorithm.adv_estimator"] == "gdpo" and not is_on(value):
        raise NotTakenError("GDPO divides each reward by its deviation here")
    return {"algorithm.advantage.normalize_by_std": is_on(value)}


def _keys(value: Setting, values: Values) -> Made:
    if values["algorithm.adv_estimator"] != "gdpo" or value is None:
        return {}
    raise NotTakenError(
        f"each reward is a function here: write one for each of {', '.join(texts(value))}, and name them in `reward`, "
        "each with its weight, in place of the one that is there"
    )


def _reward_manager(value: Setting, _: Values) -> Made:
    if str(value) not in _MANAGERS:
        raise NotTakenError(f"there is no counterpart of {value}: name its function in `reward`")
    return {}


def _kl_in_reward(value: Setting, values: Values) -> Made:
    if not is_on(value):
        return {}
    if values["algorithm.adv_estimator"] == "gdpo":
        raise NotTakenError("gdpo compares the rewards without it, also in verl: set use_kl_loss")
    if is_on(values[f"{ACTOR}.use_kl_loss"]):
        raise NotTakenError("there is one penalty: use_kl_loss was taken, and use_kl_in_reward was not")
    control = "algorithm.kl_ctrl"
    made: dict[str, Setting] = {
        "algorithm.kl.coefficient": number(values[f"{control}.kl_coef"], "kl_coef"),
        "algorithm.kl.place": "reward",
    }
    if values[f"{control}.type"] == "adaptive":
        made["algorithm.kl.target"] = number(values[f"{control}.target_kl"], "target_kl")
        made["algorithm.kl.horizon"] = number(values[f"{control}.horizon"], "horizon")
    return made


def _penalty(value: Setting, values: Values) -> Made:
    if is_on(values["algorithm.use_kl_in_reward"]) and PENALTIES.get(str(value)) != "k1":
        raise NotTakenError("in the reward, only kl has the gradient of the divergence, and it was taken")
    return {}


def _top_k(ours: str, key: str) -> Row:
    return Row(key, ours, None, "-1 becomes 0: keep all", lambda value, _: {ours: max(0, whole(value, key))})


def _warmup(value: Setting, values: Values) -> Made:
    """The warm-up; verl changes the rate once in a step, after all of its updates."""
    steps, (updates, _) = whole(value, "lr_warmup_steps"), _updates_per_step(values)
    if steps > 0:
        return {"optimizer.warmup_updates": steps * updates}
    key, total = "lr_warmup_steps_ratio", values.get("trainer.total_training_steps")
    share = number(values[f"{ACTOR}.optim.{key}"], key)
    return warmup_share(key, share, None if total is None else whole(total, "total_training_steps") * updates)


def _betas(value: Setting, _: Values) -> Made:
    first, second = texts(value)
    return {"optimizer.beta1": number(first, "betas"), "optimizer.beta2": number(second, "betas")}


def _lora(value: Setting, values: Values) -> Made:
    rank = whole(value, "lora_rank")
    if rank == 0:
        return {}
    targets = values.get(f"{MODEL}.target_modules", "all-linear")
    alpha = number(values.get(f"{MODEL}.lora_alpha", 16), "lora_alpha")
    return {
        "models.policy.lora.rank": rank,
        "models.policy.lora.alpha": alpha,
        "models.policy.lora.targets": targets if targets == "all-linear" else texts(targets),
    }


def reward_of(value: Setting, values: Values) -> Made:
    """The custom function, or without one that for mathematics; none next to a reward model."""
    if is_on(values.get("reward_model.enable")):
        if value is None:
            return {}
        raise NotTakenError("with reward_model.enable, the scores of the model are the only reward")
    if value is None:
        return {f"reward.{MATH_REWARD}": 1.0}
    path = PurePosixPath(str(value))
    if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
        raise NotTakenError(
            f"{value} is not below the folder of the command: copy it there, and name it in `reward` as module:function"
        )
    module = ".".join(path.with_suffix("").parts)
    return {f"reward.{module}:{values['custom_reward_function.name']}": 1.0}


def _reward_model(value: Setting, values: Values) -> Made:
    if not is_on(value):
        return {}
    path, estimator = values.get("reward_model.model.path"), str(values["algorithm.adv_estimator"])
    if path is None:
        raise NotTakenError("reward_model.model.path is not given: set models.reward_model")
    if ESTIMATORS.get(estimator, {}).get("workflow") != "grpo" or is_on(values.get("algorithm.filter_groups.enable")):
        raise NotTakenError(
            "add a node {run: model_reward, role: reward_model} to the workflow, and set models.reward_model"
        )
    return {"workflow": "rlhf", "models.reward_model.path": path}


def _steps(value: Setting, _: Values) -> Made:
    return {} if value is None else {"steps": whole(value, "trainer.total_training_steps")}


def _engine_size(axis: str, theirs: str) -> Row:
    """A row for the number of ranks that an engine has along an axis."""

    def convert(value: Setting, _: Values) -> Made:
        size = whole(value, theirs)
        return {f"layout.rollout.{axis}": size} if size > 1 else {}

    return Row(f"{ROLLOUT}.{theirs}", f"layout.rollout.{axis}", convert=convert, meaning="if above 1")


def _sampled(value: Setting, values: Values) -> Made:
    temperature = number(values[f"{ROLLOUT}.val_kwargs.temperature"], "temperature")
    return {"evaluation.temperature": temperature if is_on(value) else 0.0}


def _filter_groups(value: Setting, _: Values) -> Made:
    return {"workflow": "dapo"} if is_on(value) else {}


def _overlong(value: Setting, values: Values) -> Made:
    if not is_on(value):
        return {}
    if values["algorithm.adv_estimator"] == "gdpo":
        raise NotTakenError("gdpo compares the rewards without it, also in verl: make it one of the rewards")
    key = "reward_model.overlong_buffer"
    if number(values.get(f"{key}.penalty_factor", 1.0), "penalty_factor") != 1:
        raise NotTakenError("overlong_buffer.penalty_factor must be 1, by which the reward falls at most")
    return {"algorithm.overlong.buffer_tokens": whole(values.get(f"{key}.len", 0), "overlong_buffer.len")}


def _importance(value: Setting, values: Values) -> Made:
    if value is None:
        return {}
    if str(value) not in {"token", "sequence"}:
        raise NotTakenError(f"rollout_is={value} has no counterpart; there is one for token, sequence")
    highest = number(values[f"{_CORRECTION}.rollout_is_threshold"], "rollout_is_threshold")
    key = "algorithm.correction"
    return {f"{key}.type": "truncate", f"{key}.level": str(value), f"{key}.highest": highest}


def _overlong_prompts(value: Setting, values: Values) -> Made:
    if not is_on(value) and values["data.truncation"] != "error":
        raise NotTakenError(
            f"prompts are not cut as by data.truncation={values['data.truncation']}: drop those that are too long"
        )
    return {"data.overlong": "drop" if is_on(value) else "error"}


def _only_with(row: Row, key: str, *names: str) -> Row:
    """A row that matters with some values of another key alone."""

    def convert(value: Setting, values: Values) -> Made:
        return row.made(value, values) if values[key] in names else {}

    said = ", ".join(f"`{key.rpartition('.')[2]}={name}`" for name in names)
    return Row(row.theirs, row.ours, row.default, row.meaning or f"with {said}", convert)


def _only_gae(row: Row) -> Row:
    """A row that matters with a critic alone."""
    return _only_with(row, "algorithm.adv_estimator", "gae")


_FUNCTION = f"reward.module:function, or {MATH_REWARD}"
_UPDATES = "prompts per step / prompts per update, in each epoch"
_FILLED = "micro-batches are filled by tokens, and change no result"
_LOG_PROB_SIZES = "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz max_token_len_per_gpu"
ROWS: tuple[Row, ...] = (
    Row("trainer.experiment_name", "name", "verl"),
    Row("trainer.default_local_dir", "run.directory"),
    Row("trainer.total_training_steps", "steps", None, "without it, epochs times rows / prompts per step", _steps),
    as_name("algorithm.adv_estimator", "workflow, algorithm.advantage.type", ESTIMATORS, "gae", "the workflow, too"),
    Row("algorithm.filter_groups.enable", "workflow", convert=_filter_groups, meaning="true: `dapo`"),
    as_whole("algorithm.filter_groups.max_num_gen_batches", "algorithm.repeat.max_rounds"),
    Row("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.normalize_by_std", convert=_by_std),
    Row(
        "algorithm.gdpo_reward_keys", "reward", None, "a function of its own for each, with the advantage `gdpo`", _keys
    ),
    part("algorithm.gdpo_reward_weights", "reward", None, "the weight of each function"),
    _only_with(
        as_number("algorithm.gamma", "algorithm.advantage.discount", 1.0),
        "algorithm.adv_estimator",
        "gae",
        "reinforce_plus_plus",
    ),
    _only_gae(as_number("algorithm.lam", "algorithm.advantage.decay", 1.0)),
    Row("algorithm.use_kl_in_reward", "algorithm.kl", False, "with `kl_penalty` and `kl_ctrl`", _kl_in_reward),
    Row("algorithm.kl_penalty", "algorithm.kl.estimator", "kl", "must be `kl`, which is `k1`", _penalty),
    part("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", 0.001),
    part("algorithm.kl_ctrl.type", "algorithm.kl.target", "fixed", "`adaptive`: a target"),
    part("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", 0.1),
    part("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", 10000),
    Row(f"{_CORRECTION}.rollout_is", "algorithm.correction", None, "`truncate` at the threshold", _importance),
    part(f"{_CORRECTION}.rollout_is_threshold", "algorithm.correction.highest", 2.0),
    _files("data.train.path", "data.train_files"),
    _files("data.evaluation.path", "data.val_files"),
    Row("data.prompt_key", "data.train.prompt", "prompt", "and of the held-out data"),
    Row("data.reward_fn_key", "data.train.source", "data_source"),
    as_whole("data.max_prompt_length", "data.max_prompt_tokens", 512),
    as_whole("data.max_response_length", "rollout.max_response_tokens", 512),
    as_whole("data.train_batch_size", "batch.prompts_per_step", 1024),
    as_limit("data.train_max_samples", "data.train.limit"),
    as_limit("data.val_max_samples", "evaluation.max_prompts"),
    as_switch("data.shuffle", "data.shuffle", True),
    as_limit("data.seed", "seed"),
    Row("data.filter_overlong_prompts", "data.overlong", False, "`drop`, or without it `error`", _overlong_prompts),
    part("data.truncation", "data.overlong", "error", "prompts are never cut"),
    Row("data.image_key", "", None, "`data.train.images`, for a model that sees", is_needless=True),
    Row(f"{MODEL}.path", "models.policy.path"),
    as_switch(f"{MODEL}.enable_gradient_checkpointing", "models.policy.gradient_checkpointing", True),
    as_switch(f"{MODEL}.trust_remote_code", "models.policy.trust_remote_code"),
    Row(f"{MODEL}.lora_rank", "models.policy.lora.rank", convert=_lora, meaning="0 for none"),
    part(f"{MODEL}.lora_alpha", "models.policy.lora.alpha", None),
    part(f"{MODEL}.target_modules", "models.policy.lora.targets", None),
    Row(f"{ACTOR}.ppo_mini_batch_size", "batch.updates_per_step", 256, _UPDATES, _mini_batch),
    part(f"{ACTOR}.ppo_epochs", "batch.epochs_per_step", 1, "and more updates"),
    as_whole(f"{ACTOR}.ppo_max_token_len_per_gpu", "batch.micro_batch_tokens"),
    as_name(
        _LOSS, "algorithm.policy_loss.type", LOSSES, "vanilla", "`vanilla` is `ppo`; `dppo_tv`, `dppo_kl` are `dppo`"
    ),
    Row(f"{ACTOR}.clip_ratio", "algorithm.policy_loss", None, "nothing, as in verl: the next two count", _clip),
    Row(_LOW, "algorithm.policy_loss.clip_low", 0.2, "`threshold` of `dppo`", _clip_low),
    as_number(_HIGH, "algorithm.policy_loss.clip_high", 0.2),
    Row(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.policy_loss.dual_clip",
        3.0,
        "for the loss `vanilla`; `max_ratio` of `dppo`",
        _largest_ratio,
    ),
    as_number(f"{ACTOR}.tau_pos", "algorithm.policy_loss.temperature_positive", 1.0, "for the loss `sapo`"),
    as_number(f"{ACTOR}.tau_neg", "algorithm.policy_loss.temperature_negative", 1.05, "for the loss `sapo`"),
    *(
        _only_with(as_number(f"{ACTOR}.policy_loss.{theirs}", f"algorithm.policy_loss.{ours}", default), _LOSS, loss)
        for loss, theirs, ours, default in (
            ("clip_cov", "clip_cov_ratio", "fraction", 0.0002),
            ("clip_cov", "clip_cov_lb", "lowest", 1.0),
            ("clip_cov", "clip_cov_ub", "highest", 5.0),
            ("kl_cov", "kl_cov_ratio", "fraction", 0.0002),
            ("kl_cov", "ppo_kl_coef", "coefficient", 0.1),
        )
    ),
    as_name(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation", AGGREGATIONS, "token-mean", ""),
    as_number(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", 0),
    Row(f"{ACTOR}.use_kl_loss", "algorithm.kl", False, "with `kl_loss_coef` and `kl_loss_type`", _kl_in_loss),
    part(f"{ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", 0.001),
    part(f"{ACTOR}.kl_loss_type", "algorithm.kl.estimator", "low_var_kl", _KINDS),
    as_number(f"{ACTOR}.grad_clip", "optimizer.max_grad_norm", 1.0),
    as_number(f"{ACTOR}.optim.lr", "optimizer.learning_rate", 1e-6),
    as_number(f"{ACTOR}.optim.weight_decay", "optimizer.weight_decay", 0.01),
    Row(f"{ACTOR}.optim.betas", "optimizer.beta1, optimizer.beta2", [0.9, 0.999], "", _betas),
    as_name(f"{ACTOR}.optim.lr_scheduler_type", "optimizer.schedule", SCHEDULES, "constant", ""),
    as_number(f"{ACTOR}.optim.min_lr_ratio", "optimizer.final_fraction", 0.0),
    Row(f"{ACTOR}.optim.lr_warmup_steps", "optimizer.warmup_updates", -1, "steps become updates", _warmup),
    part(f"{ACTOR}.optim.lr_warmup_steps_ratio", "optimizer.warmup_updates", 0.0),
    as_name(f"{ROLLOUT}.name", "rollout.engine", ENGINES, None, "`hf` is `native`"),
    as_whole(f"{ROLLOUT}.n", "batch.responses_per_prompt", 1),
    as_number(f"{ROLLOUT}.temperature", "rollout.temperature", 1.0),
    as_number(f"{ROLLOUT}.top_p", "rollout.top_p"),
    _top_k("rollout.top_k", f"{ROLLOUT}.top_k"),
    as_number(f"{ROLLOUT}.gpu_memory_utilization", "rollout.external.memory_fraction"),
    _engine_size("tp", "tensor_model_parallel_size"),
    _engine_size("pp", "pipeline_model_parallel_size"),
    _engine_size("ep", "expert_parallel_size"),
    as_whole(f"{ROLLOUT}.max_num_batched_tokens", f"{ARGUMENTS}.max_num_batched_tokens"),
    as_switch(f"{ROLLOUT}.enable_chunked_prefill", f"{ARGUMENTS}.enable_chunked_prefill"),
    as_whole(f"{ROLLOUT}.max_num_seqs", "rollout.max_sequences"),
    as_whole(f"{ROLLOUT}.val_kwargs.n", "evaluation.responses_per_prompt", 1),
    Row(f"{ROLLOUT}.val_kwargs.do_sample", "evaluation.temperature", False, "false: 0", _sampled),
    part(f"{ROLLOUT}.val_kwargs.temperature", "evaluation.temperature", 0),
    as_number(f"{ROLLOUT}.val_kwargs.top_p", "evaluation.top_p"),
    _top_k("evaluation.top_k", f"{ROLLOUT}.val_kwargs.top_k"),
    _only_gae(Row("critic.model.path", "models.critic.path")),
    _only_gae(as_number("critic.optim.lr", "roles.critic.optimizer.learning_rate", 1e-5)),
    _only_gae(as_number("critic.optim.weight_decay", "roles.critic.optimizer.weight_decay", 0.01)),
    _only_gae(as_number("critic.cliprange_value", "algorithm.critic.value_clip", 0.5)),
    _only_gae(as_whole("trainer.critic_warmup", "algorithm.critic.warmup_steps", 0)),
    Row("custom_reward_function.path", _FUNCTION, None, "called as verl calls it", reward_of),
    part("custom_reward_function.name", "reward.module:function", "compute_score"),
    Row("reward_model.enable", "workflow", None, "true: `rlhf`, in place of `grpo`", _reward_model),
    part("reward_model.model.path", "models.reward_model.path", None, "with `reward_model.enable`"),
    Row("reward_model.overlong_buffer.enable", "algorithm.overlong.buffer_tokens", None, "with `len`", _overlong),
    part("reward_model.overlong_buffer.len", "algorithm.overlong.buffer_tokens", None),
    part("reward_model.overlong_buffer.penalty_factor", "", None, "must be 1"),
    as_limit("trainer.save_freq", "checkpoint.every_steps"),
    as_limit("trainer.test_freq", "evaluation.every_steps"),
    as_limit("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    *needless("`--nodes` and `--workers` of `leaderless submit`", "nnodes n_gpus_per_node device", "trainer."),
    as_loggers("trainer.logger", ("console", "file"), "trainer.project_name"),
    part("trainer.project_name", "loggers", None, "their project"),
    *needless("samples of evaluations are always kept", "trainer.log_val_generations"),
    *needless("the same command continues", "resume_mode resume_from_path", "trainer."),
    *needless("evaluation begins before the first step", "trainer.val_before_train"),
    *needless("rows are balanced by cost", "trainer.balance_batch"),
    *needless(_FILLED, "use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu", f"{ACTOR}."),
    *needless(_FILLED, _LOG_PROB_SIZES, f"{ROLLOUT}.log_prob_"),
    *needless(_FILLED, _LOG_PROB_SIZES, "actor_rollout_ref.ref.log_prob_"),
    *needless(
        _FILLED,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu "
        "forward_max_token_len_per_gpu",
        "critic.",
    ),
    Row("reward.reward_manager.name", "", None, "follows from the other settings", _reward_manager, is_needless=True),
    *needless("`run.reward_processes`", "reward.num_workers"),
    *needless("there is no padding", f"{MODEL}.use_remove_padding"),
    *needless("placed by the planner", f"{ACTOR}.strategy critic.strategy"),
    *needless(
        "placed by the planner",
        "mode load_format free_cache_engine enforce_eager",
        f"{ROLLOUT}.",
    ),
    *absent(
        "weights and optimizer stay on the device",
        "actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload ref.fsdp_config.param_offload",
        "actor_rollout_ref.",
    ),
    *absent("set `layout.policy.cp`, whose ranks share a sample", f"{ACTOR}.ulysses_sequence_parallel_size"),
    *absent("set `steps`, where 100 is a placeholder: epochs x rows / batch.prompts_per_step", "trainer.total_epochs"),
    *absent("write an environment, see the guide of tools", "enable tool_config_path", f"{ROLLOUT}.multi_turn."),
)
