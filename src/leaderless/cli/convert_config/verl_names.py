"""Names of verl and what they are called here: of algorithms, engines, and keys of other releases."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.cli.convert_config.table import Made, Values

ESTIMATORS: Mapping[str, Made] = {
    "gae": {"workflow": "ppo", "algorithm.advantage.type": "gae"},
    "grpo": {"workflow": "grpo", "algorithm.advantage.type": "grpo"},
    "grpo_vectorized": {"workflow": "grpo", "algorithm.advantage.type": "grpo"},
    "gdpo": {"workflow": "grpo", "algorithm.advantage.type": "gdpo"},
    "reinforce_plus_plus": {"workflow": "grpo", "algorithm.advantage.type": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {
        "workflow": "grpo",
        "algorithm.advantage.type": "reinforce_pp",
        "algorithm.advantage.group_baseline": True,
    },
    "rloo": {"workflow": "grpo", "algorithm.advantage.type": "rloo"},
    "rloo_vectorized": {"workflow": "grpo", "algorithm.advantage.type": "rloo"},
    "opo": {"workflow": "grpo", "algorithm.advantage.type": "opo"},
    "gpg": {"workflow": "grpo", "algorithm.advantage.type": "gpg"},
    "grpo_passk": {"workflow": "grpo", "algorithm.advantage.type": "pass_at_k"},
    "remax": {"workflow": "remax", "algorithm.advantage.type": "remax"},
}
LOSSES: Mapping[str, Made] = {
    name: {"algorithm.policy_loss.type": ours}
    for name, ours in {
        "vanilla": "ppo",
        "gspo": "gspo",
        "geo_mean": "gmpo",
        "clip_cov": "clip_cov",
        "kl_cov": "kl_cov",
        "gpg": "reinforce",
        "cispo": "cispo",
        "sapo": "sapo",
    }.items()
} | {
    f"dppo_{name}": {"algorithm.policy_loss.type": "dppo", "algorithm.policy_loss.divergence": divergence}
    for name, divergence in (("tv", "total_variation"), ("kl", "kl"))
}
AGGREGATIONS: Mapping[str, Made] = {
    "token-mean": {"algorithm.aggregation": "token_mean"},
    "seq-mean-token-mean": {"algorithm.aggregation": "sequence_mean_token_mean"},
    "seq-mean-token-sum": {"algorithm.aggregation": "sequence_mean_token_sum"},
    "seq-mean-token-sum-norm": {"algorithm.aggregation": "sequence_mean_token_sum_norm"},
}
PENALTIES = {"kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES: Mapping[str, Made] = {name: {"optimizer.schedule": name} for name in ("constant", "cosine")}
ENGINES: Mapping[str, Made] = {
    "vllm": {"rollout.engine": "vllm"},
    "sglang": {"rollout.engine": "sglang"},
    "hf": {"rollout.engine": "native"},
}
OTHER_NAMES: Mapping[str, str] = {
    **{f"reward.{key}": key for key in ("custom_reward_function.path", "custom_reward_function.name")},
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    **{
        f"{section}.reward_kwargs.overlong_buffer_cfg.{key}": f"reward_model.overlong_buffer.{key}"
        for section in ("reward", "reward_model")
        for key in ("enable", "len", "penalty_factor")
    },
}
"""Keys that another release has under the name of a row."""


def with_names_of_rows(values: Values) -> tuple[Values, Mapping[str, str]]:
    """The settings under the names that rows have, and for each of these the name that was given.

    A whole configuration of verl has both names, of which one is null.
    """
    given = {theirs: name for name, theirs in OTHER_NAMES.items() if values.get(name) is not None}
    renamed = {theirs: values[name] for theirs, name in given.items()}
    return {key: value for key, value in values.items() if key not in OTHER_NAMES} | renamed, given
