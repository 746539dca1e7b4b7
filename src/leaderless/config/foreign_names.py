"""Settings under the names that users of verl, TRL and OpenRLHF know them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    "response_length",
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
