"""The metrics of a run: their names and meanings, and which of them a recipe reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.algorithm import Algorithm
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.preferences import PREFERENCE_LOSSES
from leaderless.config import RecipeError, nearest
from leaderless.config.judges import JudgeOptions
from leaderless.config.rewards import CodeOptions, FormatOptions
from leaderless.planner.workflow.builtin_stages import spec_of
from leaderless.planner.workflow.products import PRODUCTS
from leaderless.planner.workflow.stage_spec import names_for, tagged

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.planner.workflow.workflow import Node, Workflow


class Metric(NamedTuple):
    """A number that a run writes into `metrics.jsonl`: what it means, and the settings that it needs, if any."""

    meaning: str
    needs: str = ""


_ROUNDS = "a workflow that repeats nodes, such as `dapo`"
_CRITIC = "a workflow with a critic, such as `ppo`"
_EXPERTS = "a model with experts"
_BODY = "a `body`"
_SAC = "the workflow `sac`"
_PLAYED = "an `environment`, or `online`"
_ONLINE = "`online`"
_TOOLS = "an `environment` with tools"
_STALE = "`channels`, `online`, or a workflow that repeats nodes"
_CONTINUOUS = "`channels` with `mode` set to `continuous`"
_SCHEDULE = "`schedule.replan_every_steps` above 0"
_PREFERENCES = "data with preferences"
_PAIRS = "`chosen` and `rejected` in `data.train`"
_JUDGE = "`reward.judge`"
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
    "episode/failed_environment": Metric("those in which the environment raised an error or gave up", _PLAYED),
    "episode/failed_tool": Metric("those in which a tool raised an error, or its server did not answer", _PLAYED),
    "episode/failed_timeout": Metric("those in which an answer took longer than its time limit", _PLAYED),
    "episode/failed_crash": Metric("those whose process ended", _PLAYED),
    "episode/failed_overflow": Metric("those that became too long", _PLAYED),
    "episode/repeated": Metric("further attempts after episodes that failed", _PLAYED),
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
        "penalties; left out in steps without any"
    ),
    "<role>/learning_rate": Metric("largest learning rate of the step's updates"),
    "<role>/entropy": Metric("entropy of the next token, in nats, averaged over tokens"),
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
        "effective sample size of the ratios of old_log_probs to rollout_log_probs, as a share of the tokens",
        _STALE,
    ),
    "correction/weight": Metric("mean weight of a token", "`algorithm.correction.type` other than `none`"),
    "correction/dropped": Metric("share of tokens of weight 0", "`algorithm.correction.type` other than `none`"),
    "guard/skipped/<role>": Metric(
        "updates that guards have skipped since the run began; left out while there are none"
    ),
    "guard/roll_backs": Metric("times that guards have rolled the run back; left out while there are none"),
    "schedule/switches": Metric(
        "times that another layout has replaced the one in force since the workers started", _SCHEDULE
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


def metrics_of(recipe: Recipe, nodes: Sequence[Node], workflow: Workflow) -> list[str]:
    """Names of the metrics that a run reports, given the nodes that run."""
    names = ["time/step", "data/epoch", *(f"time/{node.name}" for node in nodes)]
    if isinstance(recipe.data.train, Mapping):
        names += [f"data/epoch/{name}" for name in recipe.data.train]
    for node in nodes:
        spec = spec_of(node)
        settings = spec.settings_of(recipe, node)
        names += [tagged(name, node) for name in names_for(settings, node, spec.metrics)]
        if "reward_valid" in spec.writes_of(settings, node, workflow):
            names.append(tagged("reward/failed_share", node))
    if workflow.repeated:
        names += ["sampling/rounds", "sampling/carried", "sampling/missing"]
    return [*dict.fromkeys([*names, *_evaluation_metrics(recipe)])]


def check_best_metric(recipe: Recipe, nodes: Sequence[Node], workflow: Workflow) -> None:
    """Refuse a `checkpoint.best_metric` that no step reports, or also steps that write no checkpoint."""
    name = recipe.checkpoint.best_metric
    if name is None:
        return
    reported, known = metrics_of(recipe, nodes, workflow), known_metric(name)
    if name in reported:
        _check_evaluated_steps(recipe, name)
        return
    related = [other for other in reported if other.partition("/")[0] == name.partition("/")[0]]
    hint = f"; it reports {', '.join(related)}" if related else ("" if known else nearest(name, reported))
    if known:
        needs = f": needs {known.needs}" if known.needs else ": no node of its workflow does"
        raise RecipeError.at("checkpoint.best_metric", f"'{name}' is not reported by this recipe{needs}{hint}")
    raise RecipeError.at(
        "checkpoint.best_metric",
        f"no metric is called '{name}'{hint}; a custom stage declares what it reports with @stage(metrics=[...])",
    )


def _check_evaluated_steps(recipe: Recipe, name: str) -> None:
    """The step with the best evaluation needs a checkpoint, so every evaluated step does."""
    evaluated, written = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    if name in _evaluation_metrics(recipe) and (written == 0 or evaluated % written):
        raise RecipeError.at(
            "checkpoint.every_steps",
            f"is {written}, so that not every step that reports '{name}' (evaluation.every_steps={evaluated}) writes a "
            f"checkpoint, and the best could be lost: set it to {evaluated}, or to a number that divides {evaluated}",
        )


def _evaluation_metrics(recipe: Recipe) -> list[str]:
    config, k = recipe.evaluation, recipe.evaluation.responses_per_prompt
    if not config.every_steps:
        return []
    if recipe.data.preferences is not None:
        own = ["accuracy"] * (recipe.data.preferences == "pairs")
        return [*(f"evaluation/{name}" for name in ("loss", "margin", *own)), "time/evaluate"]
    names = [f"evaluation/mean@{k}", "evaluation/failed", "time/evaluate"]
    names += PRODUCTS[recipe.product].evaluation_metrics
    names += [f"evaluation/pass@{j}" for j in pass_at_sizes(k)]
    options = recipe.reward.options()
    decides = [options.get(config.metric)] if config.metric else [*options.values()]
    if k > 1 and not all(isinstance(one, CodeOptions | FormatOptions | JudgeOptions) for one in decides):
        names.append(f"evaluation/maj@{k}")
    return [*names, *(["evaluation/not_applicable"] if config.metric else [])]


def pass_at_sizes(k: int) -> list[int]:
    """The j for which pass@j is reported with k responses to a prompt: powers of 2 and k itself, without 1."""
    return sorted({*(2**e for e in range(1, k.bit_length())), k} - {1})
