"""The built-in metrics of a run: their names and meanings. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.algorithm import Algorithm
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.preferences import PREFERENCE_LOSSES
from leaderless.config.failures import FAILURE_FACTS


class Metric(NamedTuple):
    """A number that a run writes into `metrics.jsonl`.

    Attributes:
        meaning: Meaning, as a noun phrase.
        needs: Settings that it needs; empty if there are none.
        is_total: Whether it counts from the beginning of the run, or of its workers, instead of in the step.
    """

    meaning: str
    needs: str = ""
    is_total: bool = False


_ROUNDS = "a workflow that repeats nodes, such as `dapo`"
_CRITIC = "a workflow with a critic, such as `ppo`"
_EXPERTS = "a model with experts"
_BODY = "a `body`"
_SAC = "the workflow `sac`"
_PLAYED = "an `environment`, or `online`"
_ONLINE = "`online`"
_TOOLS = "an `environment` with tools"
_DRAFTS = "`speculative_config` in `rollout.external.arguments`"
_CORRECTED = "`algorithm.correction.type` other than `none`, or an engine of low precision"
_STALE = "`channels`, `online`, or a workflow that repeats nodes"
_CONTINUOUS = "`channels` with `mode` set to `continuous`"
_SCHEDULE = "`schedule.replan_every_steps` above 0"
_PREFERENCES = "data with preferences"
_PAIRS = "`chosen` and `rejected` in `data.train`"
_JUDGE = "`reward.judge`"
_APART = "ranks that use a trained model of other ranks"
_EVALUATION = "`evaluation.every_steps` above 0"


def _of(setting: str, types: Mapping[str, type[Algorithm]], prefix: str = "") -> dict[str, Metric]:
    """The metrics that the types of a setting of the algorithm declare."""
    return {
        f"{prefix}{name}": Metric(meaning, f"`algorithm.{setting}.type` set to `{kind}`")
        for kind, found in types.items()
        for name, meaning in found.metrics.items()
    }


METRICS: dict[str, Metric] = {
    "evaluation/mean@<k>": Metric("share of correct responses on held-out prompts", _EVALUATION),
    "evaluation/pass@<j>": Metric(
        "chance that one of j responses to a held-out prompt is correct",
        f"{_EVALUATION}, and `evaluation.responses_per_prompt` above 1",
    ),
    "evaluation/maj@<k>": Metric(
        "share of held-out prompts whose most frequent answer is correct",
        f"{_EVALUATION}, `evaluation.responses_per_prompt` above 1, and a reward that finds answers",
    ),
    "evaluation/failed": Metric("responses to held-out prompts that could not be graded", _EVALUATION),
    "evaluation/truncated": Metric(
        "share of responses to held-out prompts, or of episodes, that were cut at a limit", _EVALUATION
    ),
    "evaluation/response_tokens": Metric("mean number of sampled tokens of such a response", _EVALUATION),
    "evaluation/not_applicable": Metric(
        "responses to held-out prompts that `evaluation.metric` does not apply to; left out if there are none",
        f"{_EVALUATION}, and `evaluation.metric`",
    ),
    "evaluation/accuracy": Metric(
        "share of held-out pairs whose chosen response has the larger reward", f"{_EVALUATION}, and {_PAIRS}"
    ),
    "evaluation/margin": Metric(
        "mean difference of the rewards of both responses to a held-out prompt", f"{_EVALUATION}, and {_PREFERENCES}"
    ),
    "evaluation/loss": Metric("mean loss of held-out rows, without imitation", f"{_EVALUATION}, and {_PREFERENCES}"),
    "reward/mean": Metric("mean reward of a response"),
    "reward/std": Metric("standard deviation of the rewards"),
    "reward/<name>": Metric("mean of one reward before weighting, over the responses that it could grade"),
    "reward/failed": Metric("responses whose reward could not be computed"),
    "reward/failed_share": Metric("their share of all responses of the step"),
    "judge/failed_share": Metric("share of responses that a judge should grade and could not", _JUDGE),
    "judge/cached_share": Metric("share of questions whose answers were known", _JUDGE),
    "judge/requests": Metric("mean number of requests that any other question took", _JUDGE),
    "judge/latency_s": Metric("mean seconds until it was answered, with repeated requests", _JUDGE),
    "judge/contradictions": Metric(
        "share of comparisons in which the judge says something else when the responses are swapped; they are ties",
        "`reward.judge` with `pairwise`",
    ),
    "reward/overlong_penalty": Metric(
        "mean of what is added to the reward of a long response, at most 0",
        "`algorithm.overlong.buffer_tokens` above 0",
    ),
    "reward/kl": Metric(
        "divergence from the reference that is subtracted from the rewards, in nats per token",
        "`algorithm.kl.coefficient` above 0 and `algorithm.kl.place` set to `reward`",
    ),
    "rollout/response_tokens": Metric("mean number of sampled tokens per response"),
    "rollout/truncated": Metric("share of responses that were cut at `rollout.max_response_tokens`"),
    "rollout/tokens_per_s": Metric("sampled tokens per second of rollout, over all ranks"),
    "rollout/drafts_accepted": Metric(
        "share of drafted tokens that the model has accepted, in responses that ended by themselves", _DRAFTS
    ),
    "rollout/engine_busy": Metric("share of the rollout's time in which the engine works", _PLAYED),
    "rollout/prefix_hits": Metric(
        "share of the tokens of earlier turns whose keys and values the engine still had", _PLAYED
    ),
    "body/success": Metric("share of the episodes of a body in which it did its task", _BODY),
    "body/steps": Metric("mean number of steps of its environment in an episode", _BODY),
    "body/decisions": Metric("mean number of decisions in an episode", _BODY),
    "body/truncated": Metric("share of episodes that were cut although their task went on", _BODY),
    "body/failed": Metric("share of episodes that could not be finished; no other metric counts them", _BODY),
    "sac/transitions": Metric("transitions that are kept, on all ranks", _SAC),
    "sac/demonstrations": Metric("transitions of demonstrations, and of people who helped", _SAC),
    "sac/updates": Metric("updates of the policy in the step", _SAC),
    "sac/critic_loss": Metric("squared error of the critics in the last update", _SAC),
    "sac/actor_loss": Metric("loss of the policy in the last update", _SAC),
    "sac/entropy": Metric("entropy of decisions in the last update, of actions from -1 to 1", _SAC),
    "sac/temperature": Metric("weight of the entropy", _SAC),
    "body/steps_per_s": Metric("steps of environments per second of rollout, with decisions, over all ranks", _BODY),
    "episode/turns": Metric("mean number of messages of the policy in an episode", _PLAYED),
    "episode/tokens": Metric("mean number of tokens of an episode, with the messages to the policy", _PLAYED),
    "episode/told_tokens": Metric("mean number of those that the policy did not sample", _PLAYED),
    "episode/samples": Metric("mean number of training sequences that an episode becomes", _PLAYED),
    "episode/cut": Metric("share of episodes that ended at a limit of turns or tokens", _PLAYED),
    "episode/drift": Metric(
        "share of episodes in which the model has seen other tokens than if the chat template had written the "
        "conversation anew; without those of programs that ask with plain texts or tools of their own",
        _PLAYED,
    ),
    "episode/failed": Metric("episodes that failed, and are left out", _PLAYED),
    "episode/repeated": Metric("further attempts after failures that are `retried`", _PLAYED),
    **{
        f"failure/{kind}": Metric(
            f"share of episodes that met a failure of this kind, whatever was done about it: {facts.meaning}",
            _PLAYED + " and a `reward`" * (kind == "grader"),
        )
        for kind, facts in FAILURE_FACTS.items()
    },
    "episode/model_s": Metric("mean seconds of an episode in which it waited for the policy", _PLAYED),
    "episode/environment_s": Metric("mean seconds of an episode in which it waited for the environment", _PLAYED),
    "episode/grading_s": Metric(
        "mean seconds that the recipe's rewards of an episode took", f"{_PLAYED} and a `reward`"
    ),
    "episode/tools_s": Metric("mean seconds of an episode in which it waited for tools", _TOOLS),
    "tool/calls": Metric("mean number of calls of tools in an episode", _TOOLS),
    "tool/misread": Metric("share of calls that cannot be read, or name no tool", _TOOLS),
    "tool/calls/<name>": Metric("mean number of calls of one tool in an episode", _TOOLS),
    "tool/refused/<name>": Metric("share of its calls that have wrong arguments, or that it refused", _TOOLS),
    "online/requests": Metric("requests of clients since the step before, unfinished ones included", _ONLINE),
    "online/failed": Metric("requests that were answered with an error of the server", _ONLINE),
    "online/acceptance": Metric("mean reward that clients' feedback has given to the step's responses", _ONLINE),
    "online/waiting": Metric("responses with feedback that wait for the next step", _ONLINE),
    "online/without_feedback": Metric(
        "responses that were dropped because no feedback came for `online.feedback_timeout_s`", _ONLINE
    ),
    "online/stale": Metric("responses that were dropped because they were older than `online.max_staleness`", _ONLINE),
    "online/interrupted": Metric("responses that were sampled by weights of several versions", _ONLINE),
    "online/latency_s": Metric(
        "mean seconds from a request to its reply, where the engine was at work all along", _ONLINE
    ),
    "online/latency_p95_s": Metric("the same, exceeded by one request in twenty; on the slowest rank", _ONLINE),
    "online/latency_training_s": Metric(
        "mean seconds of requests that came, or were unfinished, while the rank was training", _ONLINE
    ),
    "online/latency_training_p95_s": Metric(
        "the same, exceeded by one request in twenty; on the slowest rank", _ONLINE
    ),
    "rollout/staleness": Metric("mean number of optimizer updates between sampling a token and training on it"),
    "staleness/oldest": Metric("mean of the same for the oldest token of each sample", _STALE),
    "staleness/share/<age>": Metric("share of samples whose oldest token is that many updates old", _STALE),
    "generation/response_tokens": Metric(
        "mean number of tokens of the responses that ended or were dropped since the last share: what was generated, "
        "next to `rollout/response_tokens`, what is trained",
        _CONTINUOUS,
    ),
    "generation/voided_tokens": Metric("tokens of groups that were dropped", _CONTINUOUS),
    "generation/canceled": Metric(
        "groups that were dropped because they would have been too old, and are begun again after all others",
        _CONTINUOUS,
    ),
    "generation/deferred": Metric("groups of the step that later groups have overtaken", _CONTINUOUS),
    "generation/open": Metric("unfinished groups when a share is complete, over all ranks", _CONTINUOUS),
    "group/no_signal": Metric("share of groups without an advantage, which change no weight"),
    **_of("advantage", ADVANTAGES),
    "sampling/kept": Metric("groups that dynamic sampling kept", _ROUNDS),
    "sampling/dropped_all_right": Metric("groups that it dropped because all rewards were equal and above 0", _ROUNDS),
    "sampling/dropped_all_wrong": Metric(
        "groups that it dropped because all rewards were equal and at most 0", _ROUNDS
    ),
    "sampling/dropped_failed": Metric("groups that it dropped because fewer than two rewards were computed", _ROUNDS),
    "sampling/rounds": Metric("rounds of new prompts that filled the step", _ROUNDS),
    "sampling/carried": Metric("surplus: groups that wait for the next step", _ROUNDS),
    "sampling/missing": Metric("groups that the last round did not find", _ROUNDS),
    "<role>/loss": Metric("loss that the optimizer lowers, the mean over the updates of the step"),
    "<role>/grad_norm": Metric("largest global L2 norm of a gradient before clipping"),
    "<role>/updates_without_signal": Metric(
        "updates since the run began that were not made, as their gradient was exactly 0, without advantages and "
        "penalties; left out in steps without any",
        is_total=True,
    ),
    "<role>/learning_rate": Metric("largest learning rate of the step's updates"),
    "<role>/entropy": Metric("entropy of the next token, in nats, averaged over tokens"),
    "<role>/divergence": Metric(
        "divergence of the student from the teacher, in nats per token", "a workflow such as `gkd`"
    ),
    "teacher/left_out": Metric(
        "share of samples without a teacher, whose prompt would be too long",
        "`algorithm.distillation.context` or `align: text`",
    ),
    "teacher/aligned": Metric(
        "share of sampled tokens at which a teacher with another tokenizer gives words",
        "`algorithm.distillation.align: text`",
    ),
    "<role>/clip_fraction": Metric("share of tokens whose gradient the loss clips"),
    "<role>/expert_entropy": Metric(
        "entropy of the loads of experts where tokens are sampled, from 0 to 1 for equal loads; the mean over layers",
        _EXPERTS,
    ),
    "<role>/expert_peak": Metric(
        "load of the busiest expert of a layer, as a multiple of an equal load; the mean over layers", _EXPERTS
    ),
    "<role>/expert_balance": Metric(
        "loss of unequal loads, 1 where they are equal, the mean over layers; see algorithm.expert_balance", _EXPERTS
    ),
    "<role>/joint_ratio": Metric(
        "mean ratio by which the role's update has scaled the advantages of other roles", "a workflow such as `happo`"
    ),
    **_of("policy_loss", POLICY_LOSSES, "<role>/"),
    **_of("preference_loss", PREFERENCE_LOSSES, "<role>/"),
    "<role>/accuracy": Metric("share of pairs whose chosen response has the larger reward", _PAIRS),
    "<role>/margin": Metric(
        "mean difference of the rewards of chosen and rejected responses; of single ones, mean reward with the sign of "
        "what is desirable",
        _PREFERENCES,
    ),
    "<role>/reward_chosen": Metric("mean reward of chosen, or desirable, responses", _PREFERENCES),
    "<role>/reward_rejected": Metric("mean reward of rejected, or undesirable, responses", _PREFERENCES),
    "<role>/log_prob_chosen": Metric("mean log-probability of a chosen, or desirable, response", _PREFERENCES),
    "<role>/log_prob_rejected": Metric("mean log-probability of a rejected, or undesirable, response", _PREFERENCES),
    "<role>/sft_loss": Metric(
        "mean negative log-likelihood of a token of chosen, or desirable, responses",
        "`algorithm.preference_loss.sft_coefficient` above 0",
    ),
    "<role>/kl": Metric(
        "divergence from the reference in the loss, in nats per token",
        "`algorithm.kl.coefficient` above 0 and `algorithm.kl.place` set to `loss`",
    ),
    "<role>/value_mean": Metric("mean of the critic's values over all tokens", _CRITIC),
    "<role>/explained_variance": Metric("share of the returns' variance that the critic explains", _CRITIC),
    "policy/kl_coefficient": Metric("weight of the KL penalty", "`algorithm.kl.target`"),
    "mismatch/abs_mean": Metric("mean of |rollout_log_probs - old_log_probs| over tokens"),
    "mismatch/abs_max": Metric("largest |rollout_log_probs - old_log_probs| of a token"),
    "mismatch/kl": Metric("the same disagreement as a divergence, in nats per token"),
    "mismatch/kl_by_age/<age>": Metric("the same for tokens of an age in updates", _STALE),
    "mismatch/effective_samples": Metric(
        "effective sample size of the ratios of old_log_probs to rollout_log_probs, as a share of the tokens"
    ),
    "correction/weight": Metric("mean weight of a token", _CORRECTED),
    "correction/dropped": Metric("share of tokens of weight 0", _CORRECTED),
    "guard/skipped/<role>": Metric(
        "updates that guards have skipped since the run began; left out while there are none", is_total=True
    ),
    "guard/roll_backs": Metric(
        "times that guards have rolled the run back; left out while there are none", is_total=True
    ),
    "schedule/switches": Metric(
        "times that another layout has replaced the one in force since the workers started", _SCHEDULE, is_total=True
    ),
    "schedule/gain": Metric(
        "share of a step's seconds that the fastest layout is expected to save, after a choice; 0 for the one in force",
        _SCHEDULE,
    ),
    "throughput/tokens_per_s": Metric("tokens of all samples, prompts included, per second of the whole step"),
    "data/epoch": Metric("passes over the training data; of a mixture, over the dataset that is furthest behind"),
    "data/epoch/<name>": Metric("passes over one dataset of a mixture", "a mixture as `data.train`"),
    "time/step": Metric("seconds of the whole step, without evaluation and checkpoints"),
    "time/<entry>": Metric(
        "seconds of one entry of the schedule on the slowest rank: a node by its name, `load`, "
        "`reshard(a->0-3)`, `weights(policy->0-3)`"
    ),
    "sent/bytes/<entry>": Metric(
        "bytes of new weights that have left the ranks that train them since the last line, by `weights(policy->0-3)`",
        _APART,
    ),
    "sent/whole_bytes/<entry>": Metric("the same if all numbers had been sent", _APART),
    "sent/changed/<entry>": Metric(
        "share of these numbers that differ from those sent before; left out where all are sent", _APART
    ),
    "sent/seconds/<entry>": Metric(
        "seconds until they had left the slowest rank, with waits for the ranks that receive them", _APART
    ),
    "time/waiting": Metric(
        "seconds that the slowest rank waited for windows of the step", "`batch.windows_per_step` above 1"
    ),
    "time/evaluate": Metric("seconds of the evaluation", _EVALUATION),
    "seconds/<ranks>/<state>": Metric(
        "seconds that ranks have spent in one state since the last line, the mean over ranks that run the same nodes; "
        "all states of a pool add up to the time that has passed, with the evaluation and the checkpoint of the step "
        "before, and states that no rank was in are left out"
    ),
}
"""Built-in metrics by name; a part in angle brackets stands for a name or number of the recipe."""


def known_metric(name: str) -> Metric | None:
    """The built-in metric of a full name, such as `evaluation/mean@4` or, of a role, `reward/mean/solver`.

    None if there is none.
    """
    return _known_metric(name) or _known_metric(name.rpartition("/")[0])


def _known_metric(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    patterns = {
        metric: re.sub("<[jk]>", r"\\d+", re.sub("<[a-z]{2,}>", "[^/]+", key)) for key, metric in METRICS.items()
    }
    return next((metric for metric, pattern in patterns.items() if re.fullmatch(pattern, name)), None)
