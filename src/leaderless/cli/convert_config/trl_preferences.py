"""TRL's configurations of preferences (`trl dpo`, `trl kto` and `trl reward`, of release 1.0 and later) key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from leaderless.cli.convert_config import trl
from leaderless.cli.convert_config.table import (
    Made,
    NotTakenError,
    Row,
    Values,
    absent,
    as_list,
    as_name,
    as_number,
    as_optional,
    needless,
    number,
    part,
    texts,
    whole,
)
from leaderless.config.source import Setting

LOSSES: Mapping[str, Made] = {
    "sigmoid": {"type": "sigmoid"},
    "sigmoid_norm": {"type": "sigmoid", "length_normalized": True},
    "hinge": {"type": "hinge"},
    "ipo": {"type": "ipo"},
    "robust": {"type": "robust"},
    "apo_zero": {"type": "apo_zero"},
}
"""Losses of `DPOConfig`, as settings of `algorithm.preference_loss`."""
LOSSES_OF_SINGLES: Mapping[str, Made] = {"kto": {"algorithm.preference_loss.type": "kto"}}
ORDERS: Mapping[str, Made] = {"random": {"data.shuffle": True}, "sequential": {"data.shuffle": False}}
PACKED_TOKENS = 16384
"""Tokens of a pass, unless the recipe says otherwise; both responses of a pair have to fit."""
SHARED = (
    "run_name output_dir max_steps model_name_or_path model_revision dtype torch_dtype trust_remote_code "
    "gradient_checkpointing use_peft lora_r lora_alpha lora_target_modules lora_dropout dataset_name dataset_config "
    "dataset_train_split dataset_test_split seed learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm lr_scheduler_type warmup_steps warmup_ratio eval_strategy eval_steps save_steps save_strategy "
    "save_total_limit report_to project logging_steps logging_first_step logging_dir bf16 fp16 tf32 "
    "ddp_find_unused_parameters remove_unused_columns dataloader_num_workers dataset_num_proc attn_implementation "
    "use_liger_kernel torch_compile num_train_epochs push_to_hub hub_model_id"
)
"""Keys that mean what they mean in `GRPOConfig`."""


def _batch(_: Setting, values: Values) -> Made:
    return {"batch.prompts_per_step": trl.sizes(values)[0]}


def _lengths(value: Setting, _: Values) -> Made:
    if value is None:
        raise NotTakenError("a limit is needed: set data.max_prompt_tokens and data.max_response_tokens")
    found = whole(value, "max_length")
    made: Made = {"data.max_prompt_tokens": found, "data.max_response_tokens": found}
    return {**made, "batch.micro_batch_tokens": "auto"} if 3 * found > PACKED_TOKENS else made


def _loss(value: Setting, values: Values) -> Made:
    """A loss of pairs, or one and imitation, with weights."""
    names, given = texts(value), values.get("loss_weights")
    weights = [1.0] * len(names) if given is None else [number(one, "loss_weights") for one in as_list(given)]
    if len(weights) != len(names):
        raise NotTakenError(f"loss_weights has {len(weights)} entries for {len(names)} of loss_type")
    weight_of = dict(zip(names, weights, strict=True))
    imitation = weight_of.pop("sft", 0.0)
    unknown = [name for name in weight_of if name not in LOSSES]
    if unknown:
        raise NotTakenError(f"loss_type={unknown[0]!r} has no counterpart; there is one for {', '.join(LOSSES)}")
    if len(weight_of) != 1 or set(weight_of.values()) != {1.0}:
        raise NotTakenError(
            "there is one loss of weight 1, and imitation next to it, `sft`: scale the weights, or for imitation alone "
            "use the workflow sft"
        )
    (name,) = weight_of
    smoothing = number(values.get("label_smoothing") or 0.0, "label_smoothing")
    made = dict(LOSSES[name])
    if name == "robust":  # the only one of them that reads it; without wrong labels it is the logistic loss
        made = {**made, "label_smoothing": smoothing} if smoothing else dict(LOSSES["sigmoid"])
    made |= {"sft_coefficient": imitation} if imitation else {}
    return {f"algorithm.preference_loss.{key}": one for key, one in made.items()}


def _of_reward_model(row: Row) -> Row:
    """A row about the policy, as one about the reward model."""

    def renamed(key: str) -> str:
        return key.replace("models.policy.", "models.reward_model.")

    def following(convert: Callable[[Setting, Values], Made]) -> Callable[[Setting, Values], Made]:
        return lambda value, values: {renamed(key): one for key, one in convert(value, values).items()}

    return replace(row, ours=renamed(row.ours), convert=None if row.convert is None else following(row.convert))


def _rows(learning_rate: float, *own: Row) -> tuple[Row, ...]:
    """The rows of a trainer: what all three have, and its own."""
    of_grpo = {row.theirs: row for row in trl.ROWS}
    return (
        *(
            replace(of_grpo[key], default=learning_rate) if key == "learning_rate" else of_grpo[key]
            for key in SHARED.split()
        ),
        Row("per_device_train_batch_size", "batch.prompts_per_step", 8, "times processes and accumulation", _batch),
        part("gradient_accumulation_steps", "batch.prompts_per_step", 1),
        part(trl.PROCESSES, "batch.prompts_per_step", 1, "`--workers` of the conversion"),
        Row(
            "max_length",
            "data.max_prompt_tokens, data.max_response_tokens",
            1024,
            "a limit for each of both; longer rows are dropped, not cut",
            _lengths,
        ),
        *own,
        *needless("models run without dropout", "disable_dropout"),
        *needless("rows are packed", "pad_to_multiple_of"),
        *needless("memory is planned", "activation_offloading"),
    )


def _rows_with_reference(*own: Row) -> tuple[Row, ...]:
    """The rows of a trainer that has a reference."""
    of_grpo = {row.theirs: row for row in trl.ROWS}
    return _rows(
        1e-6,
        as_number("beta", "algorithm.preference_loss.beta", 0.1),
        *own,
        *needless(
            "the log-probabilities of the reference are computed once and kept",
            "precompute_ref_log_probs precompute_ref_batch_size",
        ),
        *(of_grpo[key] for key in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")),
        *absent("experts are not balanced in this workflow; other models need none", "router_aux_loss_coef"),
    )


DPO_ROWS = _rows_with_reference(
    Row(
        "loss_type",
        "algorithm.preference_loss.type",
        "sigmoid",
        "`sft` next to one is `sft_coefficient`, `sigmoid_norm` is `length_normalized`",
        _loss,
    ),
    part("loss_weights", "algorithm.preference_loss.sft_coefficient"),
    part("label_smoothing", "algorithm.preference_loss.label_smoothing", 0.0, "with `robust`"),
    as_name("train_sampling_strategy", "data.shuffle", ORDERS, "random", "`sequential` is false"),
    as_name("f_divergence_type", "", {"reverse_kl": {}}, "reverse_kl", "only `reverse_kl`, which needs no setting"),
    *needless("rows are packed", "padding_free"),
    *needless("rows are not cut", "truncation_mode"),
    *absent("no such loss", "ld_alpha use_weighting discopop_tau f_alpha_divergence_coef"),
)
KTO_ROWS = _rows_with_reference(
    as_name("loss_type", "algorithm.preference_loss.type", LOSSES_OF_SINGLES, "kto", "only `kto`"),
    as_number("desirable_weight", "algorithm.preference_loss.desirable_weight", 1.0),
    as_number("undesirable_weight", "algorithm.preference_loss.undesirable_weight", 1.0),
    as_name("train_sampling_strategy", "data.shuffle", ORDERS, "sequential", "`sequential` is false"),
)
REWARD_ROWS = tuple(
    _of_reward_model(row)
    for row in _rows(
        1e-4,
        as_optional("center_rewards_coefficient", "algorithm.reward_model.centering"),
        as_name("train_sampling_strategy", "data.shuffle", ORDERS, "random", "`sequential` is false"),
        *needless("a reward model has one score", "lora_task_type"),
        *absent("the tokenizer's is used: change it in its folder", "chat_template_path eos_token"),
    )
)


def _columns(**names: str) -> Mapping[str, Setting]:
    """The columns of rows, which have the same names in TRL's held-out data; those are left out if there are none."""
    return {f"data.{part}.{key}": name for part in ("train", "evaluation") for key, name in names.items()}


BASES: Mapping[str, Mapping[str, Setting]] = {
    "trl-dpo": {"workflow": "dpo", **_columns(chosen="chosen", rejected="rejected")},
    "trl-kto": {"workflow": "kto", **_columns(response="completion", desirable="label")},
    "trl-reward": {"workflow": "reward_model", **_columns(chosen="chosen", rejected="rejected")},
}
"""Settings that hold in each, whatever its configuration says."""
TABLES: Mapping[str, Sequence[Row]] = {"trl-dpo": DPO_ROWS, "trl-kto": KTO_ROWS, "trl-reward": REWARD_ROWS}
